"""emberforge's engine: embedding models as a library, with no Ray and no HTTP in it.

from engine import Engine
vectors = Engine.load("path/to/model").embed(["a text"])   # [1, embedding_size] float32
"""

from engine.engine import Engine
from engine.errors import BackendError, EmberError, EmptyInput, EngineStopped, InvalidInput, ModelError, TokenizerError

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
