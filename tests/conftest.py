"""Fixtures the whole suite shares: the embedded model and tiny random checkpoints saved by transformers.

Also here: what a run says about the tests that this machine cannot run.
"""

import os
import secrets

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ["RAY_AUTH_MODE"] = "token"
# Ray reads the token once in a process. A test without a cluster would find none, and a cluster that starts later takes this one.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# torch's threads sleep between operations. They would spin, which takes the cores from the tests' other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import transformers
from parity import gte_reference, jina_bert_reference, nomic_bert_reference
from scheduling import NUM_WORKERS, WITHOUT_RAY, RayApart, rank
from tiny_tokenizer import save_tokenizer
from xdist.remote import Producer

from cluster import logs
from engine.hub import EMBEDDED_MODEL, resolve_model

collect_ignore = ["clients"]  # in an environment of their own: make test-clients

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Tiny:
    """How transformers makes a tiny random checkpoint of a kind. An encoder has [CLS] and [SEP] around a text and cls pooling,
    others an end-of-text token and last-token pooling."""

    config: type[Any]
    model: type[Any]
    shape: dict[str, Any]
    encoder: bool = True


_SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
_DISTILLED = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 128}
_DISENTANGLED = _SHAPE | {
    "max_position_embeddings": 128, "relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
}  # fmt: skip
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
# A window well below the lengths of the tests; two local layers between two global ones.
_LOCAL = _SHAPE | {"num_hidden_layers": 4, "local_attention": 16, "max_position_embeddings": 128, "pad_token_id": 0}
_NOMIC = {
    "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "n_positions": 128, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu", "type_vocab_size": 2, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None, "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
    "moe_every_n_layers": 0, "num_experts": 0, "moe_top_k": 0,
}  # fmt: skip
_EXPERTS = {"moe_every_n_layers": 2, "num_experts": 4, "moe_top_k": 2, "type_vocab_size": 1, "n_layer": 4}
_GTE = _SHAPE | {"max_position_embeddings": 128, "pad_token_id": 0, "type_vocab_size": 2}
_NTK = {"rope_parameters": {"type": "ntk", "rope_theta": 500.0, "factor": 8.0}}
_JINA = _SHAPE | {"max_position_embeddings": 128, "layer_norm_eps": 1e-12, "type_vocab_size": 2, "qk_post_norm": False}
_JINA |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
_JINA_CODE = {"qk_post_norm": True, "auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}
_NARROW = _SHAPE | {"num_key_value_heads": 2, "max_position_embeddings": 256}
_GEMMA3 = _GROUPED | {"num_hidden_layers": 4, "sliding_window": 10, "sliding_window_pattern": 3}
TINY = {
    "bert": Tiny(transformers.BertConfig, transformers.BertModel, _SHAPE | {"max_position_embeddings": 128}),
    "bert_lm": Tiny(transformers.BertConfig, transformers.BertForMaskedLM, _SHAPE | {"max_position_embeddings": 128}),
    "roberta": Tiny(transformers.RobertaConfig, transformers.RobertaModel, _SHAPE | {"max_position_embeddings": 130}),
    "roberta_lm": Tiny(transformers.RobertaConfig, transformers.RobertaForMaskedLM, _SHAPE | {"max_position_embeddings": 130}),
    "camembert": Tiny(transformers.CamembertConfig, transformers.CamembertForMaskedLM, _SHAPE | {"max_position_embeddings": 130}),
    "xlm_roberta": Tiny(transformers.XLMRobertaConfig, transformers.XLMRobertaModel, _SHAPE | {"max_position_embeddings": 130}),
    "xlm_roberta_lm": Tiny(
        transformers.XLMRobertaConfig, transformers.XLMRobertaForMaskedLM, _SHAPE | {"max_position_embeddings": 130}
    ),
    "distilbert": Tiny(transformers.DistilBertConfig, transformers.DistilBertModel, _DISTILLED),
    "distilbert_lm": Tiny(transformers.DistilBertConfig, transformers.DistilBertForMaskedLM, _DISTILLED),
    "mpnet": Tiny(transformers.MPNetConfig, transformers.MPNetModel, _SHAPE | {"max_position_embeddings": 130}),
    "mpnet_lm": Tiny(transformers.MPNetConfig, transformers.MPNetForMaskedLM, _SHAPE | {"max_position_embeddings": 130}),
    "deberta": Tiny(transformers.DebertaV2Config, transformers.DebertaV2Model, _DISENTANGLED),
    "deberta_lm": Tiny(transformers.DebertaV2Config, transformers.DebertaV2ForMaskedLM, _DISENTANGLED),
    "qwen3": Tiny(transformers.Qwen3Config, transformers.Qwen3Model, _GROUPED, encoder=False),
    "qwen3_lm": Tiny(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, _GROUPED, encoder=False),
    "modernbert": Tiny(transformers.ModernBertConfig, transformers.ModernBertModel, _LOCAL),
    "modernbert_lm": Tiny(transformers.ModernBertConfig, transformers.ModernBertForMaskedLM, _LOCAL),
    "nomic_bert": Tiny(transformers.NomicBertConfig, transformers.NomicBertModel, _SHAPE | {"max_position_embeddings": 128}),
    "nomic_bert_lm": Tiny(transformers.NomicBertConfig, transformers.NomicBertForMaskedLM, _SHAPE),
    "nomic_bert_authors": Tiny(nomic_bert_reference.NomicConfig, nomic_bert_reference.NomicBertModel, _NOMIC),
    "nomic_bert_moe": Tiny(nomic_bert_reference.NomicConfig, nomic_bert_reference.NomicBertModel, _NOMIC | _EXPERTS),
    "gte": Tiny(transformers.GteConfig, transformers.GteModel, _GTE),
    "gte_lm": Tiny(transformers.GteConfig, transformers.GteForMaskedLM, _GTE),
    "gte_ntk": Tiny(gte_reference.NewConfig, gte_reference.NewModel, _GTE | _NTK),
    "jina_bert": Tiny(jina_bert_reference.JinaConfig, jina_bert_reference.JinaBertModel, _JINA),
    "jina_bert_code": Tiny(jina_bert_reference.JinaConfig, jina_bert_reference.JinaBertModel, _JINA | _JINA_CODE),
    "qwen2": Tiny(transformers.Qwen2Config, transformers.Qwen2Model, _NARROW, encoder=False),
    "qwen2_lm": Tiny(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, _NARROW, encoder=False),
    "mistral": Tiny(transformers.MistralConfig, transformers.MistralModel, _GROUPED, encoder=False),
    "mistral_lm": Tiny(transformers.MistralConfig, transformers.MistralForCausalLM, _GROUPED, encoder=False),
    "llama": Tiny(transformers.LlamaConfig, transformers.LlamaModel, _GROUPED, encoder=False),
    "gemma3": Tiny(transformers.Gemma3TextConfig, transformers.Gemma3TextModel, _GEMMA3, encoder=False),
    "gemma3_lm": Tiny(transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, _GEMMA3, encoder=False),
    "llama_lm": Tiny(transformers.LlamaConfig, transformers.LlamaForCausalLM, _GROUPED, encoder=False),
}
# Classifiers, of the shape that a kind above has.
_CLASSIFIERS: dict[str, type[Any]] = {
    "bert": transformers.BertForSequenceClassification,
    "roberta": transformers.RobertaForSequenceClassification,
    "camembert": transformers.CamembertForSequenceClassification,
    "xlm_roberta": transformers.XLMRobertaForSequenceClassification,
    "distilbert": transformers.DistilBertForSequenceClassification,
    "mpnet": transformers.MPNetForSequenceClassification,
    "deberta": transformers.DebertaV2ForSequenceClassification,
    "modernbert": transformers.ModernBertForSequenceClassification,
    "nomic_bert": transformers.NomicBertForSequenceClassification,
    "gte": transformers.GteForSequenceClassification,
    "gte_ntk": gte_reference.NewForSequenceClassification,
    "jina_bert": jina_bert_reference.JinaBertForSequenceClassification,
    "qwen3": transformers.Qwen3ForSequenceClassification,
    "qwen2": transformers.Qwen2ForSequenceClassification,
    "mistral": transformers.MistralForSequenceClassification,
    "llama": transformers.LlamaForSequenceClassification,
    "gemma3": transformers.Gemma3TextForSequenceClassification,
}
TINY |= {f"{kind}_classifier": replace(TINY[kind], model=model) for kind, model in _CLASSIFIERS.items()}

_NUM_GPU_TESTS = pytest.StashKey[int]()
_KERNEL_REPORTS = pytest.StashKey["subprocess.Popen[str]"]()
# A test that takes long on a busy machine has not failed.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of workers of `-n auto`: none for files that are named.

    A GPU has one process at a time: the tests measure its free memory.
    """
    whole_suite = config.args == config.getini("testpaths")
    return NUM_WORKERS if whole_suite and not torch.cuda.is_available() else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> RayApart:
    return RayApart(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """The worker without Ray leaves the cores to nodes that start: they have a limited time for it."""
    if _is_worker(config) and config.workerinput["workerid"] == WITHOUT_RAY:
        os.nice(5)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests marked `gpu` on a machine without a GPU: thousands of skips would hide everything else.

    `-k` and `-m` select first, so that the number which `pytest_terminal_summary` prints is true of the selection.
    Workers get the longest files first.
    """
    if _is_worker(config):
        items.sort(key=lambda item: rank(item.nodeid))
    if torch.cuda.is_available():
        return
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        config.stash[_NUM_GPU_TESTS] = len(gpu_tests)
        config.hook.pytest_deselected(items=gpu_tests)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def _is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one, which prints the results."""
    return hasattr(config, "workerinput")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts to compile the kernels, at the lowest priority, if a test wants their reports."""
    if session.config.option.collectonly or not any("kernel_reports" in item.fixturenames for item in session.items):
        return
    known = session.config.cache.mkdir("emberforge") / "kernel_reports.json"
    session.config.stash[_KERNEL_REPORTS] = subprocess.Popen(
        ["nice", "-n", "19", sys.executable, Path(__file__).parent / "kernel_reports.py", known],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A selection of GPU tests alone is a success on a machine without a GPU, as a run of skipped tests is."""
    if (compiling := session.config.stash.get(_KERNEL_REPORTS, None)) is not None:
        compiling.kill()
        compiling.communicate()
    if _is_worker(session.config):
        session.config.workeroutput["num_gpu_tests"] = session.config.stash.get(_NUM_GPU_TESTS, 0)
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _NUM_GPU_TESTS in session.config.stash:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes a worker's number of GPU tests. All workers collect the same tests."""
    if num_gpu_tests := getattr(node, "workeroutput", {}).get("num_gpu_tests", 0):
        node.config.stash[_NUM_GPU_TESTS] = num_gpu_tests


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints one line for each reason why tests did not run."""
    num_gpu_tests = terminalreporter.config.stash.get(_NUM_GPU_TESTS, 0)
    if num_gpu_tests:
        terminalreporter.write_line(
            f"not run: {num_gpu_tests:,} GPU tests (no GPU on this machine; make test-gpu runs them on one that has a GPU)"
        )
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ()))
    for reason, num_tests in sorted(reasons.items()):
        terminalreporter.write_line(f"not run: {num_tests:,} {'test' if num_tests == 1 else 'tests'} ({reason})")


@pytest.fixture(scope="session")
def kernel_reports(request: pytest.FixtureRequest) -> "subprocess.Popen[str]":
    """The process of `tests/kernel_reports.py`."""
    return request.config.stash[_KERNEL_REPORTS]


@pytest.fixture(scope="session")
def minilm() -> Path:
    return resolve_model(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(kind, sharded, **config)`: a random checkpoint saved by transformers, made once per arguments."""
    made: dict[str, Path] = {}

    def make(kind: str, sharded: bool = False, **config: Any) -> Path:
        key = json.dumps([kind, sharded, config], sort_keys=True)
        if key not in made:
            made[key] = _save(kind, sharded, config, tmp_path_factory.mktemp(kind))
        return made[key]

    return make


def _save(kind: str, sharded: bool, config: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    vocab = 300
    made_of = TINY[kind]
    hf_config: Any = made_of.config(vocab_size=vocab, **(made_of.shape | config))
    model: Any = made_of.model(hf_config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, or their handling is not tested
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "10GB")
    save_tokenizer(folder, vocab, made_of.encoder)
    if kind.endswith("_classifier"):  # its head has its own pooling
        return folder
    pooling = "cls" if made_of.encoder else "lasttoken"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": hf_config.hidden_size, "pooling_mode": pooling})
    )
    return folder


@pytest.fixture
def log_lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Reads the JSON lines that this process has written since the last call. Lines of gRPC's C++ code are skipped."""
    monkeypatch.delenv(logs.VARIABLE, raising=False)  # a test that starts Ray in this process leaves it behind
    loggers = [logging.getLogger(name) for name in ("", *logs._OURS, *logs._OF_RAY, logs.ACCESS)]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    logs.set_up("replica of x")
    yield lambda: [json.loads(line) for line in capfd.readouterr().err.splitlines() if not re.match(r"[IWE]\d{4} ", line)]
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
