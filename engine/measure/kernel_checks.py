"""Compares each kernel with its reference on this device. On a new kind of card this is the first check."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.codes import E4M3_DIVISOR, Form
from engine.devices import LEAST_CAPABILITY, is_8_bits
from engine.draws import Row, uniform
from engine.kernels import nvfp4, reference
from engine.kernels.attention_decode import PAGE, DecodeWorkspace, decode_cluster, decode_items, most_items
from engine.kernels.cache8 import Cache8, rounded, widened
from engine.kernels.launch import is_hopper
from engine.kernels.linear_packed import unpacked
from engine.kernels.packed import Packed, pack
from engine.kernels.quantize import Quantized, quantize, quantize_weight, rotation
from engine.kernels.tiles import HEAD_DIMS, LEAST_TILED, Shape, attention_tiles, hopper_shape, paged_tiles, tile_shapes
from engine.model.quantized.kept import IN_BLOCKS, packed, to_four_bits
from engine.model.quantized.layout import Codes
from engine.options import SamplingOptions

_EPS = 1e-6  # of norms
_LENGTHS = (1, 7, 33, 128, 2, 129, 5, 300, 1)  # tokens of the sequences of a ragged batch
_NUM_TOKENS = sum(_LENGTHS)
_LONE = (900,)  # tokens of a sequence that is alone in its pass
_FACTOR = 2.0  # the largest allowed ratio of a kernel's error to the error of plain torch in the same dtype
_ROUNDING = 1e-6
# Query heads and key heads by head size, as in published models.
_HEADS = {32: (12, 12), 64: (14, 2), 96: (4, 4), 128: (16, 8), 256: (3, 1)}


@dataclass(frozen=True, slots=True)
class Checked:
    """One kernel on one shape. `error` is the largest absolute difference from the reference in fp32.

    `problem` says what the kernel did instead of giving a result. A NaN in the result is an error of infinity.
    """

    kernel: str
    shape: str
    error: float = math.inf
    tolerance: float = 0.0
    problem: str | None = None

    @property
    def is_right(self) -> bool:
        return self.problem is None and self.error <= self.tolerance


class Results(NamedTuple):
    """The results of the kernel, of plain torch in the same dtype, and of plain torch in fp32."""

    ours: Tensor
    low: Tensor
    exact: Tensor


_OTHER_FORMS = (Form(16, is_float=True), Form(32, 5, "mins"), Form(16, 6), Form(32, 8), IN_BLOCKS)  # besides int4's form
_CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}  # of keys and values in 8 bits


class Case(NamedTuple):
    kernel: str
    shape: str
    run: Callable[[], Results]


def check_kernels(device: torch.device, on_result: Callable[[Checked], None] = lambda _: None) -> list[Checked]:
    """Runs every kernel that the engine uses on this device, one after the other, with all of its shapes. `on_result` gets each
    result.

    On a CPU, and for attention before sm_80, plain torch computes, and nothing is compared.
    """
    found, order = list[Checked](), dict[str, int]()
    for case in sorted(cases(device), key=lambda case: order.setdefault(case.kernel, len(order))):
        found.append(check(case))
        on_result(found[-1])
    return found


def check(case: Case) -> Checked:
    """An exception of the kernel becomes the result's `problem`."""
    try:
        with torch.inference_mode():
            ours, low, exact = (each.double().cpu() for each in case.run())
    except Exception as error:  # a compiler, a driver or torch may raise anything; the report continues with the next kernel
        return Checked(case.kernel, case.shape, problem=_one_line(error))
    worst = float((ours - exact).abs().max())
    tolerance = _FACTOR * float((low - exact).abs().max()) + _ROUNDING * max(1.0, float(exact.abs().max()))
    return Checked(case.kernel, case.shape, worst if math.isfinite(worst) else math.inf, tolerance)


def cases(device: torch.device) -> Iterator[Case]:
    """The cases for this device, the simplest kernels first. Tensors are made when a case runs."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    make = Maker(device, torch.bfloat16 if capability >= (8, 0) else torch.float16)
    yield from elementwise_cases(make)
    yield from product_cases(make)
    for dtype, least in LEAST_CAPABILITY.items():
        if capability >= least:
            yield from cases_in_8_bits(make, dtype) if is_8_bits(dtype) else cases_in_codes(make)
    if capability[0] == 12:
        yield from nvfp4_cases(make)
    if capability >= (8, 0):
        yield from attention_cases(make, capability)
        yield from paged_cases(make, capability)
    yield Case("sample", "64 rows of 151,936", partial(_sample, make, 64, 151_936))


class Maker:
    """Makes the operands. The random numbers of a case do not depend on earlier cases."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device)

    def reset(self) -> None:
        self._generator.manual_seed(0)

    def normal(self, *shape: int, mean: float = 0.0, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, device=self.device, generator=self._generator)
        return (values * scale + mean).to(self.dtype)

    def numbers(self, values: Any) -> Tensor:
        """Whole numbers as int32 on the device."""
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(self.device)

    def positions(self) -> Tensor:
        """[T] int32, of each token in its sequence."""
        return self.numbers(np.concatenate([np.arange(length) for length in _LENGTHS]))

    def cu_seqlens(self) -> Tensor:
        return self.numbers(np.cumsum((0, *_LENGTHS)))

    def bounds(self) -> Tensor:
        """[T, 2] int32, the rows of the sequence that each token belongs to."""
        ends = np.cumsum(_LENGTHS)
        return self.numbers(np.repeat(np.stack((ends - _LENGTHS, ends), axis=1), _LENGTHS, axis=0))


def compared(
    make: Maker,
    ours: Callable[..., Any],
    plain: Callable[..., Any],
    arguments: Callable[[Maker], tuple[Any, ...]],
    changed: int | None = None,
) -> Results:
    """Calls the kernel and its reference, each with its own operands.

    Args:
        arguments: makes the operands.
        changed: the index of the argument that the operation writes to. None: it returns its result.
    """
    make.reset()
    made = arguments(make)

    def result(call: Callable[..., Any], wide: bool) -> Tensor:
        given = [_copy(each, wide) for each in made]
        returned = call(*given)
        tensor: Tensor = returned if changed is None else given[changed]
        return tensor

    return Results(result(ours, False), result(plain, False), result(plain, True))


def elementwise_cases(make: Maker) -> Iterator[Case]:
    tokens = f"{_NUM_TOKENS} x"

    def case(name: str, shape: str, ours: Any, plain: Any, arguments: Any, changed: int | None = None) -> Case:
        return Case(name, shape, partial(compared, make, ours, plain, arguments, changed))

    yield case(
        "embed", f"{tokens} 1024", kernels.embed, reference.embed,
        lambda m: (m.numbers(np.arange(_NUM_TOKENS) % 500), m.positions(), m.normal(500, 1024), m.normal(300, 1024)),
    )  # fmt: skip
    for width in (384, 1024, 4096):
        yield case(
            "rms_norm", f"{tokens} {width}", kernels.rms_norm, reference.rms_norm,
            lambda m, c=width: (m.normal(_NUM_TOKENS, c), m.normal(c, mean=1), _EPS),
        )  # fmt: skip
        yield case(
            "rms_norm + residual", f"{tokens} {width}", kernels.rms_norm, reference.rms_norm,
            lambda m, c=width: (m.normal(_NUM_TOKENS, c), m.normal(c, mean=1), _EPS, m.normal(_NUM_TOKENS, c)),
        )  # fmt: skip
    yield case(
        "layer_norm", f"{tokens} 768", kernels.layer_norm, reference.layer_norm,
        lambda m: (
            m.normal(_NUM_TOKENS, 768), m.normal(768, mean=1), m.normal(768), _EPS, m.normal(768), m.normal(_NUM_TOKENS, 768)
        ),
    )  # fmt: skip
    for head_dim in (64, 128):
        yield case(
            "norm_rope", f"{tokens} 32 heads x {head_dim}", kernels.norm_rope, reference.norm_rope,
            lambda m, d=head_dim: (*_qkv_and_norms(m, d), *_angles(m, d), _EPS, 16), changed=0,
        )  # fmt: skip
    yield case(
        "rope", f"{tokens} 32 heads x 64", kernels.rope, reference.rope,
        lambda m: (m.normal(_NUM_TOKENS, 32, 64), *_angles(m, 64), 16), changed=0,
    )  # fmt: skip
    yield case(
        "rope_store", f"{tokens} 32 heads x 128", kernels.rope_store, reference.rope_store,
        lambda m: _rope_store_arguments(m, 128), changed=4,
    )  # fmt: skip
    for name, codes in _CODES.items():
        yield Case("rope_store", f"{tokens} 32 heads x 128, in {name}", partial(_rope_store_in_8_bits, make, 128, codes))
    yield case("swiglu", f"{tokens} 3072", kernels.swiglu, reference.swiglu, lambda m: (m.normal(_NUM_TOKENS, 6144),))
    yield case("geglu", f"{tokens} 1152", kernels.geglu, reference.geglu, lambda m: (m.normal(_NUM_TOKENS, 2304), True))
    yield case("gelu", f"{tokens} 3072", kernels.gelu, reference.gelu, lambda m: (m.normal(_NUM_TOKENS, 3072), m.normal(3072)))
    yield case(
        "pool_mean", f"{tokens} 768", kernels.pool_mean, reference.pool_mean,
        lambda m: (m.normal(_NUM_TOKENS, 768, mean=1), m.cu_seqlens()),
    )  # fmt: skip
    yield case(
        "pool_finish", "9 x 1024", kernels.pool_finish, reference.pool_finish,
        lambda m: (m.normal(9, 1024), m.numbers([1, 7, 33, 512, 1024, 1000, 8, 1024, 256]), m.numbers([1, 0, 1] * 3)),
    )  # fmt: skip


def product_cases(make: Maker) -> Iterator[Case]:
    """On Hopper these numbers of rows take four different products."""
    for rows in (1, 8, 60, 300, 4096):
        for n, k in ((4096, 1024), (2560, 9728)):
            run = partial(compared, make, kernels.linear, reference.linear, partial(_normed_operands, rows=rows, n=n, k=k))
            yield Case("linear", f"{rows} x {k} x {n}", run)
        run = partial(compared, make, kernels.linear_add, _linear_add, partial(_operands, rows=rows, n=1024, k=3072))
        yield Case("linear_add", f"{rows} x 3072 x 1024", run)
        arguments = partial(_normed_operands, rows=rows, n=6144, k=1024)
        yield Case(
            "linear_swiglu", f"{rows} x 1024 x 6144", partial(compared, make, kernels.linear_swiglu, _linear_swiglu, arguments)
        )


def cases_in_8_bits(make: Maker, dtype: torch.dtype) -> Iterator[Case]:
    name = "int8" if dtype == torch.int8 else "e4m3"
    for width in (1024, 3072):
        yield Case("quantize", f"{name} {_NUM_TOKENS} x {width}", partial(_quantize, make, dtype, width))
    for rows in (1, 32, 300):
        yield Case("linear8", f"{name} {rows} x 3072 x 1024", partial(_linear8, make, dtype, rows, 1024, 3072))
        yield Case("linear8_add", f"{name} {rows} x 3072 x 1024", partial(_linear8_add, make, dtype, rows, 1024, 3072))
        yield Case("linear8_swiglu", f"{name} {rows} x 1024 x 6144", partial(_linear8_swiglu, make, dtype, rows, 3072, 1024))
        yield Case("linear8_gelu", f"{name} {rows} x 768 x 3072", partial(_linear8_gelu, make, dtype, rows, 3072, 768))
        if dtype == torch.float8_e4m3fn:
            what = f"{name} {rows} x 768 x 3072"
            yield Case("linear8_gelu_in_e4m3", what, partial(_linear8_gelu, make, dtype, rows, 3072, 768, in_e4m3=True))
    for rows in (1, 16):
        what = f"{name} {rows} x 1024 x 4096, x in 16 bits"
        yield Case("linear8", what, partial(_linear8_of_16_bits, make, dtype, rows, 4096, 1024))
    if dtype == torch.float8_e4m3fn and (make.device.type == "cpu" or is_hopper(make.device)):
        for rows in (1, 32, 300):
            yield Case(
                "linear8", f"{name} {rows} x 3072 x 1024, scales of blocks", partial(_linear8_in_blocks, make, rows, 1024, 3072)
            )


def cases_in_codes(make: Maker) -> Iterator[Case]:
    """Products of few rows read the codes, by several kernels. For 300 rows W is written out, whole or in parts."""
    for rows in (1, 16, 24, 64, 200, 300):
        for name, ours, plain, operands, n, k in (
            ("linear_packed", kernels.linear_packed, reference.linear, _normed_operands, 4096, 1024),
            ("linear_packed_in_parts", kernels.linear_packed_in_parts, F.linear, _two_operands, 4096, 1024),
            ("linear_packed_add", kernels.linear_packed_add, _linear_add, _operands, 1024, 3072),
            ("linear_packed_swiglu", kernels.linear_packed_swiglu, _linear_swiglu, _normed_operands, 6144, 1024),
        ):
            given = partial(operands, rows=rows, n=n, k=k)
            yield Case(name, f"{rows} x {k} x {n}", partial(_linear_packed, make, ours, plain, given))
        for form in _OTHER_FORMS if rows in (1, 64) else ():
            yield Case("linear_packed", f"{rows} x 1024 x 4096, {form}", partial(_linear_of_form, make, rows, 4096, 1024, form))
    for rows in (1, 64, 300):
        yield Case("linear_packed", f"{rows} x 1024 x 4096, in another order", partial(_linear_in_order, make, rows, 4096, 1024))
    for form in _OTHER_FORMS:
        yield Case("embed_packed", f"{_NUM_TOKENS} x 1024, {form}", partial(_embed_packed, make, 512, 1024, form))


def nvfp4_cases(make: Maker) -> Iterator[Case]:
    """Also where the engine dequantises NVFP4, because its own check has failed."""
    for rows in (150, 1024):
        yield Case("linear_nvfp4", f"{rows} x 1024 x 4096", partial(_linear_nvfp4, make, rows, 4096, 1024))


def attention_cases(make: Maker, capability: tuple[int, int]) -> Iterator[Case]:
    for head_dim in HEAD_DIMS:
        for label, shape in _shapes(head_dim, capability):
            for mask, causal, window in (("causal", True, None), ("bidirectional", False, None), ("window 17", True, 17)):
                heads = _HEADS[head_dim]
                described = f"{label} {mask}, {_NUM_TOKENS} x {heads[0]}/{heads[1]} heads x {head_dim}"
                yield Case("attention", described, partial(_attention, make, head_dim, shape, causal, window))


def paged_cases(make: Maker, capability: tuple[int, int]) -> Iterator[Case]:
    for head_dim in (64, 128):
        heads = _HEADS[head_dim]
        for label, shape in _shapes(head_dim, capability):
            described = f"{label} {_NUM_TOKENS} x {heads[0]}/{heads[1]} heads x {head_dim}"
            yield Case("paged_attention", described, partial(_paged_attention, make, head_dim, shape))
        for label, shape in zip(("large tiles", "small tiles"), tile_shapes(head_dim, LEAST_TILED), strict=True):
            described = f"{label} {_NUM_TOKENS} x {heads[0]}/{heads[1]} heads x {head_dim}"
            for name, codes in _CODES.items():
                in_8_bits = partial(_paged_attention, make, head_dim, shape, codes)
                yield Case("paged_attention", f"{described}, in {name}", in_8_bits)
        for num_blocks, parts, lengths, cluster in (
            (1, "whole sequences", _LENGTHS, 1),
            (1000, "sequences in parts", _LENGTHS, 1),
            (1, "a lone sequence", _LONE, decode_cluster(*_LONE, capability)),
        ):
            described = f"{parts}, {len(lengths)} x {heads[0]}/{heads[1]} heads x {head_dim}"
            check = partial(_attention_decode, make, head_dim, lengths, num_blocks, cluster)
            yield Case("attention_decode", described, check)
            for name, codes in _CODES.items():
                yield Case("attention_decode", f"{described}, in {name}", partial(check, codes))


def _shapes(head_dim: int, capability: tuple[int, int]) -> Iterator[tuple[str, Shape]]:
    large, small = tile_shapes(head_dim, capability)
    wgmma = hopper_shape(head_dim, capability)
    yield from (("large tiles", large), ("small tiles", small))
    if wgmma is not None:
        yield "wgmma", wgmma


def _qkv_and_norms(make: Maker, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """16 query heads and 8 key heads."""
    return make.normal(_NUM_TOKENS, 32, head_dim), make.normal(head_dim, mean=1), make.normal(head_dim, mean=1)


def _angles(make: Maker, head_dim: int) -> tuple[Tensor, Tensor]:
    return reference.rope_table(head_dim, 1e6, max(_LENGTHS), make.device), make.positions()


def _rope_store_arguments(make: Maker, head_dim: int) -> tuple[Any, ...]:
    """Every seventh token has no place in the cache."""
    qkv, q_weight, k_weight = _qkv_and_norms(make, head_dim)
    cache = make.normal(2, 6 * PAGE, 8, head_dim)
    slots = np.random.default_rng(0).permutation(6 * PAGE)[:_NUM_TOKENS]
    slots[::7] = -1
    return qkv, *_angles(make, head_dim), 16, cache, make.numbers(slots), (q_weight, k_weight, _EPS)


def _rope_store_in_8_bits(make: Maker, head_dim: int, codes: torch.dtype) -> Results:
    """Compares the values that the codes and scales stand for, as shares of their head's largest value."""

    def stored(store: Callable[..., None]) -> Tensor:
        make.reset()
        *before, cache, slots, norms = _rope_store_arguments(make, head_dim)
        in_8_bits, _ = _in_8_bits(cache, codes)
        store(*before, in_8_bits, slots, norms)
        return in_8_bits.rows(slots[slots >= 0].long(), torch.float32)

    make.reset()
    qkv, table, positions, n_heads, cache, slots, norms = _copy(_rope_store_arguments(make, head_dim), wide=True)
    reference.rope_store(qkv, table, positions, n_heads, cache, slots, norms)
    exact = cache[:, slots[slots >= 0].long()]
    most = exact.abs().amax(-1, keepdim=True)
    return Results(stored(kernels.rope_store) / most, stored(reference.rope_store) / most, exact / most)


def _operands(make: Maker, rows: int, n: int, k: int) -> tuple[Any, ...]:
    """x, W and a residual."""
    return make.normal(rows, k), make.normal(n, k, scale=k**-0.5), make.normal(rows, n)


def _two_operands(make: Maker, rows: int, n: int, k: int) -> tuple[Any, ...]:
    """x and W."""
    return _operands(make, rows, n, k)[:2]


def _normed_operands(make: Maker, rows: int, n: int, k: int) -> tuple[Any, ...]:
    """x, W, the weight of a norm of x and its epsilon."""
    return make.normal(rows, k), make.normal(n, k, scale=k**-0.5), make.normal(k, mean=1), _EPS


def _linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return residual + F.linear(x, weight)


def _linear_swiglu(x: Tensor, gate_up: Tensor, norm: Tensor, eps: float) -> Tensor:
    return reference.swiglu(reference.linear(x, gate_up, norm, eps), interleaved=True)


def _quantize(make: Maker, dtype: torch.dtype, width: int) -> Results:
    """Compares the values that the 8 bits stand for. The error of plain torch is the rounding to 8 bits."""
    make.reset()
    x, block = make.normal(_NUM_TOKENS, width), rotation(dtype)
    exact = x.float()
    if block:
        exact = (exact.view(_NUM_TOKENS, -1, block) @ reference.hadamard(block, make.device)).flatten(1)
    return Results(_wide(quantize(x, dtype)), _wide(Quantized(*reference.quantize(x, dtype, block))), exact)


def _linear8(make: Maker, dtype: torch.dtype, rows: int, n: int, k: int) -> Results:
    """The operands are already in 8 bits. `low` has the largest error of sums of 14 bits, which Hopper's e4m3 uses."""
    x, weight = _operands_in_8_bits(make, dtype, rows, n, k)
    exact = F.linear(_wide(x), _wide(weight))
    return Results(kernels.linear8(x, weight), exact + _allowed(exact, dtype, k), exact)


def _linear8_in_blocks(make: Maker, rows: int, n: int, k: int) -> Results:
    """As `_linear8`, for a weight with `block_scale`. Sums of 128 columns have 14 bits."""
    x, weight = _operands_in_8_bits(make, torch.float8_e4m3fn, rows, n, k)
    block_scale = (make.normal(k // 128, n // 8).float().abs() + 0.1) / 1e4
    exact = F.linear(_wide(x), reference.scaled_blocks(weight.values, block_scale))
    found = kernels.linear8(x, Quantized(weight.values, torch.ones_like(weight.scale), block_scale))
    return Results(found, exact + _allowed(exact, torch.float8_e4m3fn, 128), exact)


def _linear8_of_16_bits(make: Maker, dtype: torch.dtype, rows: int, n: int, k: int) -> Results:
    """x in 16 bits. `low` rounds x to 8 bits, like the product."""
    make.reset()
    x, norm = make.normal(rows, k), make.normal(k, mean=1)
    weight = quantize_weight(make.normal(n, k, scale=k**-0.5), dtype)
    values = _wide(weight)
    if block := rotation(dtype):
        values = (values.view(n, -1, block) @ reference.hadamard(block, make.device)).flatten(1)
    low = reference.linear8(*reference.quantize(x, dtype, rotation(dtype), norm, _EPS), weight.values, weight.scale)
    return Results(kernels.linear8(x, weight, norm, _EPS), low, reference.linear(x.float(), values, norm.float(), _EPS))


def _linear8_add(make: Maker, dtype: torch.dtype, rows: int, n: int, k: int) -> Results:
    """As `_linear8`. Some products leave the addition to the next operation."""
    x, weight = _operands_in_8_bits(make, dtype, rows, n, k)
    residual = torch.ones(rows, n, dtype=torch.bfloat16, device=make.device)
    exact = 1 + F.linear(_wide(x), _wide(weight))
    pending = kernels.linear8_add(x, weight, residual)
    return Results(residual if pending is None else residual + pending, exact + _allowed(exact, dtype, k), exact)


def _linear8_swiglu(make: Maker, dtype: torch.dtype, rows: int, n: int, k: int) -> Results:
    """The result is in 8 bits again. Its error is half a step, and another half step by the 16 bits of gate and up.

    In e4m3 all results fit, as in a model: SwiGLU of the operands gives at most about 20.
    """
    x, weight = _operands_in_8_bits(make, dtype, rows, 2 * n, k)
    exact = reference.swiglu(F.linear(_wide(x), _wide(weight)), interleaved=True)
    if block := rotation(dtype):
        exact = (exact.view(rows, -1, block) @ reference.hadamard(block, make.device)).flatten(1)
    allowed = float(exact.abs().max()) * (1 / 127 if dtype == torch.int8 else 1 / 32)
    found = kernels.linear8_swiglu(x, weight, fits=dtype == torch.float8_e4m3fn)
    assert isinstance(found, Quantized), "the result is quantised, like x"
    return Results(_wide(found), exact + allowed, exact)


def _linear8_gelu(make: Maker, dtype: torch.dtype, rows: int, n: int, k: int, in_e4m3: bool = False) -> Results:
    """As `_linear8`. Results in e4m3 are rounded by a 32nd at most, if they are not among the smallest."""
    x, weight = _operands_in_8_bits(make, dtype, rows, n, k)
    bias = make.normal(n)
    exact = F.gelu(F.linear(_wide(x), _wide(weight)) + bias.float())
    allowed = _allowed(exact, dtype, k)
    if not in_e4m3:
        return Results(kernels.linear8_gelu(x, weight, bias), exact + allowed, exact)
    found = kernels.linear8_gelu_in_e4m3(x, weight, bias)
    values = _wide(found) if isinstance(found, Quantized) else found.float()
    return Results(values, exact + allowed + float(exact.abs().max()) / 32, exact)


def _linear_packed(make: Maker, ours: Callable[..., Any], plain: Callable[..., Any], operands: Callable[[Maker], Any]) -> Results:
    """Plain torch multiplies with the values that the codes stand for."""
    make.reset()
    x, weight, *others = operands(make)
    kept = packed(to_four_bits(weight))
    values = unpacked(kept, torch.float32)
    low = plain(x, values.to(make.dtype), *others)
    exact = plain(x.float(), values, *(_copy(each, wide=True) for each in others))
    return Results(ours(x, kept, *others), low, exact)


def _linear_of_form(make: Maker, rows: int, n: int, k: int, form: Form) -> Results:
    """As `_linear_packed`, with random codes."""
    kept = _random_codes(make, n, k, form)
    x, values = make.normal(rows, k), unpacked(kept, torch.float32)
    low, exact = (reference.linear(each, values.to(each.dtype), None, 0.0) for each in (x, x.float()))
    return Results(kernels.linear_packed(x, kept), low, exact)


def _linear_in_order(make: Maker, rows: int, n: int, k: int) -> Results:
    """As `_linear_packed`, with records that have W's columns in reverse order."""
    make.reset()
    x, weight, norm, eps = _normed_operands(make, rows, n, k)
    order = make.numbers(np.arange(k)[::-1])
    kept = replace(packed(to_four_bits(weight)), order=order)
    values = unpacked(kept, torch.float32)[:, order]
    low, exact = (reference.linear(each, values.to(each.dtype), norm.to(each.dtype), eps) for each in (x, x.float()))
    return Results(kernels.linear_packed(x, kept, norm, eps), low, exact)


def _linear_nvfp4(make: Maker, rows: int, n: int, k: int) -> Results:
    """`low` is the exact product of the rounded x, rounded once. The rows' scales are powers of 2, so fp16 holds all scales."""
    make.reset()
    codes = (make.normal(n, k).float() * 2 + 8).clamp(0, 15).to(torch.uint8)
    scales = (make.normal(n, k // 16).float().abs() * 64 + 16).to(torch.float8_e4m3fn).float()
    row_scales = torch.full((n,), 2.0**-12, device=make.device)
    kept = pack(codes, nvfp4.FORM, (scales * row_scales[:, None]).half(), row_scales=row_scales)
    x, values = make.normal(rows, k), unpacked(kept, torch.float32)
    exact = reference.linear_nvfp4(x, values)
    return Results(nvfp4.linear_nvfp4(x, kept), exact.to(make.dtype), exact)


def _embed_packed(make: Maker, n: int, k: int, form: Form) -> Results:
    kept, ids = _random_codes(make, n, k, form), make.numbers(np.arange(_NUM_TOKENS) % n)
    low, exact = (reference.embed_packed(ids, kept.records, form, dtype) for dtype in (make.dtype, torch.float32))
    return Results(kernels.embed_packed(ids, kept, make.dtype), low, exact)


def _random_codes(make: Maker, n: int, k: int, form: Form) -> Packed:
    make.reset()
    if form == IN_BLOCKS:
        values = make.normal(n, k).to(torch.float8_e4m3fn)
        scales = (make.normal(n, k // form.group).float().abs() + 0.5) * E4M3_DIVISOR / k**0.5
        return packed(Codes(values.view(torch.uint8), scales, form.bits, is_float=True))
    most = 1 << form.bits
    codes = (make.normal(n, k).float() * most / 8 + most / 2).clamp(0, most - 1).to(torch.uint8)
    scales = (make.normal(n, k // form.group).float().abs() + 0.5) * 8 / most / k**0.5
    mins = -scales * most / 2 if form.beside == "mins" else None
    return packed(Codes(codes, scales, form.bits, mins=mins, is_float=form.is_float))


def _operands_in_8_bits(make: Maker, dtype: torch.dtype, rows: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    """x [rows, k] and W [n, k]."""
    make.reset()
    x = Quantized(*reference.quantize(make.normal(rows, k), dtype, rotation(dtype)))
    return x, quantize_weight(make.normal(n, k, scale=k**-0.5), dtype)


def _allowed(exact: Tensor, dtype: torch.dtype, k: int) -> float:
    return 2**-8 * float(exact.abs().max()) * (1 if dtype == torch.int8 else 1 + k / 4096)


def _attention(make: Maker, head_dim: int, shape: Shape, causal: bool, window: int | None) -> Results:
    make.reset()
    n_heads, n_kv_heads = _HEADS[head_dim]
    qkv = make.normal(_NUM_TOKENS, n_heads + 2 * n_kv_heads, head_dim)
    q, k, v = qkv[:, :n_heads], qkv[:, n_heads:-n_kv_heads], qkv[:, -n_kv_heads:]
    tiles = make.numbers(attention_tiles(_LENGTHS, shape.block_m // (n_heads // n_kv_heads), (), causal))
    ours = kernels.attention(q, k, v, tiles, shape, make.bounds(), causal, window)
    low, exact = (
        reference.attention(q.to(dtype), k.to(dtype), v.to(dtype), _LENGTHS, causal, window)
        for dtype in (make.dtype, torch.float32)
    )
    return Results(ours, low, exact)


def _paged_attention(make: Maker, head_dim: int, shape: Shape, codes: torch.dtype | None = None) -> Results:
    """Each sequence continues a sequence of 100 tokens."""
    make.reset()
    before = 100
    n_heads, n_kv_heads = _HEADS[head_dim]
    cache, pages, offsets = _cache(make, [before + length for length in _LENGTHS], n_kv_heads, head_dim)
    given, cache = (cache, cache) if codes is None else _in_8_bits(cache, codes)
    q = make.normal(_NUM_TOKENS, n_heads, head_dim)
    depth = shape.block_m // (n_heads // n_kv_heads)
    tiles = make.numbers(paged_tiles(_LENGTHS, [before] * len(_LENGTHS), offsets, 0, depth))
    ours = kernels.paged_attention(q, given, tiles, pages, shape)
    low, exact = (
        reference.paged_attention(q.to(dtype), cache.to(dtype), tiles, pages, PAGE) for dtype in (make.dtype, torch.float32)
    )
    return Results(ours, low, exact)


def _attention_decode(
    make: Maker, head_dim: int, lengths: Sequence[int], num_blocks: int, cluster: int, codes: torch.dtype | None = None
) -> Results:
    make.reset()
    n_heads, n_kv_heads = _HEADS[head_dim]
    cache, pages, offsets = _cache(make, lengths, n_kv_heads, head_dim)
    given, cache = (cache, cache) if codes is None else _in_8_bits(cache, codes)
    q = make.normal(len(lengths), n_heads, head_dim)
    items = make.numbers(decode_items(lengths, offsets, n_kv_heads, num_blocks))
    workspace = DecodeWorkspace.create(most_items(len(lengths), n_kv_heads, num_blocks), n_heads, head_dim, make.device)
    ours = kernels.attention_decode(q, given, items, pages, workspace, cluster=cluster)
    low, exact = (
        reference.attention_decode(
            q.to(dtype), cache.to(dtype), items, pages, torch.empty(q.shape, dtype=dtype, device=make.device)
        )
        for dtype in (make.dtype, torch.float32)
    )
    return Results(ours, low, exact)


def _sample(make: Maker, num_rows: int, vocab_size: int) -> Results:
    """Compares the log-probabilities of the chosen tokens. A random number at the border of two tokens may choose either of
    them, but a wrong token has another log-probability."""
    make.reset()
    logits = make.normal(num_rows, vocab_size, scale=3.0)
    rows = [
        Row(SamplingOptions(max_tokens=1, temperature=0.0 if number % 2 else 0.7, top_k=20, logprobs=0), uniform(7, number))
        for number in range(num_rows)
    ]
    choices = make.numbers(kernels.choices_of(rows, [-1] * num_rows))
    chosen = kernels.sample(logits, choices)
    exact = reference.sample(logits, choices, None, torch.empty_like(chosen))
    ours, plain = (each[:, 2].contiguous().view(torch.float32) for each in (chosen, exact))
    return Results(ours, plain + 1e-4, plain)


def _cache(make: Maker, lengths: Any, n_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, list[int]]:
    """Keys and values in shuffled pages.

    Returns: the cache [2, S, K, D], the pages of all sequences, and the index of each sequence's first page.
    """
    counts = [-(-length // PAGE) for length in lengths]
    pages = np.random.default_rng(0).permutation(sum(counts))
    offsets = (np.cumsum(counts) - counts).tolist()
    return make.normal(2, sum(counts) * PAGE, n_kv_heads, head_dim), make.numbers(pages), offsets


def _in_8_bits(cache: Tensor, dtype: torch.dtype) -> tuple[Cache8, Tensor]:
    """A cache rounded to 8 bits, and its rounded values."""
    codes, scales = rounded(cache, dtype)
    return Cache8(codes, scales.transpose(1, 2).contiguous()), widened(codes, scales, cache.dtype)


def _wide(x: Quantized) -> Tensor:
    return x.values.float() * x.scale[:, None]


def _copy(argument: Any, wide: bool) -> Any:
    """A copy for an operation that writes to its argument. With `wide`, 16 bits become fp32."""
    if isinstance(argument, tuple):
        return tuple(_copy(each, wide) for each in argument)
    if not isinstance(argument, Tensor):
        return argument
    return argument.float() if wide and argument.is_floating_point() else argument.clone()


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:200]
