"""Report on each kernel on each chip: registers, shared memory, spills. Needs no GPU."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import torch

from engine.codes import Form
from engine.devices import LEAST_CAPABILITY, is_8_bits
from engine.errors import ModelError
from engine.kernels.activation import activation_defines
from engine.kernels.attention import attention_defines
from engine.kernels.attention_decode import DECODE_SHAPES, DECODE_SHAPES_8, attention_decode_defines
from engine.kernels.attention_hopper import FEATURES, attention_hopper_defines
from engine.kernels.compile import MAX_SHARED_BYTES, compile_report, known_archs
from engine.kernels.embed import embed_defines, embed_packed_defines
from engine.kernels.few_rows import box_of, few_rows_defines, few_rows_shape
from engine.kernels.gemm_hopper import (
    BLOCKS_N,
    FOLLOWED_BY,
    SCALED_BLOCKS_N,
    WIDEST,
    FollowedBy,
    gemm_hopper_defines,
    gemm_hopper_shared_bytes,
)
from engine.kernels.gemm_skinny import skinny_defines, skinny_shape
from engine.kernels.launch import half
from engine.kernels.norm import norm_defines
from engine.kernels.nvfp4 import FEATURES as FEATURES_OF_NVFP4
from engine.kernels.nvfp4 import nvfp4_defines, nvfp4_shared_bytes
from engine.kernels.packed import LARGE
from engine.kernels.packed_rows import packed_defines, packed_shape
from engine.kernels.packed_tiles import tiled_defines, tiled_shape
from engine.kernels.pool import pool_defines
from engine.kernels.quantize import quantize_defines
from engine.kernels.reorder import reorder_defines, reorder_shared_bytes
from engine.kernels.rope import rope_defines
from engine.kernels.sample import UNROLL, sample_defines
from engine.kernels.tiles import HEAD_DIMS, LEAST_TILED, HopperShape, TileShape, hopper_shape, tile_shapes

DEFAULT_ARCHS = "80,86,89,90,100,120,121"
# Query heads of a key head in published models, by head_dim.
_GROUPS = {32: (1,), 64: (1, 7), 96: (1,), 128: (1, 2, 4, 5, 6, 7, 8), 256: (1, 3)}


# Products of Qwen3 0.6B, 4B and 8B: W's shape, the operation that follows, and whether a norm comes before.
_PRODUCTS: dict[tuple[int, int], tuple[FollowedBy, bool]] = {
    (4096, 1024): ("nothing", True),
    (1024, 2048): ("residual", False),
    (6144, 1024): ("swiglu", True),
    (1024, 3072): ("residual", False),
    (6144, 2560): ("nothing", True),
    (2560, 4096): ("residual", False),
    (19456, 2560): ("swiglu", True),
    (2560, 9728): ("residual", False),
    (6144, 4096): ("nothing", True),
    (4096, 4096): ("residual", False),
    (24576, 4096): ("swiglu", True),
    (4096, 12288): ("residual", False),
}
_H200_SMS = 132
_FORMS = (
    Form(128), Form(64, beside="zeros"), Form(32, beside="zeros"), Form(32, beside="mins"), Form(16, is_float=True),
    Form(32, 5, "mins"), Form(16, 6), Form(32, 8), Form(128, 8, is_float=True),
)  # fmt: skip
_FORMS_OF_16_ROWS = Form(128), Form(32, beside="mins"), Form(16, is_float=True), Form(128, 8, is_float=True)
_MOST_SHARED_BYTES_OF_A100 = 163 << 10  # no later data centre chip has less


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a source."""

    source: str
    label: str
    defines: Mapping[str, int]
    dynamic_shared_bytes: int = 0
    features: str = ""  # behind the arch's number


@dataclass(frozen=True, slots=True)
class Row:
    """One entry point of a variant on one chip. If the variant does not compile, `error` says why and the other fields are 0."""

    arch: str
    kernel: str
    label: str
    registers: int = 0
    shared_bytes: int = 0  # static and dynamic
    spill_bytes: int = 0
    error: str = ""


def parse_archs(text: str) -> list[tuple[int, int]]:
    """ "80,sm_120" -> [(8, 0), (12, 0)], each once. Raises: ModelError for an arch that this NVRTC does not know."""
    known = known_archs()
    chosen = []
    for value in text.split(","):
        number = value.strip().removeprefix("sm_")
        if number not in known:
            raise ModelError(f"arch {value.strip()!r} is unknown to this NVRTC; it knows {', '.join(known)}")
        chosen.append((int(number[:-1]), int(number[-1])))
    return list(dict.fromkeys(chosen))


def variants(capability: tuple[int, int]) -> Iterator[Variant]:
    """Yields the specialisations to watch, as the launchers compile them for this chip.

    A chip before sm_80 has no bf16, no cp.async and no mma of m16n8k16. It gets fp16 only, and no attention.
    """
    modern = capability >= (8, 0)
    dtype = torch.bfloat16 if modern else torch.float16
    if modern:
        for head_dim in HEAD_DIMS:
            yield from _attentions(head_dim, capability)
        yield from _attentions_decode(capability)
        yield from _packed(capability)
    if capability[0] == 12:
        yield from _products_in_nvfp4()
    for width in (384, 768, 1024, 2560, 4096, 5120):
        for residual in (0, 2):
            label = f"C {width}, RMS{', residual' * (residual > 0)}"
            yield Variant("norm", label, norm_defines(width, dtype, layer=False, bias=False, residual=residual))
        for bias, residual in ((False, 0), (True, 0), (False, 1), (True, 1)):
            label = f"C {width}, Layer{', bias' * bias}{', residual' * residual}"
            yield Variant("norm", label, norm_defines(width, dtype, layer=True, bias=bias, residual=residual))
    for kind in (each for each, least in LEAST_CAPABILITY.items() if is_8_bits(each) and capability >= least):
        for width in (384, 1024, 4096):
            yield _quantize(width, dtype, kind, norm=True)
            yield _quantize(width, dtype, kind, norm=True, pending=True)
        for width in (3072, 9728, 12288):
            yield _quantize(width, dtype, kind, gated=True)
    for heads in (16, 32, 40):
        for norm in (True, False):
            label = f"head_dim 128, {heads}/8 heads{', norm' * norm}"
            yield Variant("rope", label, rope_defines(128, heads, 8, norm, dtype))
            yield Variant("rope", f"{label}, store", rope_defines(128, heads, 8, norm, dtype, store=True))
            for kv8 in (1, 2):
                defines = rope_defines(128, heads, 8, norm, dtype, store=True, kv8=kv8)
                yield Variant("rope", f"{label}, store{_kv8(kv8)}", defines)
    for width in (1536, 3072, 9728, 12288):
        yield Variant("activation", f"I {width}", activation_defines(width, dtype))
    if capability == (9, 0):
        yield from _products_on_hopper()
    for norm in (False, True):
        defines, shared = reorder_defines(4096, norm, dtype), reorder_shared_bytes(4096, norm)
        yield Variant("reorder", f"C 4096{', norm' * norm}", defines, shared)
    yield Variant("activation", "I 3072, interleaved", activation_defines(3072, dtype, interleaved=True))
    yield Variant("embed", "C 384, positions", embed_defines(384, True, dtype))
    yield Variant("embed", "C 1024", embed_defines(1024, False, dtype))
    yield Variant("embed", "C 1024, last tokens", embed_defines(1024, False, dtype, last=True))
    for form in (Form(32, beside="mins"), Form(16, 6), Form(32, 8)):
        yield Variant("embed_packed", f"{form}, last tokens", embed_packed_defines(form, dtype, last=True))
    for logits in (torch.float32, dtype):
        for vector in (True, False):
            label = f"{'fp32' if logits == torch.float32 else '16-bit'} logits{', any V' * (not vector)}"
            yield Variant("sample", label, sample_defines(logits, vector, UNROLL) | {"HALF": half(dtype)})
    for width in (384, 1024, 4096):
        for from_rows in (True, False):
            label = f"C {width}, from {'rows' if from_rows else 'sums'}"
            yield Variant("pool", label, pool_defines(width, from_rows, dtype))


def report(capabilities: Sequence[tuple[int, int]]) -> list[Row]:
    """Compile every variant for every capability, on all cores: NVRTC releases the GIL."""
    jobs = [
        (variant, f"sm_{major}{minor}{variant.features}") for major, minor in capabilities for variant in variants((major, minor))
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [row for rows in pool.map(compile_rows, *zip(*jobs, strict=True)) for row in rows]


def compile_rows(variant: Variant, arch: str) -> list[Row]:
    """Returns a row for each entry point of the variant's source."""
    label = f"{variant.label}, {'fp16' if variant.defines['HALF'] else 'bf16'}"
    try:
        found = compile_report(variant.source, variant.defines, arch)
    except ModelError:  # NVRTC is not installed: every variant would fail
        raise
    except Exception as error:  # cuda.core's NVRTCError is private
        return [Row(arch, variant.source, label, error=" ".join(str(error).split()))]
    return [
        Row(arch, entry, label, used.registers, used.shared_bytes + variant.dynamic_shared_bytes, used.spill_bytes)
        for entry, used in found.items()
    ]


def problem(row: Row) -> str:
    """Returns what is wrong with this row, or ""."""
    if row.error:
        return f"does not compile: {row.error}"
    if row.spill_bytes:
        return f"spills {row.spill_bytes} bytes"
    if row.shared_bytes > MAX_SHARED_BYTES and (row.arch in ("sm_86", "sm_89") or row.arch.startswith("sm_12")):
        return f"takes {row.shared_bytes / 1024:.1f} KB of shared memory, {MAX_SHARED_BYTES // 1024} is the limit"
    return ""


def problems(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each row with a problem."""
    return [f"{row.kernel} ({row.label}) on {row.arch} {what}" for row in rows if (what := problem(row))]


def _attentions(head_dim: int, capability: tuple[int, int]) -> Iterator[Variant]:
    dtype, groups = torch.bfloat16, _GROUPS[head_dim]
    most = groups[-1]  # query heads of a key head
    large, small = tile_shapes(head_dim, capability)
    yield from (_attention(head_dim, group, dtype, large) for group in groups)
    if small != large:
        yield _attention(head_dim, most, dtype, small)
    yield _attention(head_dim, 1, torch.float16, large)
    yield _attention(head_dim, 1, dtype, large, bias=True)
    if capability >= LEAST_CAPABILITY[torch.float8_e4m3fn]:
        yield _attention(head_dim, 1, dtype, large, e4m3=True)
        # The variants that take the most registers.
        if head_dim == 64:
            yield _attention(head_dim, 1, dtype, large, bias=True, e4m3=True)
        if head_dim >= 128:
            yield _attention(head_dim, most, dtype, large, prefix=True, e4m3=True)
    yield from (_attention(head_dim, group, dtype, large, prefix=True) for group in groups)
    if small != large:
        yield _attention(head_dim, most, dtype, small, prefix=True)
    for group in dict.fromkeys((groups[0], most)):
        yield _attention(head_dim, group, dtype, large, paged=True)
    if small != large:
        yield _attention(head_dim, most, dtype, small, paged=True)
    if capability >= LEAST_CAPABILITY[torch.float8_e4m3fn]:
        yield _attention(head_dim, most, dtype, large, paged=True, e4m3=True)
    for shape in dict.fromkeys(tile_shapes(head_dim, LEAST_TILED)):
        for kv8 in (1, 2):
            yield _attention(head_dim, most, dtype, shape, paged=True, kv8=kv8)
            yield _attention(head_dim, 1, torch.float16, shape, paged=True, kv8=kv8)
    if (hopper := hopper_shape(head_dim, capability)) is not None:
        for flags in ({}, {"prefix": True}, {"paged": True}):
            yield from (_attention_hopper(head_dim, group, dtype, hopper, **flags) for group in groups)
            yield _attention_hopper(head_dim, 1, torch.float16, hopper, **flags)
            yield _attention_hopper(head_dim, most, dtype, hopper, **flags, e4m3=True)


def _attention(head_dim: int, group: int, dtype: torch.dtype, shape: TileShape, kv8: int = 0, **flags: bool) -> Variant:
    """`flags`: those of `attention_defines`."""
    label = f"head_dim {head_dim}, {group} query head{'s' * (group > 1)} a key head, {shape.block_m} rows"
    label += "".join(f", {name}" for name, is_set in flags.items() if is_set) + _kv8(kv8)
    defines = attention_defines(head_dim, group, dtype, shape, kv8=kv8, **flags)
    return Variant("attention", label, defines, shape.shared_bytes(head_dim))


def _kv8(kv8: int) -> str:
    return ("", ", KV in e4m3", ", KV in int8")[kv8]


def _attention_hopper(head_dim: int, group: int, dtype: torch.dtype, shape: HopperShape, **flags: bool) -> Variant:
    """`flags`: those of `attention_hopper_defines`."""
    label = f"head_dim {head_dim}, {group} query head{'s' * (group > 1)} a key head"
    label += "".join(f", {name}" for name, is_set in flags.items() if is_set)
    defines = attention_hopper_defines(head_dim, group, dtype, shape, **flags)
    return Variant("attention_hopper", label, defines, shape.shared_bytes(head_dim), FEATURES)


def _attentions_decode(capability: tuple[int, int]) -> Iterator[Variant]:
    """16 query heads take the most registers: two tiles of eight. Fewer take one tile."""
    for head_dim in DECODE_SHAPES:
        yield _attention_decode(head_dim, 16, torch.bfloat16)
    for head_dim, group in ((64, 7), (128, 2), (128, 8), (256, 3)):
        yield _attention_decode(head_dim, group, torch.bfloat16)
    yield _attention_decode(256, 8, torch.float16)
    if capability >= LEAST_CAPABILITY[torch.float8_e4m3fn]:
        yield _attention_decode(256, 8, torch.bfloat16, e4m3=True)
    if capability == (9, 0):
        for head_dim, group in ((128, 2), (128, 16), (64, 7)):
            yield _attention_decode(head_dim, group, torch.bfloat16, cluster=8)
        yield _attention_decode(128, 4, torch.bfloat16, kv8=1, cluster=8)
    for kv8 in (1, 2):
        for head_dim in DECODE_SHAPES_8:
            yield _attention_decode(head_dim, 16, torch.bfloat16, kv8=kv8)
        for dtype in (torch.bfloat16, torch.float16):
            yield _attention_decode(128, 4, dtype, kv8=kv8)


def _attention_decode(
    head_dim: int, group: int, dtype: torch.dtype, e4m3: bool = False, kv8: int = 0, cluster: int = 1
) -> Variant:
    of_cluster = f", clusters of {cluster}" if cluster > 1 else ""
    label = f"head_dim {head_dim}, {group} query heads a key head{', e4m3' * e4m3}{_kv8(kv8)}{of_cluster}"
    shape = (DECODE_SHAPES_8 if kv8 else DECODE_SHAPES)[head_dim]
    defines = attention_decode_defines(head_dim, group, dtype, shape, e4m3, kv8, cluster)
    return Variant("attention_decode", label, defines, shape.shared_bytes(head_dim, group, cluster))


def _products_on_hopper() -> Iterator[Variant]:
    for followed_by in FOLLOWED_BY:
        if followed_by.startswith("gelu"):
            yield _gemm_hopper(2 if followed_by == "gelu in e4m3" else 3, followed_by, WIDEST, bias=True)
            continue
        if followed_by == "swiglu in e4m3":
            yield _gemm_hopper(2, followed_by, WIDEST)
            continue
        yield from (_gemm_hopper(0, followed_by, block_n) for block_n in BLOCKS_N)
        yield from (_gemm_hopper(2, followed_by, block_n, in_blocks=True) for block_n in SCALED_BLOCKS_N)
        yield _gemm_hopper(3, followed_by, WIDEST)
    yield _gemm_hopper(1, "swiglu", WIDEST)
    yield _gemm_hopper(2, "residual", WIDEST)
    for (n, k), (followed_by, norm) in _PRODUCTS.items():
        yield _few_rows(n, k, 16, norm, followed_by)
        yield from (_gemm_skinny(n, k, rows, followed_by, 0) for rows in (32, 64, 96))
        of_e4m3: FollowedBy = "swiglu in e4m3" if followed_by == "swiglu" else followed_by
        yield from (_gemm_skinny(n, k, rows, of_e4m3, 2) for rows in (8, 64, 256))
        yield from (_gemm_skinny(n, k, rows, followed_by, 2, in_blocks=True) for rows in (8, 64, 256))
        yield from (_gemm_skinny(n, k, rows, followed_by, 3) for rows in (16, 64, 512))
        for form, rows in product((Form(128), Form(64, beside="zeros")), (24, 32) if n * k < LARGE else ()):
            yield _few_rows(n, k, rows, norm, followed_by, form)
        yield from (_gemm_skinny(n, k, rows, followed_by, 4, form) for form in _FORMS for rows in (64, 128))


def _gemm_hopper(operands: int, followed_by: FollowedBy, block_n: int, in_blocks: bool = False, bias: bool = False) -> Variant:
    label = f"followed by {followed_by}, tiles of {block_n} columns{', scales of blocks' * in_blocks}{', bias' * bias}"
    kind = operands, followed_by, block_n, in_blocks
    return Variant("gemm_hopper", label, gemm_hopper_defines(*kind, bias), gemm_hopper_shared_bytes(*kind), FEATURES)


def _quantize(
    width: int, dtype: torch.dtype, kind: torch.dtype, norm: bool = False, gated: bool = False, pending: bool = False
) -> Variant:
    label = f"C {width} in {str(kind).removeprefix('torch.')}{', sum' * pending}{', norm' * norm}{', SwiGLU' * gated}"
    return Variant("quantize", label, quantize_defines(width, dtype, kind, norm, gated, pending))


def _packed(capability: tuple[int, int]) -> Iterator[Variant]:
    """The cuts for the 8B's largest matrix and a small one. Many rows, and many groups with zeros, take the most registers."""
    most = MAX_SHARED_BYTES if capability in ((8, 6), (8, 9)) or capability[0] == 12 else _MOST_SHARED_BYTES_OF_A100

    def tiled(n: int, k: int, rows: int, form: Form) -> Iterator[Variant]:
        shape = tiled_shape(n, k, rows, form, _H200_SMS, most)
        if shape is not None:
            defines = tiled_defines(rows, form, shape, _PRODUCTS[n, k][0], torch.bfloat16)
            label, shared = f"W {n} x {k}, {rows} rows, {form}", shape.shared_bytes(rows, form)
            yield Variant("packed_tiles", label, defines, shared)

    n, k = 24576, 4096
    followed_by, norm = _PRODUCTS[n, k]
    for form in _FORMS:
        for rows in (8, 16) if form in _FORMS_OF_16_ROWS else (8,):
            shape = packed_shape(n, k, rows, form, _H200_SMS, most)
            assert shape is not None, "it is a model's matrix"
            defines = packed_defines(form, shape, rows, norm, followed_by, torch.bfloat16)
            yield Variant("packed_rows", f"W {n} x {k}, {rows} rows, {form}", defines, shape.shared_bytes(k, rows, form))
        for rows in (64, 128):
            yield from tiled(n, k, rows, form)
    for rows in (16, 64):
        yield from tiled(4096, 4096, rows, Form(128))


def _products_in_nvfp4() -> Iterator[Variant]:
    """Each operation that follows, and both widths of a step."""
    followed_by: FollowedBy
    for per_step, followed_by in ((2, "nothing"), (2, "residual"), (2, "swiglu"), (1, "residual")):
        label, shared = f"{64 * per_step} columns a step, followed by {followed_by}", nvfp4_shared_bytes(per_step)
        for dtype in (torch.bfloat16, torch.float16):
            yield Variant("nvfp4", label, nvfp4_defines(per_step, followed_by, dtype), shared, FEATURES_OF_NVFP4)


def _gemm_skinny(
    n: int, k: int, rows: int, followed_by: FollowedBy, operands: int, form: Form | None = None, in_blocks: bool = False
) -> Variant:
    shape = skinny_shape(n, k, rows, _H200_SMS, form or (1 if operands >= 2 else 2), in_blocks)
    assert shape is not None, "they are models' shapes"
    kind = f"{form or f'operands {operands}'}{', scales of blocks' * in_blocks}"
    label = f"W {n} x {k}, {rows} rows, followed by {followed_by}, {kind}"
    return Variant("gemm_skinny", label, skinny_defines(operands, k, shape, followed_by), shape.shared_bytes(), FEATURES)


def _few_rows(n: int, k: int, rows: int, norm: bool, followed_by: FollowedBy, form: Form | None = None) -> Variant:
    shape = few_rows_shape(n, k, rows, norm, _H200_SMS, box_of(form))
    assert shape is not None, "they are models' shapes"
    label = f"W {n} x {k}, {rows} rows, followed by {followed_by}, {form or 'bf16'}"
    defines = few_rows_defines(k, rows, shape, norm, followed_by, form)
    return Variant("few_rows", label, defines, shape.shared_bytes(k, rows, norm, box_of(form)))
