"""emberforge as a library: embedding models on our own engine, with no server.

from emberforge import Engine
vectors = Engine.load("path/to/model").embed(["a text"])   # [1, embedding_size] float32

`import emberforge` takes milliseconds. torch is imported when `Engine` is first used.
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
    import engine

    if name in __all__:
        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
