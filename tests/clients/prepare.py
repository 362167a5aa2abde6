"""Makes the expected results of the clients' tests. The server's Python runs it, because the clients' environment has no torch.

`prepare.py FOLDER` saves the models to serve in FOLDER. It saves the results of sentence-transformers and transformers for the
texts of `material.py` in FOLDER/reference.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from material import DIMENSIONS, DOCUMENTS, FACTS, LABELS, LONG, PAIR, PROMPT, QUERY, TEXTS
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizerFast,
    PreTrainedModel,
)

from engine.hub import EMBEDDED_GENERATOR, EMBEDDED_MODEL, resolve_model
from engine.model.gguf_weights import GGUFWeights

_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


def main(folder: Path, loglikelihoods: bool) -> None:
    minilm = resolve_model(EMBEDDED_MODEL)
    _with_prompts(minilm, folder / "prompted")
    tokenizer = BertTokenizerFast.from_pretrained(minilm)
    reranker = _save(BertForSequenceClassification(_config(num_labels=1)), tokenizer, folder / "reranker")
    classifier = _save(BertForSequenceClassification(_config(id2label=dict(enumerate(LABELS)))), tokenizer, folder / "classifier")
    mlm = BertForMaskedLM(_config())
    mlm.cls.predictions.bias.data.fill_(-3.0)  # otherwise each text would contain most of the vocabulary
    _save(mlm, tokenizer, folder / "mlm")
    reference = _embeddings(minilm) | _rerank(reranker) | _predict(classifier) | _sparse(folder)
    if loglikelihoods:
        reference |= _loglikelihoods()
    (folder / "reference.json").write_text(json.dumps(reference))


def _with_prompts(minilm: Path, folder: Path) -> None:
    """Saves the embedded model with two prompts. The server uses a prompt only on request."""
    folder.mkdir()
    for each in minilm.iterdir():
        (folder / each.name).symlink_to(each)
    (folder / "config_sentence_transformers.json").unlink()
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": PROMPT, "passage": ""}}))


def _embeddings(minilm: Path) -> dict[str, Any]:
    whole = SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    raw = SentenceTransformer(modules=[whole[0], whole[1]], device="cpu")
    cut = torch.as_tensor(raw.encode(TEXTS))[:, :DIMENSIONS]
    ids = whole.tokenizer(LONG)["input_ids"]
    tail = torch.tensor([[ids[0], *ids[-1 - 254 : -1], ids[-1]]])
    with torch.no_grad():
        left = whole({"input_ids": tail, "attention_mask": torch.ones_like(tail)})["sentence_embedding"][0]
    tokens = whole.encode(TEXTS[:2], output_value="token_embeddings")
    return {
        "embeddings": whole.encode(TEXTS).tolist(),
        "not_normalized": raw.encode(TEXTS).tolist(),
        "cut": nn.functional.normalize(cut).tolist(),
        "prompted": whole.encode(TEXTS, prompt=PROMPT).tolist(),
        "long_from_the_left": left.tolist(),
        "token_embeddings": [each.tolist() for each in tokens],
        "token_ids": whole.tokenizer(TEXTS[:2])["input_ids"],
    }


def _rerank(folder: Path) -> dict[str, Any]:
    model = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    logits = model.predict(pairs, activation_fn=nn.Identity())
    assert sorted(abs(a - b) for i, a in enumerate(logits) for b in logits[:i])[0] > 0.01, "the order would be left to rounding"
    return {"logits": logits.tolist(), "scores": model.predict(pairs, activation_fn=nn.Sigmoid()).tolist()}


def _predict(folder: Path) -> dict[str, Any]:
    model = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    single = model.tokenizer(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        of_text = model.model(**single).logits[0].softmax(dim=0)
    return {"label_scores": of_text.tolist(), "pair_label_scores": model.predict([PAIR], apply_softmax=True)[0].tolist()}


def _sparse(folder: Path) -> dict[str, Any]:
    mlm = Transformer(str(folder / "mlm"), transformer_task="fill-mask")
    model = SparseEncoder(modules=[mlm, SpladePooling("max")], device="cpu")
    model.save(str(folder / "splade"))
    rows = model.encode(TEXTS[:2], convert_to_sparse_tensor=False)
    return {"sparse": [{int(i): float(row[i]) for i in row.nonzero()} for row in rows]}


@torch.inference_mode()
def _loglikelihoods() -> dict[str, Any]:
    """For each possible answer of a question: its log-probability, and whether it is the likeliest one."""
    folder = resolve_model(EMBEDDED_GENERATOR)
    weights, tokenizer = GGUFWeights(folder / "model.gguf"), AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    model.load_state_dict({name: weights.tensor(name) for name in weights.names}, strict=False)
    model.tie_weights()
    told = []
    for question, choices in FACTS:
        start = len(tokenizer(question).input_ids)
        for choice in choices:
            ids = torch.tensor([tokenizer(question + choice).input_ids])
            rows = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
            chosen = rows.gather(1, ids[0, start:, None])[:, 0]
            told.append([chosen.sum().item(), bool((chosen == rows.amax(1)).all())])
    return {"loglikelihoods": told, "tokenizer": str(folder)}


def _config(**more: Any) -> BertConfig:
    return BertConfig(vocab_size=30522, max_position_embeddings=128, **_TINY, **more)


def _save(model: PreTrainedModel, tokenizer: BertTokenizerFast, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():  # without this noise all inputs would get nearly the same result
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), "--loglikelihoods" in sys.argv)
