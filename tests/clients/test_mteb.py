"""docs/mteb_endpoint.py: on each kind of MTEB task, a server gets the same score as sentence-transformers with its model."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import KEY, Server, close
from material import PROMPT, TEXTS

mteb = pytest.importorskip("mteb", reason="not run: `make test-mteb` installs mteb")
small = import_module("mteb.mocks.mock_tasks")  # MTEB's own tasks with two examples each, for tests without a network
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
mteb_endpoint = import_module("mteb_endpoint")
KINDS = ["STS", "Retrieval", "Reranking", "Classification", "PairClassification", "BitextMining", "Summarization"]


@pytest.fixture(scope="module")
def local(prepared: Path) -> Any:
    """The embedded model in this process. Its queries get a prompt."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(prepared / "prompted"), device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_each_kind_has_the_score_of_sentence_transformers(plain_server: Server, local: Any, kind: str) -> None:
    endpoint = mteb_endpoint.Endpoint(plain_server.root, plain_server.models[0], prompts={"query": PROMPT})

    def score(model: Any) -> float:
        (result,) = mteb.evaluate(model, [getattr(small, f"Mock{kind}Task")()], cache=None).task_results
        return float(result.get_score())

    assert score(endpoint) == pytest.approx(score(local), abs=1e-4)


def test_the_script_scores_a_file_of_pairs(plain_server: Server, tmp_path: Path) -> None:
    pairs = ROOT / "tests" / "sentence_pairs.jsonl"
    script = [sys.executable, str(ROOT / "docs" / "mteb_endpoint.py"), plain_server.root, "--model", plain_server.models[0]]
    done = subprocess.run([*script, "--pairs", str(pairs)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    scores = dict(line.split() for line in done.stdout.splitlines())
    assert float(scores["sentence_pairs"]) == pytest.approx(0.8578, abs=1e-3)  # the score of sentence-transformers
    assert [each.name for each in (tmp_path / "mteb-results").rglob("sentence_pairs.json")]


@pytest.mark.parametrize(
    ("prompts", "expected"), [({}, "embeddings"), ({"text": PROMPT}, "prompted"), ({"query": "no"}, "embeddings")]
)
def test_texts_get_their_prompt(server: Server, reference: dict[str, Any], prompts: dict[str, str], expected: str) -> None:
    endpoint = mteb_endpoint.Endpoint(server.root, server.models[0], KEY, prompts)
    task = small.MockSTSTask()
    batches = [{"text": [*TEXTS[:1], " "]}, {"text": TEXTS[1:]}]
    vectors = endpoint.encode(batches, task_metadata=task.metadata, hf_split="test", hf_subset="default")
    close(vectors[0], reference[expected][0])
    close(vectors[2:], reference[expected][1:])
    assert not np.any(vectors[1])  # a text without characters


def test_an_instruction_goes_in_front_of_queries(server: Server) -> None:
    task = small.MockRetrievalTask()
    where = {
        "task_metadata": task.metadata,
        "hf_split": "test",
        "hf_subset": "default",
        "prompt_type": mteb.types.PromptType.query,
    }
    instruction = mteb_endpoint.Endpoint(server.root, server.models[0], KEY).get_instruction(
        task.metadata, mteb.types.PromptType.query
    )
    asked = mteb_endpoint.Endpoint(server.root, server.models[0], KEY, {"query": "Instruct: {instruction}\nQuery:"})
    plain = mteb_endpoint.Endpoint(server.root, server.models[0], KEY)
    assert instruction
    close(asked.encode([{"text": ["a"]}], **where), plain.encode([{"text": [f"Instruct: {instruction}\nQuery:a"]}], **where))


def test_results_of_other_prompts_are_kept_apart(server: Server) -> None:
    one, other, again = (mteb_endpoint.Endpoint(server.root, server.models[0], KEY, {"text": text}) for text in ("a", "b", "a"))
    assert one.mteb_model_meta == again.mteb_model_meta != other.mteb_model_meta


def test_a_refusal_ends_the_script_with_its_reason(server: Server) -> None:
    with pytest.raises(SystemExit, match="answered 401"):
        mteb_endpoint.Endpoint(server.root, server.models[0])
