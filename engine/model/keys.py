"""Reads config.json. One function reads each kind of key, and knows all its spellings.

The engine honours every key that changes a vector, or refuses it by name. So a model that loads gives the vectors that its
authors meant.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from engine.errors import ModelError
from engine.model.config import DenseActivation, Pooling

_ANYTHING = object()
TOO_MANY = 1 << 31  # no size of a network reaches this number


def read_json(path: Path) -> Any:
    """The file's content, or None if there is no such file. Raises: ModelError for a file that cannot be read or is not JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object. It is empty if there is no such file. Raises: ModelError for a file with anything else."""
    content = read_json(path)
    if content is not None and not isinstance(content, dict):
        raise ModelError(f"{path} must be a JSON object")
    return content or {}


class Keys:
    """The keys of one config file. Every error names the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """The keys of a file, as `read_object` reads it."""
        return cls(path, read_object(path))

    @property
    def architecture(self) -> str:
        """The first of `architectures`, or a text that is not the name of any family."""
        names = self.get("architectures") or []
        if not isinstance(names, list):
            raise ModelError(f"{self.path}: architectures is {names!r}, expected a list of names")
        return str(names[0]) if names else f"(none, model_type {self.get('model_type')!r})"

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def number(self, key: str, default: int | None = None, least: int = 1) -> Any:
        """A whole number from `least` up and below 2^31, or `default` if the key is absent or null. JSON may write 3 as 3.0.

        Raises: ModelError for any other value.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value < TOO_MANY
            or not float(value).is_integer()
        ):
            raise ModelError(f"{self.path}: {key} is {value!r:.80}, expected a whole number of {least} or more, below 2^31")
        return int(value)

    def real(self, key: str, default: float | None = None) -> Any:
        """A positive number, or `default` if the key is absent or null. Raises: ModelError for any other value."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ModelError(f"{self.path}: {key} is {value!r:.80}, expected a positive number")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """The object under `key`, or an empty one if the key is absent or null. Raises: ModelError for any other value."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"{self.path}: {key} is {value!r}, expected an object")
        return value or {}

    def refuse(self, key: str, allowed: tuple[Any, ...], why: str | None = None, absent: Any = _ANYTHING) -> None:
        """Stop unless `key` holds one of `allowed`.

        Args:
            why: the reason in the error; None names the first of `allowed`.
            absent: the value that an absent key stands for. Without this argument an absent key is accepted.
        """
        value = self.values.get(key, absent)
        if value is not _ANYTHING and value not in allowed:
            raise ModelError(f"{self.path}: {key} = {value!r} is not supported ({why or f'only {allowed[0]!r}'})")

    def divides(self, total: str, parts: str) -> None:
        """Stop if `total` is not a multiple of `parts`."""
        if self.number(total) % self.number(parts):
            raise ModelError(f"{self.path}: {total} = {self.get(total)} is not a multiple of {parts} = {self.get(parts)}")


class Shape(TypedDict):
    """The fields of `ModelConfig` that every family has. mypy compares the two when a family unpacks a `Shape`.

    config.json does not have the last two. `load_model_config` replaces them with the values of the folder's other files.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    causal: bool
    pooling: Pooling
    max_input_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeKeys:
    """A family's names for the keys of `Shape`. None: the family has no such key."""

    hidden_size: str = "hidden_size"
    intermediate_size: str = "intermediate_size"
    n_layers: str = "num_hidden_layers"
    n_heads: str = "num_attention_heads"
    n_kv_heads: str | None = None  # as many as query heads
    head_dim: str | None = None  # hidden_size / n_heads
    norm_eps: str | None = "layer_norm_eps"
    positions: str = "max_position_embeddings"


_ENCODER = ShapeKeys()
DECODER = ShapeKeys(n_kv_heads="num_key_value_heads", head_dim="head_dim", norm_eps="rms_norm_eps")


def read_shape(
    keys: Keys,
    names: ShapeKeys = _ENCODER,
    *,
    eps: float = 1e-12,
    head_dim: int | None = None,
    positions: int | None = None,
    causal: bool = False,
) -> Shape:
    """The fields that all families share.

    Args:
        eps, head_dim, positions: the values if the file has none. A `head_dim` of None is hidden_size / number of heads.
    """
    given_dim = None if names.head_dim is None else keys.get(names.head_dim, head_dim)
    if given_dim is None:
        keys.divides(names.hidden_size, names.n_heads)
    hidden_size, n_heads = keys.number(names.hidden_size), keys.number(names.n_heads)
    n_kv_heads = n_heads
    if names.n_kv_heads is not None and keys.get(names.n_kv_heads) is not None:
        keys.divides(names.n_heads, names.n_kv_heads)
        n_kv_heads = keys.number(names.n_kv_heads)
    if names.head_dim is not None:
        head_dim = keys.number(names.head_dim, head_dim or hidden_size // n_heads)
    max_positions = keys.number(names.positions, positions)
    return Shape(
        architecture=keys.architecture,
        vocab_size=keys.number("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.number(names.intermediate_size),
        n_layers=keys.number(names.n_layers),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim or hidden_size // n_heads,
        norm_eps=eps if names.norm_eps is None else keys.real(names.norm_eps, eps),
        max_position_embeddings=max_positions,
        causal=causal,
        pooling="mean",
        max_input_length=max_positions,
    )


def is_causal(keys: Keys) -> bool:
    """Whether a decoder is causal. It is causal unless the file says otherwise. There are two spellings of the key."""
    return not keys.get("use_bidirectional_attention") and bool(keys.get("is_causal", True))


# transformers' names for layers that see the whole sequence, and for layers with a window.
LayerType = Literal["full_attention", "sliding_attention"]


def read_local_layers(keys: Keys, otherwise: Callable[[int], bool]) -> tuple[int, ...]:
    """The layers with a window, from `layer_types`. If the file has no such key, `otherwise` decides for each layer."""
    n_layers, types = keys.number("num_hidden_layers"), keys.get("layer_types")
    if types is None:
        return tuple(filter(otherwise, range(n_layers)))
    if not isinstance(types, list):
        raise ModelError(f"{keys.path}: layer_types is {types!r}, expected a list")
    types = list(map(str, types))
    if len(types) != n_layers or not set(types) <= set(get_args(LayerType)):
        raise ModelError(
            f"{keys.path}: layer_types {sorted(set(types))} for {len(types)} of {n_layers} layers are not supported "
            f"(one of {' and '.join(get_args(LayerType))} for each of {n_layers} layers)"
        )
    return tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")


_ACTIVATIONS: dict[str, DenseActivation] = {"gelu": "GELU", "relu": "ReLU", "silu": "SiLU", "swish": "SiLU", "tanh": "Tanh"}


def head_activation(keys: Keys, key: str, default: str) -> DenseActivation:
    """A head's activation, by transformers' name for it."""
    name = keys.get(key) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"{keys.path}: {key} = {name!r} is not supported (one of {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]


def read_labels(keys: Keys) -> tuple[str, ...]:
    """`id2label` in the order of its indices. Without it, LABEL_0 and so on, for `num_labels` or two labels."""
    names, count = keys.get("id2label"), keys.get("num_labels")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(keys.number("num_labels", 2)))
    if not isinstance(names, dict) or sorted(map(str, names)) != sorted(map(str, range(len(names)))) or not names:
        raise ModelError(f"{keys.path}: id2label {names!r} does not name every label from 0 up")
    if count is not None and count != len(names):
        raise ModelError(f"{keys.path}: id2label names {len(names)} labels, num_labels is {count!r}")
    by_index = {int(index): str(name) for index, name in names.items()}
    return tuple(by_index[index] for index in range(len(by_index)))
