"""OpenAI's embeddings."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from engine.options import EmbedOptions, EncodeOptions
from serve_app.compute.chunks import Chunks, embed_chunks, only_texts
from serve_app.compute.embedding import embed
from serve_app.compute.parameters import Chunking
from serve_app.compute.quantize import OutputDtype
from serve_app.compute.service import Service
from serve_app.compute.tasks import check_embed
from serve_app.dialects.bodies import DIRECTIONS, Prompted, Truncate
from serve_app.dialects.fields import Dimensions, Inputs
from serve_app.dialects.handler import Headers, Reply
from serve_app.dialects.vectors import DeferredList, EncodingFormat, Vectors, encoded_rows, quantized, vectors_size

# The approximate bytes of an entry without its vector.
_ENTRY_BYTES = 200


class OpenAIEmbeddingsRequest(Prompted):
    input: Inputs
    truncate: bool | Truncate | None = None
    encoding_format: EncodingFormat = None
    dimensions: Dimensions | None = None
    output_dtype: OutputDtype | None = None
    user: str | None = None
    chunking: Chunking | None = None

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        truncate = auto_truncate if self.truncate is None else self.truncate not in (False, "NONE")
        return replace(super().encode_options(truncate), truncation_direction=DIRECTIONS.get(self.truncate))


async def embeddings(service: Service, body: OpenAIEmbeddingsRequest, _headers: Headers) -> Reply:
    model = service.backend.get(body.model, check_embed)
    check_embed(model.info)
    dtype = body.output_dtype or "float"
    with service.admission.admit(len(body.input), model):
        state = service.begin(body.input)
        encoding, options = body.encode_options(service.settings.auto_truncate), EmbedOptions(dimensions=body.dimensions)
        if body.chunking is None:
            result = await embed(service, state, model, body.input, encoding, options, (dtype,))
            (vectors,) = await quantized(service, [result.vectors], dtype, model)
            data: Any = Entries(vectors, body.encoding_format)
        else:
            texts = only_texts(body.input)
            chunked = await embed_chunks(service, state, model, texts, body.chunking, encoding, options, (dtype,))
            arrays = await quantized(service, [each.vectors for each in chunked], dtype, model)
            data = [
                {"object": "embedding", "index": index} | entry
                for index, (chunks, array) in enumerate(zip(chunked, arrays, strict=True))
                for entry in _chunk_entries(chunks, array, body)
            ]
    usage = {"prompt_tokens": state.num_tokens, "total_tokens": state.num_tokens}
    return Reply({"object": "list", "data": data, "model": model.info.served_model_name, "usage": usage}, model, state)


class Entries(DeferredList):
    """An entry for each vector."""

    __slots__ = ("_encoding_format", "_vectors", "json_size")

    def __init__(self, vectors: Vectors, encoding_format: EncodingFormat) -> None:
        self._vectors, self._encoding_format = vectors, encoding_format
        self.json_size = len(vectors) * _ENTRY_BYTES + vectors_size(vectors, encoding_format)

    def __len__(self) -> int:
        return len(self._vectors)

    def part(self, start: int, stop: int) -> list[Any]:
        rows = encoded_rows(self._vectors[start:stop], self._encoding_format)
        return [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows, start)]


def _chunk_entries(chunks: Chunks, vectors: Vectors, body: OpenAIEmbeddingsRequest) -> Iterator[dict[str, Any]]:
    """The entries of one input: one for each chunk, or a single entry with mean pooling."""
    assert body.chunking is not None
    rows = encoded_rows(vectors, body.encoding_format)
    if body.chunking.pooling == "mean":
        yield {"embedding": rows[0]}
        return
    for index, (row, (start, end)) in enumerate(zip(rows, chunks.offsets, strict=True)):
        yield {"embedding": row, "chunk": {"index": index, "start": start, "end": end}}
