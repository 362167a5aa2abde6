"""Reads a model's RoPE from config.json, and computes its frequencies. No torch here, because gateways read configs."""

import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

from engine.errors import ModelError
from engine.model.keys import TOO_MANY, Keys, LayerType


class LinearScaling(NamedTuple):
    """All frequencies are divided by `factor`."""

    factor: float


class NtkScaling(NamedTuple):
    """GTE's scaling of the base."""

    factor: float


class Llama3Scaling(NamedTuple):
    """Low frequencies are divided by `factor`, high ones stay, and those between are mixed.

    A frequency is low if its wave is longer than `positions` / `low`, and high if its wave is shorter than `positions` / `high`.
    """

    factor: float
    low: float
    high: float
    positions: int  # of the model before it was trained for longer texts


class YarnScaling(NamedTuple):
    """Frequencies with fewer than `slow` turns within `positions` are divided by `factor`. Those with more than `fast` stay.

    cos and sin are multiplied by `attention`.
    """

    factor: float
    slow: float
    fast: float
    positions: int  # as in `Llama3Scaling`
    attention: float
    truncate: bool  # the bounds are rounded to whole dimensions


class DivisorScaling(NamedTuple):
    """Each of the D / 2 frequencies has a divisor of its own, as in a GGUF file of Llama 3.1."""

    divisors: tuple[float, ...]


Scaling = LinearScaling | NtkScaling | Llama3Scaling | YarnScaling | DivisorScaling
# The kinds of scaling that decoders compute. transformers has no divisors.
OF_DECODERS = ("linear", "llama3", "yarn", "divisors")


class Rope(NamedTuple):
    """RoPE's base, and the scaling of its frequencies."""

    theta: float
    scaling: Scaling | None = None


def read_rope(
    keys: Keys,
    layer_type: LayerType | None = None,
    flat: str = "rope_theta",
    otherwise: float | None = None,
    scalings: tuple[str, ...] = (),
) -> Rope:
    """RoPE, from transformers 5's `rope_parameters` or the Hub's flat keys.

    Args:
        layer_type: the type of layers, for families with a base for each type.
        flat: the Hub's key for the base.
        otherwise: the base if the file names none.
        scalings: the kinds of scaling that the family computes. No scaling is always allowed.
    Raises: ModelError for any other kind of RoPE.
    """
    rope, scaling = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    # transformers 5 takes rope_scaling, and other code takes rope_parameters.
    if rope and scaling and scaling not in (rope, rope.get(layer_type or "")):
        raise ModelError(f"{keys.path}: rope_scaling {scaling} differs from rope_parameters {rope}; remove the wrong one")
    if layer_type is not None:
        if set(rope) - set(get_args(LayerType)):
            raise ModelError(f"{keys.path}: rope_parameters {rope} is not supported (one set for each type of layer)")
        rope = Keys(keys.path, rope).mapping(layer_type)
    if layer_type != "sliding_attention":  # flat keys scale only the other layers
        rope = rope or scaling
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("mixed_b") is not None
    if kind not in ("default", *scalings) or partial:
        supported = ", ".join(("plain", *scalings))
        raise ModelError(f"{keys.path}: RoPE of type {kind!r} ({rope}) is not supported (only {supported}, of the full width)")
    own = Keys(keys.path, rope)
    theta = keys.real(flat, otherwise) if own.get("rope_theta") is None else own.real("rope_theta")
    return Rope(float(theta), None if kind == "default" else _read_scaling(str(kind), own, keys, theta))


def _read_scaling(kind: str, own: Keys, keys: Keys, theta: float) -> Scaling:
    """`own`: the keys of RoPE alone. Source: `modeling_rope_utils` of transformers."""
    if kind == "divisors":
        given = own.get("divisors") if isinstance(own.get("divisors"), list) else [None]
        return DivisorScaling(tuple(float(Keys(keys.path, {"divisors": each}).real("divisors")) for each in given))
    factor = float(own.real("factor"))
    if kind in ("linear", "ntk"):
        return LinearScaling(factor) if kind == "linear" else NtkScaling(factor)
    name = "original_max_position_embeddings"
    positions = keys.number(name, own.number(name, keys.number("max_position_embeddings")))
    if kind == "llama3":
        low, high = float(own.real("low_freq_factor")), float(own.real("high_freq_factor"))
        if low >= high:
            raise ModelError(f"{keys.path}: low_freq_factor is {low:g}, expected less than high_freq_factor, {high:g}")
        return Llama3Scaling(factor, low, high, positions)
    if theta <= 1 or positions * factor >= TOO_MANY:
        raise ModelError(
            f"{keys.path}: YaRN with rope_theta = {theta:g} and {factor:g} times {positions} positions is not supported "
            "(a base above 1, and fewer than 2^31 positions)"
        )
    return YarnScaling(
        factor,
        slow=float(own.real("beta_slow", 1)),
        fast=float(own.real("beta_fast", 32)),
        positions=positions,
        attention=_attention_factor(own, factor),
        truncate=own.get("truncate", True) is not False,
    )


def _attention_factor(own: Keys, factor: float) -> float:
    if own.get("attention_factor") is not None:
        return float(own.real("attention_factor"))
    has_both = own.get("mscale") and own.get("mscale_all_dim")
    above, below = (own.real("mscale"), own.real("mscale_all_dim")) if has_both else (1, 0)
    more = 0.1 * math.log(max(factor, 1))
    return float((above * more + 1) / (below * more + 1))


def check_width(keys: Keys, rope: Rope, head_dim: int) -> None:
    """Raises: ModelError if RoPE does not rotate pairs of a head's values, or has divisors for another width."""
    if head_dim % 2:
        raise ModelError(f"{keys.path}: head_dim is {head_dim}, expected an even number, because RoPE rotates pairs")
    if isinstance(rope.scaling, DivisorScaling) and len(rope.scaling.divisors) != head_dim // 2:
        given = len(rope.scaling.divisors)
        raise ModelError(f"{keys.path}: RoPE has {given} divisors, a head of {head_dim} needs {head_dim // 2}")


def longest(rope: Rope, positions: int) -> int:
    """The positions that a model takes. Files with YaRN often keep the number from before it."""
    scaling = rope.scaling
    return max(positions, int(scaling.positions * scaling.factor)) if isinstance(scaling, YarnScaling) else positions


def divisors(head_dim: int, rope: Rope) -> Sequence[float]:
    """The number by which each frequency theta^(-2 i / D) is divided, for i from 0 to D / 2 - 1."""
    (theta, scaling), half = rope, head_dim // 2
    match scaling:
        case Llama3Scaling(factor, low, high, positions):
            turns = (positions * theta ** (-i / half) / (2 * math.pi) for i in range(half))
            kept = [(each - low) / (high - low) for each in turns]
        case YarnScaling(factor, slow, fast, positions, _, truncate):
            # The dimensions, of D, whose frequencies have these numbers of turns within `positions`.
            first, last = (
                head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)
            )
            if truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            kept = [1 - (i - first) / ((last - first) or 0.001) for i in range(half)]
        case LinearScaling(factor):
            return [factor] * half
        case DivisorScaling(given):
            return given
        case _:
            assert scaling is None, f"{scaling} scales the base"
            return [1.0] * half
    within = (min(max(part, 0.0), 1.0) for part in kept)
    return [1 / (part + (1 - part) / factor) for part in within]
