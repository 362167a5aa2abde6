"""The engine of emberforge: computes vectors, scores and text as a library, without Ray and HTTP.

from emberforge import Engine
vectors = Engine.load("path/to/model").embed(["a text"])   # [1, embedding_size] float32

Names that need torch or numpy are imported at their first use, because torch takes seconds and most commands do not need it.
"""

from typing import TYPE_CHECKING, Any

from engine.errors import BackendError, EmberError, EmptyInput, EngineStopped, InvalidInput, ModelError, TokenizerError

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.options import SamplingOptions

__all__ = [
    "BackendError",
    "EmberError",
    "EmptyInput",
    "Engine",
    "EngineStopped",
    "InvalidInput",
    "ModelError",
    "SamplingOptions",
    "TokenizerError",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    if name == "SamplingOptions":
        from engine.options import SamplingOptions

        return SamplingOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
