"""emberforge's engine: embedding models as a library, with no Ray and no HTTP in it.

from emberforge import Engine
vectors = Engine.load("path/to/model").embed(["a text"])   # [1, embedding_size] float32

`Engine` is imported when it is first used: it needs torch, which takes seconds, and most commands do not need it.
"""

from typing import TYPE_CHECKING, Any

from engine.errors import BackendError, EmberError, EmptyInput, EngineStopped, InvalidInput, ModelError, TokenizerError

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = [
    "BackendError",
    "EmberError",
    "EmptyInput",
    "Engine",
    "EngineStopped",
    "InvalidInput",
    "ModelError",
    "TokenizerError",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
