"""Scores the vectors of an endpoint on tasks of MTEB, or on a file of your own sentence pairs.

pip install mteb
python mteb_endpoint.py http://127.0.0.1:8000 --model all-MiniLM-L6-v2 --tasks STSBenchmark SciFact

Works with every server that has OpenAI's `/v1/embeddings`. Needs nothing of emberforge. docs/quality.md explains it.
"""

import argparse
import base64
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    import mteb
    import numpy as np
    import requests
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.cache import ResultCache
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.types import PromptType
    from requests.adapters import HTTPAdapter
    from urllib3.util.retry import Retry
except ModuleNotFoundError as error:
    how = f"{sys.executable} -m pip install mteb"
    raise SystemExit(f"this script needs mteb, but the module {error.name} is missing here; install mteb with: {how}") from None

_AT_ONCE = 8  # requests in flight
_TEXTS = 32  # texts of a request


class Endpoint(AbsEncoder):  # type: ignore[misc]
    """An encoder of MTEB whose vectors come from a server.

    Args:
        url: the server's root, without `/v1`.
        prompts: the text in front of each "query", "document", and other "text". `{instruction}` stands for MTEB's instruction
            of the task.
    """

    def __init__(self, url: str, model: str, api_key: str | None = None, prompts: dict[str, str] | None = None) -> None:
        self._url, self._model, self._prompts = f"{url.rstrip('/')}/v1/embeddings", model, prompts or {}
        self._session = requests.Session()
        again = Retry(total=10, backoff_factor=1, status_forcelist=[429, 503], allowed_methods=None)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again, pool_maxsize=_AT_ONCE))
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"
        self.mteb_model_meta = self._meta()

    def _meta(self) -> ModelMeta:
        """MTEB keeps results by name, revision and experiment: another revision or other prompts have results of their own."""
        about: dict[str, Any] = {"name": self._model if "/" in self._model else f"endpoint/{self._model}"}
        about["revision"] = self._answer(["a text"]).headers.get("x-model-revision", "unknown")
        if self._prompts:
            about["experiment_kwargs"] = {"prompts": hashlib.sha256(repr(sorted(self._prompts.items())).encode()).hexdigest()[:8]}
        return ModelMeta.create_empty(overwrites=about)

    def encode(
        self,
        inputs: Iterable[dict[str, list[str]]],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Returns: [N, dims] float32, in the order of the texts. A text without characters gets a vector of zeros."""
        prompt = self._prompts.get(prompt_type.value if prompt_type else "text", "")
        if "{instruction}" in prompt:
            prompt = prompt.replace("{instruction}", self.get_instruction(task_metadata, prompt_type))
        texts = [text for batch in inputs for text in batch["text"]]
        filled = [index for index, text in enumerate(texts) if text.strip()]
        parts = [[prompt + texts[index] for index in filled[start : start + _TEXTS]] for start in range(0, len(filled), _TEXTS)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            vectors = np.concatenate(list(pool.map(self._vectors, parts)))
        result = np.zeros((len(texts), vectors.shape[1]), dtype=np.float32)
        result[filled] = vectors
        return result

    def _vectors(self, texts: list[str]) -> np.ndarray:
        """[len(texts), dims] float32"""
        rows = sorted(self._answer(texts).json()["data"], key=lambda row: row["index"])
        return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), dtype="<f4") for row in rows])

    def _answer(self, texts: list[str]) -> requests.Response:
        body = {"model": self._model, "input": texts, "encoding_format": "base64"}
        answer = self._session.post(self._url, json=body, timeout=300)
        if answer.status_code != 200:
            raise SystemExit(f"{self._url} answered {answer.status_code}: {answer.text[:500]}")
        return answer


class Pairs(AbsTaskSTS):  # type: ignore[misc]
    """A task from a file: each line is {"sentence1": ..., "sentence2": ..., "score": 0 to 5}. Needs no network."""

    def __init__(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        self.metadata = TaskMetadata(
            name=file.stem,
            description="Sentence pairs of a file, with their similarity from 0 to 5",
            dataset={"path": str(file), "revision": hashlib.sha256(text.encode()).hexdigest()},
            type="STS",
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
            prompt=AbsTaskSTS.abstask_prompt,
        )
        super().__init__()
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        self.dataset = {"default": DatasetDict({"test": Dataset.from_list(rows)})}
        self.data_loaded = True


def evaluate(endpoint: Endpoint, tasks: Sequence[Any], output: Path) -> dict[str, float]:
    """The main score of each task. Finished tasks are kept in `output`, and are not computed again."""
    done = mteb.evaluate(endpoint, tasks, cache=ResultCache(output))
    return {result.task_name: result.get_score() for result in done.task_results}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="of the server, as in http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="as the server names it")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tasks", nargs="+", help="names of MTEB's tasks")
    what.add_argument("--benchmark", help='a benchmark of MTEB, as in "MTEB(eng, v2)"')
    what.add_argument("--pairs", type=Path, help="a jsonl file of sentence1, sentence2 and score (0 to 5)")
    parser.add_argument(
        "--query-prompt", help="text in front of queries; {instruction} stands for MTEB's instruction of the task"
    )
    parser.add_argument("--document-prompt", help="text in front of documents")
    parser.add_argument("--text-prompt", help="text in front of the texts of tasks without queries")
    parser.add_argument("--output", type=Path, default=Path("mteb-results"), help="folder of the results")
    given = parser.parse_args()
    prompts = {"query": given.query_prompt, "document": given.document_prompt, "text": given.text_prompt}
    # A newline cannot be typed in every shell.
    prompts = {kind: text.replace("\\n", "\n") for kind, text in prompts.items() if text}
    if given.pairs:
        tasks = [Pairs(given.pairs)]
    else:
        tasks = list(mteb.get_benchmark(given.benchmark) if given.benchmark else mteb.get_tasks(tasks=given.tasks))
    endpoint = Endpoint(given.url, given.model, os.environ.get("EMBERFORGE_API_KEY"), prompts)
    scores = evaluate(endpoint, tasks, given.output)
    for name, score in scores.items():
        print(f"{name:40} {score:.4f}")
    print(f"{'mean':40} {np.mean(list(scores.values())):.4f}")


if __name__ == "__main__":
    main()
