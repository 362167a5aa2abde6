"""GGUF files against transformers: SmolLM2's real weights and tokenizer, each type of block, and each kind of tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from engine import Engine
from engine.hub import EMBEDDED_GENERATOR, resolve_model
from engine.model.gguf import read_header
from engine.model.gguf_tokenizer import build_tokenizer
from engine.model.gguf_weights import GGUFWeights

TEXTS = [
    "What is the capital of France?",
    "  two spaces, a\ttab,\n\nnewlines \r\n and   runs   ",
    "1234567890 3.14159 0x1F ½ ٣٤٥ 2026-11-23",
    "don't we'll I'M THEY'RE it's o'clock",
    "东京は日本の首都です。今天天气很好,한국어 문장입니다",
    "👩‍👩‍👧‍👦 emoji 🎉🇫🇷 and ﷽ ligatures ﬁ Å e\u0301",
    "def f(x):\n    return x**2  # comment\n\t\tif x != y: pass",
    "<|im_start|>user\nHi<|im_end|>\n",
    "Ωμέγα Привет мир שלום नमस्ते",
    "",
]
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def reference(path: Path) -> Tokenizer:
    """transformers' own conversion of a GGUF file's tokenizer."""
    architecture, tokenizer, _ = get_gguf_tokenizer(str(path))
    return convert_gguf_tokenizer(architecture, tokenizer)[0]


def test_smollm2_s_tensors_are_those_of_transformers() -> None:
    path = resolve_model(EMBEDDED_GENERATOR) / "model.gguf"
    header = GgufHeader.from_file(str(path))
    stored, found = load_gguf_state_dict(header), GGUFWeights(path)
    config = json.loads((path.parent / "config.json").read_text())
    assert len(found.names) == len(stored) == 272
    unpermute = LlamaTensorProcessor(config)
    for layer in (0, 29):
        for theirs, ours in (("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("ffn_down", "mlp.down_proj")):
            name, tensor = f"blk.{layer}.{theirs}.weight", found.tensor(f"model.layers.{layer}.{ours}.weight")
            expected = dequantize(stored[name][:].flatten(), header.ggml_types[name]).reshape(tensor.shape).numpy()
            np.testing.assert_array_equal(tensor.numpy(), unpermute.process(expected, name).weights, err_msg=name)
    table = found.tensor("model.embed_tokens.weight")
    name = "token_embd.weight"
    assert torch.equal(table, dequantize(stored[name][:].flatten(), header.ggml_types[name]).reshape(table.shape))


def test_smollm2_s_tokenizer_is_that_of_transformers() -> None:
    folder = resolve_model(EMBEDDED_GENERATOR)
    ours, theirs = Tokenizer.from_file(str(folder / "tokenizer.json")), reference(folder / "model.gguf")
    # For this pre-tokenizer llama.cpp makes each digit a part of its own. transformers' conversion does not know this rule.
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), theirs.pre_tokenizer])
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    by_folder = AutoTokenizer.from_pretrained(folder)
    chat = by_folder.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith(PROMPT)
    assert by_folder(chat).input_ids == ours.encode(chat).ids


def test_smollm2_knows_the_capital_of_france() -> None:
    engine = Engine.load(EMBEDDED_GENERATOR, pooling="last_token", dtype="float32", device="cpu")
    folder = resolve_model(EMBEDDED_GENERATOR)
    table = GGUFWeights(folder / "model.gguf").tensor("model.embed_tokens.weight").numpy()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = PROMPT
    for _ in range(7):
        text += tokenizer.decode([int((table @ engine.embed([text])[0]).argmax())], skip_special_tokens=False)
    assert text == PROMPT + "The capital of France is Paris."


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_blocks_give_transformers_values(tmp_path: Path, kind: str) -> None:
    stored_as = GGMLQuantizationType[kind]
    block, num_bytes = GGML_QUANT_SIZES[stored_as]
    rows = np.random.default_rng(0).integers(0, 100, (5, 512 // block * num_bytes), np.uint8)  # no scale is NaN
    path = tiny_gguf.write(tmp_path / "one.gguf", "qwen3", {}, {"blk.0.attn_v.weight": rows}, stored_as)
    tensor = GGUFWeights(path).tensor("model.layers.0.self_attn.v_proj.weight")
    torch.testing.assert_close(tensor, dequantize(torch.from_numpy(rows).flatten(), int(stored_as)).reshape(5, 512))


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    """The vocabulary has merges across parts that the patterns must separate: digits, spaces, punctuation and letters."""
    metadata = tiny_gguf.tokenizer_metadata(330, pre)
    extra = ["1 2", "12 3", "123 4", "Ġ Ġ", "Ġ t", "' s", "' S", ". Ċ", "Ċ Ċ", "! !", "e ,", "Ġ 1", "t 1"]
    tokens = [token for token in metadata["tokenizer.ggml.tokens"] if not token.startswith("[PAD")]
    tokens += [merge.replace(" ", "") for merge in extra]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [*tiny_gguf.MERGES, *extra]}
    metadata["tokenizer.ggml.token_type"] = [1] * 256 + [3 if token.startswith("<|") else 1 for token in tokens[256:]]
    path = tiny_gguf.write(tmp_path / "x.gguf", "llama", metadata | {"tokenizer.ggml.add_bos_token": False}, {"x": np.ones(1)})
    ours, theirs = build_tokenizer(read_header(path)), reference(path)
    for text in [*TEXTS, "12345 1234 the12 t1", "it's IT'S .\n\n!!! e, ", "   the   ", "<|start|>the"]:
        text = text.replace("e\u0301", "é")  # the published tokenizers of Qwen2 compose it, transformers' conversion does not
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


PIECES = ["▁", "t", "h", "e", "c", "a", "▁t", "he", "▁the", "▁c", "at", "cat", "▁cat", "▁▁", "\n", "é"]


def sentencepiece_metadata(is_gemma: bool) -> dict[str, Any]:
    pieces = [piece.replace("▁", " ") if is_gemma and piece == "▁▁" else piece for piece in PIECES]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": not is_gemma,
    }


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_tokenizers_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    metadata = sentencepiece_metadata(architecture == "gemma3")
    path = tiny_gguf.write(tmp_path / "x.gguf", architecture, metadata, {"x": np.ones(1)})
    ours, theirs = build_tokenizer(read_header(path)), reference(path)
    for text in ["the cat", "the  the cat\ncafé 猫 🎉", "cat" * 5, "a"]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.encode(text).ids == [1, *ids]
        assert ours.decode(ids) == text
    tokens: Callable[[str], list[str]] = lambda text: ours.encode(text).tokens  # noqa: E731
    assert tokens("the cat")[1:] == (["▁the", "▁cat"] if architecture == "llama" else ["t", "he", "▁cat"])
