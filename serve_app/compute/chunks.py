"""Cuts long texts into chunks and computes their vectors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np

from engine.errors import InvalidInput
from engine.options import EmbedOptions, EncodeOptions, TextOrIds, check_outputs
from engine.run.flight import Vectors
from engine.sequences import Sequences
from engine.text.chunks import ChunkedText
from engine.text.tokenizer import Tokenizer
from serve_app.admission.request_state import RequestState
from serve_app.compute.embedding import check_options, pieces
from serve_app.compute.parameters import Chunking
from serve_app.compute.quantize import OutputDtype
from serve_app.compute.scores import weighted_mean
from serve_app.compute.service import Service
from serve_app.compute.tokens import MOST_CHARS
from serve_app.errors import BatchTooLarge
from serve_app.gather import gather
from serve_app.models import ServedModel

# Texts are cut in pieces of about this many characters. A longer text is one piece. 32,000 characters take 10 to 30 ms.
_PIECE_CHARS = 32_000


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one text."""

    offsets: list[tuple[int, int]]  # [start, stop) of each chunk in characters
    vectors: Vectors  # [number of chunks, dims]; [1, dims] with mean pooling


async def embed_chunks(
    service: Service,
    state: RequestState,
    model: ServedModel,
    texts: Sequence[str],
    chunking: Chunking,
    encoding: EncodeOptions,
    options: EmbedOptions,
    dtypes: Sequence[OutputDtype],
) -> list[Chunks]:
    """The chunks of each text.

    Raises: as `embed`; InvalidInput if the model's pooling does not allow late chunking, or for a text of more than `MOST_CHARS`
        characters; BatchTooLarge for too many chunks.
    """
    service.metrics.tei.started(state.method, state.num_inputs)
    check_options(model, options, dtypes)
    late = chunking.pooling == "late"
    if late:
        check_outputs(EmbedOptions(outputs=("chunks",)), model.info.outputs, model.info.pooling, ())
    else:
        longest = await service.off_loop(len(encoding.prompt or ""), model.tokenizer.longest_text, encoding)
        if chunking.size > longest:
            raise InvalidInput(
                f"`chunking.size` must be at most {longest}, the model's limit minus special tokens and the prompt. "
                f"Given: {chunking.size}"
            )
    cut = await _cut(service, state, model, texts, chunking, encoding if late else None)
    if late:
        return await _embed_late(service, state, model, cut, options)
    chunks = [text[start:stop] for text, each in zip(texts, cut, strict=True) for start, stop in each.offsets]
    num_chars = sum(map(len, chunks)) + len(encoding.prompt or "") * len(chunks)
    tokenised = pieces(model.tokenizer.encode, chunks, encoding)
    vectors = np.asarray((await service.compute(state, model, options, num_chars, tokenised)).vectors)
    parts = np.split(vectors, np.cumsum([len(each.offsets) for each in cut])[:-1])
    if chunking.pooling == "mean":
        lengths = [[stop - start for start, stop in each.spans] for each in cut]
        parts = await service.with_arrays(vectors.size, _means, parts, lengths, options.normalize)
    return [Chunks(each.offsets, part) for each, part in zip(cut, parts, strict=True)]


def only_texts(inputs: Sequence[TextOrIds]) -> list[str]:
    """The inputs, if all are texts. Raises: InvalidInput for token ids, because chunks have offsets in characters."""
    for index, each in enumerate(inputs):
        if not isinstance(each, str):
            raise InvalidInput(f"`chunking` needs texts, input {index} is a list of token ids")
    return [str(each) for each in inputs]


async def _cut(
    service: Service,
    state: RequestState,
    model: ServedModel,
    texts: Sequence[str],
    chunking: Chunking,
    whole: EncodeOptions | None,
) -> list[ChunkedText]:
    """Cuts the texts piece by piece. Stops at the first piece that makes too many chunks. `whole`: as in `Tokenizer.chunk`."""
    for index, text in enumerate(texts):
        if len(text) > MOST_CHARS:
            raise InvalidInput(
                f"`chunking` takes {MOST_CHARS} characters of a text, input {index} has {len(text)}; send it in parts"
            )
    prompt_chars = len(whole.prompt or "") if whole else 0
    num_chars = state.chars_to_tokenize + prompt_chars * len(texts)
    limit = service.settings.max_client_batch_size
    cut, num_chunks = list[ChunkedText](), 0
    ends = accumulate(prompt_chars + len(text) for text in texts)  # the end of each text among the characters of all texts
    for _, piece in groupby(enumerate(texts), lambda _: next(ends) // _PIECE_CHARS):
        parts = await service.in_turn(num_chars, _chunks, model.tokenizer, list(piece), chunking, limit, whole)
        num_chunks += sum(len(each.offsets) for each in parts)
        if num_chunks > limit:
            raise BatchTooLarge(
                f"at least {num_chunks} chunks > maximum allowed batch size {limit}; use larger chunks or send fewer texts"
            )
        cut += parts
    return cut


async def _embed_late(
    service: Service, state: RequestState, model: ServedModel, cut: Sequence[ChunkedText], options: EmbedOptions
) -> list[Chunks]:
    """Computes each text as a separate job, because the chunks' positions are an option of a job."""
    service.count_tokens(state, model, Sequences.of([each.token_ids for each in cut]))
    qos, late = state.qos.after(state.tokenization_s), replace(options, pooled=False, outputs=("chunks",))
    jobs = [(each.token_ids, replace(late, spans=each.spans)) for each in cut]
    for token_ids, job_options in jobs:  # checked here, because in a pass a wrong job would fail other requests too
        check_outputs(job_options, model.info.outputs, model.info.pooling, [len(token_ids)])
    work = gather([model.embed([token_ids], job_options, qos) for token_ids, job_options in jobs])
    results = await work
    service.count_results(state, results, "embed")
    return [Chunks(each.offsets, result.ragged["chunks"][0]) for each, result in zip(cut, results, strict=True)]


def _means(parts: Sequence[Vectors], lengths: Sequence[Sequence[int]], normalize: bool) -> list[Vectors]:
    return [weighted_mean(*each, normalize)[None] for each in zip(parts, lengths, strict=True)]


def _chunks(
    tokenizer: Tokenizer, texts: Sequence[tuple[int, str]], how: Chunking, most: int, whole: EncodeOptions | None
) -> list[ChunkedText]:
    return [tokenizer.chunk(index, text, how.size, how.overlap, most, whole) for index, text in texts]
