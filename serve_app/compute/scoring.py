"""Computes scores: the classes of inputs, and how well texts answer a query."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np

from engine.errors import InvalidInput, NotFinite
from engine.model.config import OutputName
from engine.options import EmbedOptions, EncodeOptions, TokenIds
from engine.run.flight import Vectors
from engine.text.tokenizer import Tokenizer
from serve_app.admission.inputs import TextOrPair
from serve_app.admission.request_state import RequestState
from serve_app.compute.embedding import pieces
from serve_app.compute.parameters import HybridWeights
from serve_app.compute.scores import late_interaction, lexical, probabilities
from serve_app.compute.service import Service
from serve_app.compute.tasks import hybrid_outputs
from serve_app.errors import ScoreNotFinite
from serve_app.models import ServedModel

_SCORES: dict[OutputName, Callable[[Any, Sequence[Any]], Vectors]] = {"sparse": lexical, "colbert": late_interaction}


async def predict(
    service: Service,
    state: RequestState,
    model: ServedModel,
    inputs: Sequence[TextOrPair],
    encoding: EncodeOptions,
    raw_scores: bool,
) -> Vectors:
    """[n, n_labels] fp32: probabilities, or logits for `raw_scores`. Raises: as `Service.compute`; ScoreNotFinite."""
    encoded = pieces(partial(encode_classified, model.tokenizer), inputs, encoding)
    return await _classify(service, state, model, raw_scores, state.chars_to_tokenize, encoded)


async def rerank(
    service: Service,
    state: RequestState,
    model: ServedModel,
    query: str,
    texts: Sequence[str],
    encoding: EncodeOptions,
    *,
    raw_scores: bool = False,
    instruction: str | None = None,
    weights: HybridWeights | None = None,
) -> Vectors:
    """[n] fp32: how well each text answers the query.

    A cross-encoder gives the probability (`raw_scores`: the logit). A model with several scores gives their weighted mean.

    Raises: as `predict`; InvalidInput for an instruction or weights that the model cannot use.
    """
    if model.info.task == "embedding":
        if instruction is not None:
            raise InvalidInput("`instruction` is for rerankers with a template, but this model has no template; leave it out")
        return await _score_hybrid(service, state, model, query, texts, encoding, weights or HybridWeights())
    if weights is not None:
        raise InvalidInput("`weights` are for models with several scores, but this model has one; leave them out")
    pairs = [(query, text) for text in texts]
    model.tokenizer.check_total(pairs, instruction)
    num_chars = state.chars_to_tokenize + len(instruction or "") * len(pairs)
    encoded = pieces(model.tokenizer.encode_pairs, pairs, encoding, instruction)
    return (await _classify(service, state, model, raw_scores, num_chars, encoded))[:, 0]


def encode_classified(
    tokenizer: Tokenizer, inputs: Sequence[TextOrPair], encoding: EncodeOptions, first: int = 0
) -> list[TokenIds]:
    """Token ids of texts and pairs, in the order of `inputs`.

    Args:
        first: the number of the first of these inputs in its request, for errors.
    Raises: as the tokenizer.
    """
    ids: list[TokenIds] = []
    for is_text, run in groupby(inputs, lambda each: isinstance(each, str)):
        encode: Callable[..., Sequence[TokenIds]] = tokenizer.encode if is_text else tokenizer.encode_pairs
        ids += encode(list(run), encoding, first=first + len(ids))
    return ids


async def _classify(
    service: Service,
    state: RequestState,
    model: ServedModel,
    raw_scores: bool,
    num_chars: int,
    encoded: Iterable[Callable[[], Sequence[TokenIds]]],
) -> Vectors:
    service.metrics.tei.started(state.method, state.num_inputs, "predict")
    options = EmbedOptions(normalize=False)
    try:
        logits = (await service.compute(state, model, options, num_chars, encoded, "predict")).vectors
    except NotFinite:
        raise ScoreNotFinite from None
    assert logits is not None
    if raw_scores or model.info.regression:
        return logits
    return await service.with_arrays(logits.size, probabilities, logits, model.info.multi_label)


async def _score_hybrid(
    service: Service,
    state: RequestState,
    model: ServedModel,
    query: str,
    texts: Sequence[str],
    encoding: EncodeOptions,
    weights: HybridWeights,
) -> Vectors:
    available = hybrid_outputs(model.info)
    used: dict[str, float] = {name: getattr(weights, name) for name in available if getattr(weights, name)}
    if not used:
        raise InvalidInput(f"`weights` are 0 for all of the model's scores ({', '.join(available)}); set one above 0")
    ragged: list[OutputName] = [name for name in ("sparse", "colbert") if name in used]
    options = EmbedOptions(pooled="dense" in used, outputs=tuple(ragged))
    # No prompt: the server's default prompt is for one kind of text, and these inputs are a query and documents.
    encode, plain = model.tokenizer.encode, replace(encoding, prompt="")
    documents = plain
    if encoding.max_document_tokens is not None:
        most = encoding.max_document_tokens + model.tokenizer.num_special
        # Only a document that is too long for the model, too, may be refused.
        documents = replace(plain, max_tokens=most, truncate=plain.truncate or most <= model.tokenizer.max_input_length)
    # The query is a piece of its own, so that errors have the numbers of the texts in the request.
    encoded = chain(pieces(encode, [query], plain), pieces(encode, texts, documents))
    service.metrics.tei.started(state.method, state.num_inputs)
    result = await service.compute(state, model, options, state.chars_to_tokenize, encoded)
    scores = np.zeros(len(texts))
    if result.vectors is not None:
        scores += used["dense"] * (result.vectors[1:] @ result.vectors[0])
    for name in ragged:
        first, *rest = result.ragged[name]
        scores += used[name] * await service.in_thread(_SCORES[name], first, rest)
    return np.asarray(scores / sum(used.values()), dtype=np.float32)
