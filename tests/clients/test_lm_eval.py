"""lm-eval scores and continues texts. The loglikelihoods equal those of transformers, in each form of a request."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Server
from material import FACTS

pytest.importorskip("lm_eval", reason="not run: `make test-lm-eval` installs lm-eval")

SCORED = """
task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
CONTINUED = """
task: says
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data, cache = folder / "facts.jsonl", folder / "cache"
    data.write_text("\n".join(json.dumps({"question": question, "choices": choices}) for question, choices in FACTS))
    for name, text in (("facts", SCORED), ("says", CONTINUED)):
        (folder / f"{name}.yaml").write_text(text.format(data=data, cache=cache))
    return folder


def evaluate(server: Server, tasks: Path, kind: str, path: str, names: list[str], **options: Any) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=kind,
        model_args={"base_url": server.root + path, "model": server.models[0], "max_retries": 1, **options},
        tasks=names,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        bootstrap_iters=0,
    )


@pytest.mark.parametrize("how", ["ids", "ids in batches", "text", "ids of the server's tokenizer"])
def test_loglikelihoods(generator_server: Server, tasks: Path, reference: dict[str, Any], how: str) -> None:
    ours = {"tokenizer_backend": "huggingface", "tokenizer": reference["tokenizer"]}
    options: dict[str, Any] = {
        "ids": ours,
        "ids in batches": ours | {"batch_size": 4},
        "text": ours | {"tokenized_requests": False},
        "ids of the server's tokenizer": {"tokenizer_backend": "remote"},
    }[how]
    done = evaluate(generator_server, tasks, "local-completions", "/v1/completions", ["facts"], **options)
    told = [each for sample in done["samples"]["facts"] for each in sample["filtered_resps"]]
    expected = reference["loglikelihoods"]
    np.testing.assert_allclose([each[0] for each in told], [each[0] for each in expected], atol=1e-3)
    assert [each[1] for each in told] == [each[1] for each in expected]
    assert done["results"]["facts"]["acc,none"] == 1.0


def test_continuations(generator_server: Server, tasks: Path, reference: dict[str, Any]) -> None:
    tokenizer = {"tokenizer_backend": "huggingface", "tokenizer": reference["tokenizer"]}
    text = evaluate(generator_server, tasks, "local-completions", "/v1/completions", ["says"], **tokenizer)
    chat = evaluate(generator_server, tasks, "local-chat-completions", "/v1/chat/completions", ["says"])
    assert text["samples"]["says"][0]["filtered_resps"] == [" Paris."]
    assert all(sample["filtered_resps"][0] for sample in chat["samples"]["says"])
