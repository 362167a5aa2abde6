"""Computes vectors of inputs: one for each input, one for each token, or sparse weights."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.options import EmbedOptions, EncodeOptions, TextOrIds, TokenIds, check_dimensions, check_outputs
from engine.results import Embeddings
from engine.run.flight import Vectors
from serve_app.admission.request_state import RequestState
from serve_app.compute.quantize import OutputDtype, check_dtype
from serve_app.compute.service import Service
from serve_app.models import ServedModel

# A large request is tokenised in pieces of this many inputs. 256 texts of 100 tokens take about 10 ms.
_PIECE = 256


async def embed(
    service: Service,
    state: RequestState,
    model: ServedModel,
    inputs: Sequence[TextOrIds],
    encoding: EncodeOptions,
    options: EmbedOptions,
    dtypes: Sequence[OutputDtype] = (),
) -> Embeddings:
    """The model's outputs for each input.

    Raises: as `Service.compute`; InvalidInput if the vectors cannot be quantised to one of `dtypes`.
    """
    service.metrics.tei.started(state.method, state.num_inputs)
    check_options(model, options, dtypes)
    num_chars = state.chars_to_tokenize + len(encoding.prompt or "") * len(inputs)
    return await service.compute(state, model, options, num_chars, pieces(model.tokenizer.encode, inputs, encoding))


async def embed_tokens(
    service: Service, state: RequestState, model: ServedModel, inputs: Sequence[TextOrIds], encoding: EncodeOptions
) -> list[Vectors]:
    """For each input [tokens, hidden_size] fp32. Raises: as `embed`."""
    options = EmbedOptions(pooled=False, outputs=("tokens",))
    return (await embed(service, state, model, inputs, encoding, options)).ragged["tokens"]


async def embed_sparse(
    service: Service, state: RequestState, model: ServedModel, inputs: Sequence[TextOrIds], encoding: EncodeOptions
) -> list[NDArray[np.void]]:
    """For each input an array of (index, value), sorted by index. Raises: as `embed`."""
    options = EmbedOptions(normalize=False, pooled=False, outputs=("sparse",))
    return (await embed(service, state, model, inputs, encoding, options)).ragged["sparse"]


def pieces(
    encode: Callable[..., Sequence[TokenIds]], inputs: Sequence[Any], *args: Any
) -> Iterator[Callable[[], Sequence[TokenIds]]]:
    """Calls of `encode` for the pieces of a request's inputs. Without inputs there is one call, which checks `args`."""
    firsts = range(0, len(inputs) or 1, _PIECE)
    return (partial(encode, inputs[first : first + _PIECE], *args, first=first) for first in firsts)


def check_options(model: ServedModel, options: EmbedOptions, dtypes: Sequence[OutputDtype]) -> None:
    """Raises: InvalidInput if the model cannot give vectors of these options and dtypes."""
    check_dimensions(options.dimensions, model.info.embedding_size)
    check_outputs(options, model.info.outputs, model.info.pooling, ())
    for dtype in dtypes:
        check_dtype(dtype, options.dimensions or model.info.embedding_size, options.normalize, model.info.int8_ranges)
