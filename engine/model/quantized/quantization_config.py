"""Reads config.json's `quantization_config` into a typed description of the checkpoint's storage of matrices.

Older checkpoints of ModelOpt have these keys only in `hf_quant_config.json`.
Keys that change values are honoured, or refused by name. Keys that only choose other engines' kernels are not read. Activations
are not quantised by these keys, so the results are closer to the model before quantisation. The exception is NVFP4 on a GPU with
instructions for it (docs/decisions/082).
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from engine.errors import ModelError
from engine.model.keys import Keys
from engine.model.quantized.scheme import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    Awq,
    CompressedTensors,
    Fp8,
    Gptq,
    Group,
    ModelOpt,
    Scheme,
    Strategy,
)
from engine.model.with_images import reads_images

_WAY_OUT = (
    "use the checkpoint that is not quantised, or one in FP8, GPTQ, AWQ (gemm), compressed-tensors or ModelOpt "
    "(docs/models.md lists the kinds)"
)


def read_scheme(keys: Keys) -> Scheme | None:
    """A checkpoint's storage of matrices. None if they are not quantised.

    Args:
        keys: the keys of the model's config.json.
    Raises: ModelError naming the key, its value and the way out.
    """
    name = next((name for name in ("quantization_config", "compression_config") if keys.get(name)), None)
    if name is None:
        keys, name = Keys.read(keys.path.with_name("hf_quant_config.json")), "quantization"
        if not keys.mapping(name).get("quant_algo"):  # the file may describe only the cache
            return None
    said = _Said(keys, name, keys.get(name))
    for inner in ("quantization_config", "quantization"):  # transformers and vLLM read such files, too
        said = said.below(inner) if said.get(inner) else said
    readers: dict[str, Callable[[_Said], Scheme]] = {
        "fp8": _read_fp8,
        "gptq": _read_gptq,
        "awq": _read_awq,
        "auto-round": _read_auto_round,
        "compressed-tensors": _read_compressed_tensors,
        "modelopt": _read_modelopt,
    }
    otherwise = "compressed-tensors" if name == "compression_config" else "modelopt" if said.get("quant_algo") else None
    method = said.get("quant_method", otherwise)
    if not isinstance(method, str) or method not in readers:
        raise said.refusal("quant_method", method, tuple(readers))
    return readers[method](said)


_NO_LAYERS = ("lm_head", "embed_tokens", "norm")  # ends of names of modules that are no linear layers
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class _Said:
    """One dictionary within config.json. Every error names the file, the path of the key, and its value."""

    def __init__(self, keys: Keys, path: str, values: Any) -> None:
        self._keys, self._path = keys, path
        if not isinstance(values, dict):
            raise ModelError(f"{keys.path}: {path} is {values!r:.80}, expected an object; {_WAY_OUT}")
        self.values: dict[str, Any] = values

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def below(self, key: str) -> "_Said":
        return _Said(self._keys, f"{self._path}.{key}", self.get(key))

    def refusal(self, key: str, value: Any, allowed: Iterable[Any]) -> ModelError:
        given = ", ".join(str(each) for each in allowed if each is not None)
        return ModelError(f"{self._keys.path}: {self._path}.{key} = {value!r:.200} is not supported (only {given}); {_WAY_OUT}")

    def one_of(self, key: str, *allowed: Any, absent: Any = None) -> Any:
        """The value of `key`. Raises: ModelError if it is none of `allowed`."""
        value = self.get(key, absent)
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise self.refusal(key, value, allowed)
        return value

    def empty(self, key: str) -> None:
        """Stop if `key` is not empty, because it would change values in a way that we do not compute."""
        if self.get(key):
            raise self.refusal(key, self.get(key), ("none",))

    def size(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or value <= 0:
            raise self.refusal(key, value, ("a whole number above 0",))
        return value

    def group_size(self, key: str) -> int | None:
        """The group size. None for -1, which stands for one group of all columns."""
        return None if self.get(key) == -1 else self.size(key)

    def block(self, key: str) -> tuple[int, int]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int and each > 0 for each in value):
            raise self.refusal(key, value, ("two whole numbers above 0, such as [128, 128]",))
        return value[0], value[1]

    def block_or_text(self, key: str) -> tuple[int, int]:
        """The same as `block`, which may also be a text such as "128x128"."""
        value = self.get(key)
        sides = re.fullmatch(r"(\d+)x(\d+)", value) if isinstance(value, str) else None
        return self.block(key) if sides is None else _Said(self._keys, self._path, {key: [*map(int, sides.groups())]}).block(key)

    def names(self, key: str) -> tuple[str, ...]:
        value = self.get(key) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refusal(key, value, ("a list of names",))
        for each in value:
            if each.startswith("re:"):
                try:
                    re.compile(each[3:])
                except (re.error, OverflowError, RecursionError):
                    raise self.refusal(key, each, ("regular expressions that are valid",)) from None
        return tuple(value)


def _read_fp8(said: _Said) -> Fp8:
    said.one_of("fmt", "e4m3", "float8_e4m3fn", None)
    activations = said.one_of("activation_scheme", "dynamic", "static", absent="dynamic")
    block = None if said.get("weight_block_size") is None else said.block("weight_block_size")
    ignored = (*said.names("modules_to_not_convert"), *said.names("ignored_layers"))
    return Fp8(block, activations == "static", _ignores_layers(ignored))


def _ignores_layers(names: Iterable[str]) -> bool:
    return any(not name.rstrip(".*$").endswith(_NO_LAYERS) and not reads_images(name) for name in names)


def _plain_modules(said: _Said) -> list[str]:
    """The modules in 16 bits: GPTQModel's `dynamic` and AutoRound's `extra_config` may name them.

    Raises: ModelError if other modules have settings of their own.
    """
    dynamic, extra = (said.get(key) or {} for key in ("dynamic", "extra_config"))
    if not isinstance(dynamic, dict) or not all(name.startswith("-:") for name in dynamic):
        raise said.refusal("dynamic", dynamic, ("modules that are not quantised, as in {'-:lm_head': {}}",))
    if not isinstance(extra, dict) or not all(isinstance(its, dict) and its.get("bits") in (16, 32) for its in extra.values()):
        raise said.refusal("extra_config", extra, ("modules of 16 bits, as in {'lm_head': {'bits': 16}}",))
    return [*dynamic, *extra]


def _read_gptq(said: _Said) -> Gptq:
    bits = said.one_of("bits", 4, 8)
    form = said.one_of("format" if said.get("format") else "checkpoint_format", "gptq", "gptq_v2", "", None)
    said.one_of("is_marlin_format", False, None)
    said.one_of("pack_dtype", "int32", None)
    reorders = said.one_of("desc_act", True, False, absent=False)
    symmetric = said.one_of("sym", True, False, None) is True
    return Gptq(
        bits,
        said.group_size("group_size"),
        symmetric,
        reorders,
        adds_one=form != "gptq_v2",
        ignores_layers=_ignores_layers(_plain_modules(said)) or _leaves_layers(said),
    )


def _leaves_layers(said: _Said) -> bool:
    """Whether `modules_in_block_to_quantize`, a list of lists of names, leaves out some of a block's layers."""
    names = str(said.get("modules_in_block_to_quantize") or _LAYERS)
    return not all(layer in names for layer in _LAYERS)


def _read_awq(said: _Said) -> Awq:
    said.one_of("w_bit" if "w_bit" in said.values else "bits", 4)
    for key in ("version", "format", "checkpoint_format"):
        said.one_of(key, "gemm", "GEMM", None)
    if said.get("backend") == "llm-awq":  # others only choose kernels
        raise said.refusal("backend", "llm-awq", ("autoawq; llm-awq packs in another order",))
    has_zeros = said.one_of("zero_point", True, False, absent=True)
    ignores = _ignores_layers((*said.names("modules_to_not_convert"), *_plain_modules(said)))
    return Awq(said.group_size("q_group_size" if "q_group_size" in said.values else "group_size"), has_zeros, ignores)


def _read_auto_round(said: _Said) -> Gptq | Awq:
    """AutoRound packs matrices as GPTQ or AWQ does. Source: `inc.py` of vLLM."""
    said.one_of("data_type", "int", None)
    bits, symmetric = said.one_of("bits", 4, 8), said.one_of("sym", True, False, absent=True)
    packings: tuple[str, ...] = ("auto_round:auto_gptq",)
    if symmetric:  # these differ only in their zeros
        packings = (*packings, "auto_round:gptq", "auto_round:gptqmodel", "auto_round")
    if bits == 4:
        packings = (*packings, "auto_round:auto_awq", "auto_round:awq")
    packing = said.one_of("packing_format", *packings, absent=packings[0])
    ignores, group_size = _ignores_layers(_plain_modules(said)), said.group_size("group_size")
    if packing.endswith("awq"):
        return Awq(group_size, not symmetric, ignores)
    return Gptq(bits, group_size, symmetric, reorders=False, adds_one=True, ignores_layers=ignores)


def _read_modelopt(said: _Said) -> ModelOpt:
    named = said.one_of("quant_algo", "NVFP4", "W4A16_NVFP4", "FP8")
    algorithm: Literal["NVFP4", "FP8"] = "FP8" if named == "FP8" else "NVFP4"
    inputs_in_4_bits = named == "NVFP4"
    if said.get("config_groups"):
        for name in (groups := said.below("config_groups")).values:
            inputs_in_4_bits = inputs_in_4_bits and _has_inputs_in_4_bits(groups.below(name))
            weights = groups.below(name).below("weights")
            weights.one_of("num_bits", 4 if algorithm == "NVFP4" else 8)
            weights.one_of("group_size", *((NVFP4_GROUP,) if algorithm == "NVFP4" else (None,)))
    ignored = (*said.names("ignore"), *said.names("exclude_modules"))
    return ModelOpt(algorithm, inputs_in_4_bits, _ignores_layers(ignored))


def _read_compressed_tensors(said: _Said) -> CompressedTensors:
    said.one_of("quantization_status", "compressed", "frozen", None)  # older files have "frozen" for compressed tensors
    said.empty("transform_config")
    if said.get("sparsity_config"):
        said.below("sparsity_config").one_of("format", "dense", None)
    groups = said.below("config_groups")
    if not groups.values:
        raise said.refusal("config_groups", {}, ("at least one group",))
    found = []
    for name in groups.values:
        group = groups.below(name)
        own = said if group.get("format") is None else group
        found.append(_read_group(group, own.one_of("format", *_TYPES)))
    ignored, has_cache_scales = said.names("ignore"), bool(said.get("kv_cache_scheme"))
    return CompressedTensors(tuple(found), ignored, has_cache_scales, _ignores_layers(ignored))


# The types of values that each format of compressed-tensors may have.
_TYPES = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
    "nvfp4-pack-quantized": ("float",),
    "mxfp4-pack-quantized": ("float",),
}


# The strategy and the columns of a group, for the formats in e2m1.
_FP4: dict[str, tuple[Literal["tensor_group", "group"], int]] = {
    "nvfp4-pack-quantized": ("tensor_group", NVFP4_GROUP),
    "mxfp4-pack-quantized": ("group", MXFP4_GROUP),
}


def _has_inputs_in_4_bits(group: _Said) -> bool:
    """Whether the group's `input_activations` are numbers of 4 bits. A group of weights alone has none."""
    return bool(group.get("input_activations")) and group.below("input_activations").get("num_bits") == 4


def _read_group(group: _Said, form: str) -> Group:
    weights, targets = group.below("weights"), group.names("targets")
    packed = form.endswith("pack-quantized")
    kind = weights.one_of("type", *_TYPES[form], absent="int")
    weights.one_of("dynamic", False, None)
    activations = group.below("input_activations").get("dynamic") if group.get("input_activations") else None
    has_input_scales = activations in (False, "local")  # "local" has one scale for the matrix, and others at run time
    if form in _FP4:
        strategy, columns = _FP4[form]
        for key, value in (("num_bits", 4), ("strategy", strategy), ("group_size", columns)):
            weights.one_of(key, value)
        weights.one_of("symmetric", True, absent=True)
        in_4_bits = form == "nvfp4-pack-quantized" and _has_inputs_in_4_bits(group)
        return Group(
            targets, 4, True, strategy, symmetric=True, packed=True, has_input_scales=has_input_scales, inputs_in_4_bits=in_4_bits
        )
    named = weights.one_of("strategy", *get_args(Strategy), absent=_strategy_of(weights))
    return Group(
        targets=targets,
        bits=weights.one_of("num_bits", *((4, 8) if packed else (8,))),
        is_float=kind == "float",
        strategy=named,
        symmetric=weights.one_of("symmetric", True, False, absent=True),
        packed=packed,
        group_size=weights.size("group_size") if named == "group" else None,
        block=weights.block_or_text("block_structure") if named == "block" else None,
        reorders=weights.one_of("actorder", None, "weight", "static", "group", "dynamic") in ("group", "dynamic"),
        has_input_scales=has_input_scales,
    )


def _strategy_of(weights: _Said) -> Strategy:
    """The strategy of a file without this key. Source: `QuantizationArgs` of compressed-tensors."""
    found: dict[Any, Strategy] = {None: "tensor", -1: "channel"}
    return found.get(weights.get("group_size"), "group")
