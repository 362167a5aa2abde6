"""Arguments of launches: each kernel's signature is read from its source, and a launch that does not fit it is refused.

A stand-in for the compiled kernel checks the arguments that each launcher and each family passes, on a CPU.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda.core import TensorMapDescriptor

from engine import BackendError, Engine, kernels
from engine.codes import Form
from engine.kernels import report
from engine.kernels.activation import activation_defines
from engine.kernels.attention import attention_defines
from engine.kernels.attention_decode import DecodeWorkspace, decode_items
from engine.kernels.cache8 import Cache8
from engine.kernels.compile import _SOURCES
from engine.kernels.embed import embed_defines
from engine.kernels.few_rows import FewRowsShape, few_rows, few_rows_shape
from engine.kernels.gemm_hopper import gemm_hopper
from engine.kernels.gemm_skinny import gemm_skinny, skinny_shape
from engine.kernels.launch import Kernel
from engine.kernels.norm import norm_defines
from engine.kernels.nvfp4 import nvfp4_rows, nvfp4_tiles, trial
from engine.kernels.packed import pack
from engine.kernels.packed_rows import PackedShape, packed_rows, unpack
from engine.kernels.packed_tiles import packed_tiles, padded, tiled_shape
from engine.kernels.quantize import quantize, quantize_defines
from engine.kernels.reorder import reorder
from engine.kernels.signature import entries, signature
from engine.kernels.tiles import LEAST_TILED, HopperShape, Tiling, hopper_shape, tile_shapes

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SOURCES = sorted(path.stem for path in _SOURCES.glob("*.cu"))
LAUNCHERS = (
    "activation",
    "attention",
    "attention_decode",
    "attention_hopper",
    "embed",
    "few_rows",
    "packed_rows",
    "packed_tiles",
    "gemm_hopper",
    "gemm_skinny",
    "norm",
    "nvfp4",
    "pool",
    "quantize",
    "reorder",
    "rope",
    "sample",
)


def test_every_entry_of_every_source_has_a_signature() -> None:
    seen = {(source, entry): 0 for source in SOURCES for entry in entries(source)}
    assert len(seen) == 25
    for variant in (*report.variants((9, 0)), *report.variants((12, 0))):
        for entry in entries(variant.source):
            seen[variant.source, entry] += len(signature(variant.source, entry, variant.defines).parameters)
    assert all(seen.values()), "each source has a variant, and no entry is without parameters"


def test_a_signature_holds_what_the_macros_make_of_the_source() -> None:
    def told(source: str, entry: str, defines: Mapping[str, int]) -> list[str]:
        return [str(each) for each in signature(source, entry, defines).parameters]

    assert told("activation", "gelu", activation_defines(96, FP16)) == [
        "x as a tensor of float16, contiguous", "bias as a tensor of float16, contiguous", "num_rows as a whole number",
    ]  # fmt: skip
    shape = tile_shapes(64, (9, 0))[0]
    q, k, v, out, *_, bias, reach, pages, scales = told(
        "attention", "attention", attention_defines(64, 1, BF16, shape, e4m3=True)
    )
    assert q == "q as a tensor of bfloat16, of contiguous rows"
    assert (k[2:], v[2:]) == (q[2:], q[2:])
    assert out == "out as a tensor of float8_e4m3fn, of contiguous rows"
    assert (bias, reach) == ("bias as a tensor of float32, contiguous", "reach as a whole number")
    assert (pages, scales) == ("pages as a tensor of int32, contiguous", "scales as a tensor of uint8, contiguous")
    in_8_bits = attention_defines(64, 1, BF16, shape, paged=True, kv8=1)
    assert told("attention", "attention", in_8_bits)[1] == "k as a tensor of float8_e4m3fn, of contiguous rows"
    values = told("quantize", "quantize", quantize_defines(64, BF16, torch.int8))[3]
    assert values == "values as a tensor of int8, contiguous"


X, WEIGHT, ROWS, EPS = torch.ones(3, 64, dtype=BF16), torch.ones(64, dtype=BF16), 3, np.float32(1e-6)
FITTING = (X, None, None, WEIGHT, None, torch.empty_like(X), ROWS, EPS)


def test_arguments_that_fit_become_addresses() -> None:
    values = signature("norm", "add_norm", norm_defines(64, BF16, False, False, 0)).values(FITTING)
    assert values == [X.data_ptr(), 0, 0, WEIGHT.data_ptr(), 0, FITTING[5].data_ptr(), 3, EPS]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("at", "argument", "message"),
    [
        (0, X.half(), "x as a tensor of bfloat16, contiguous, got a tensor of float16, shape (3, 64), strides (64, 1)"),
        (0, X[:, ::2], "x as a tensor of bfloat16, contiguous, got a tensor of bfloat16, shape (3, 32), strides (64, 2)"),
        (3, WEIGHT.float(), "weight as a tensor of bfloat16, contiguous, got a tensor of float32, shape (64,), strides (1,)"),
        (3, 1 << 40, "weight as a tensor of bfloat16, contiguous, got 1099511627776 of type int"),
        (6, X, "num_rows as a whole number, got a tensor of bfloat16, shape (3, 64), strides (64, 1)"),
        (6, 3.0, "num_rows as a whole number, got 3.0 of type float"),
        (6, None, "num_rows as a whole number, got None of type NoneType"),
        (7, 1e-6, "eps as a numpy.float32, got 1e-06 of type float"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_by_name(at: int, argument: object, message: str) -> None:
    arguments = [*FITTING[:at], argument, *FITTING[at + 1 :]]
    with pytest.raises(BackendError) as caught:
        signature("norm", "add_norm", norm_defines(64, BF16, False, False, 0)).values(arguments)
    assert str(caught.value) == f"kernel add_norm takes {message}"


@pytest.mark.parametrize("arguments", [FITTING[:-1], (*FITTING, 1), ()])
def test_too_few_and_too_many_arguments_are_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(BackendError) as caught:
        signature("norm", "add_norm", norm_defines(64, BF16, False, False, 0)).values(arguments)
    names = "x, residual, bias, weight, shift, out, num_rows, eps"
    assert str(caught.value) == f"kernel add_norm takes 8 arguments ({names}), got {len(arguments)}"


def test_a_kernel_checks_before_it_launches() -> None:
    kernel = object.__new__(Kernel)  # nothing is compiled, so the test needs no GPU
    kernel._signature = signature("norm", "add_norm", norm_defines(64, BF16, False, False, 0))
    with pytest.raises(BackendError, match="kernel add_norm takes 8 arguments"):
        kernel(1, X)


def test_strided_rows_are_taken_where_the_kernel_is_given_their_stride() -> None:
    takes = signature("quantize", "quantize", quantize_defines(64, BF16, torch.int8))
    wide = torch.ones(3, 128, dtype=BF16)
    others = (None, None, torch.empty(3, 64, dtype=torch.int8), torch.empty(3), 3, 128, EPS)
    assert takes.values((wide[:, 64:], *others))[0] == wide.data_ptr() + 128
    with pytest.raises(BackendError, match=r"takes x as a tensor of bfloat16, of contiguous rows, got .* strides \(128, 2\)"):
        takes.values((wide[:, ::2], *others))
    takes = signature("embed", "embed", embed_defines(64, False, BF16))
    with pytest.raises(BackendError, match="takes words as a tensor of bfloat16, contiguous"):
        takes.values((torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32), wide[:, 64:], None, None, X, 3, 3, 0))


class FakeKernel:
    """Checks its arguments as `Kernel` does, and computes nothing."""

    launched: set[tuple[str, str]]
    launches: list[tuple[int | tuple[int, ...], list[object]]]  # grids and values

    def __init__(self, source: str, entry: str, defines: Mapping[str, int], *_: Any) -> None:
        self.name, self.signature = (source, entry), signature(source, entry, defines)

    def __call__(self, grid: int | tuple[int, ...], *arguments: object) -> None:
        FakeKernel.launches.append((grid, self.signature.values(arguments)))
        FakeKernel.launched.add(self.name)


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Every launcher launches a fake kernel for tensors on any device. Yields the set of launched kernels."""
    modules = [
        importlib.import_module(f"engine.kernels.{name}") for name in (*LAUNCHERS, "linear", "linear_packed", "paged_attention")
    ]
    made = [
        getattr(module, name) for module in modules for name in ("_kernel", "_packed_kernel", "_made") if hasattr(module, name)
    ]
    caches = [each for each in made if hasattr(each, "cache_clear")]
    assert len(caches) == len(LAUNCHERS) + 1, "embed has two"
    stand_ins: dict[str, Any] = {
        "Kernel": FakeKernel,
        "runs_on": lambda x: x.dtype in (BF16, FP16),
        "runs_in": lambda device, dtype: dtype in (BF16, FP16),
        "num_sms": lambda device: 132,
        "shared_bytes_of": lambda device: 227 << 10,
        "tensor_map": lambda x, rows: TensorMapDescriptor.__new__(TensorMapDescriptor),
        "map_of_sums": lambda x, box: TensorMapDescriptor.__new__(TensorMapDescriptor),
        "plain_map": lambda x, box: TensorMapDescriptor.__new__(TensorMapDescriptor),
    }
    for module in modules:
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    FakeKernel.launched, FakeKernel.launches = set(), []
    for each in caches:
        each.cache_clear()
    yield FakeKernel.launched
    for each in caches:
        each.cache_clear()


def test_every_launcher_fits_its_source(fake_kernels: set[tuple[str, str]]) -> None:
    ids, qkv = torch.zeros(3, dtype=torch.int32), torch.ones(3, 8, 128, dtype=BF16)
    q, k, v = qkv.split((4, 2, 2), dim=1)  # type: ignore[no-untyped-call]
    table, weight, wide = torch.ones(9, 64, 2), torch.ones(128, dtype=BF16), torch.ones(3, 128, dtype=BF16)
    tiles, bounds = torch.tensor([[0, 3]], dtype=torch.int32), torch.tensor([[0, 3]] * 3, dtype=torch.int32)
    kernels.embed(ids, ids, wide, wide)
    kernels.embed(ids, ids, wide)
    kernels.embed(ids, ids, wide, last=ids)
    kernels.rope(qkv, table, ids, 4)
    kernels.norm_rope(qkv, weight, weight, table, ids, 1e-6, 4)
    for dtype in (BF16, FP16):
        kernels.sample(wide.to(dtype), torch.zeros(3, 8, dtype=torch.int32), ids)
    cache = torch.zeros(2, 128, 2, 128, dtype=BF16)
    kernels.rope_store(qkv, table, ids, 4, cache, ids)
    kernels.rope_store(qkv, table, ids, 4, cache, ids, (weight, weight, 1e-6))
    in_8_bits = Cache8.empty((2, 256, 2, 128), E4M3, q.device)
    kernels.rope_store(qkv, table, ids, 4, in_8_bits, ids)
    in_int8 = Cache8.empty((2, 256, 2, 128), torch.int8, q.device)
    kernels.rope_store(qkv, table, ids, 4, in_int8, ids)
    kernels.rms_norm(wide, weight, 1e-6, wide.clone())
    kernels.layer_norm(wide, weight, weight, 1e-6, weight, wide.clone())
    kernels.swiglu(wide)
    kernels.geglu(wide)
    kernels.geglu(wide, tanh=True)
    kernels.gelu(wide, weight)
    kernels.pool_mean(wide, torch.tensor([0, 3], dtype=torch.int32))
    wgmma = hopper_shape(128, (9, 0))
    assert wgmma is not None
    for dtype in (None, E4M3):
        for each in (tiles, tiles.repeat(1, 2)):
            kernels.attention(q, k, v, each, tile_shapes(128, (9, 0))[0], bounds, True, dtype=dtype)
            kernels.attention(q, k, v, each, wgmma, bounds, True, dtype=dtype)
    kernels.attention(q, k, v, tiles, tile_shapes(128, (9, 0))[0], bounds, False, bias=torch.ones(4, 9))
    cache, workspace = torch.ones(2, 128, 2, 128, dtype=BF16), DecodeWorkspace.create(3, 4, 128, q.device)
    items = torch.from_numpy(decode_items([128, 1, 7], [0, 0, 0], 2, 264))
    for dtype in (None, E4M3):
        kernels.attention_decode(q, cache, items, ids, workspace, dtype)
        kernels.attention_decode(q, in_8_bits, items, ids, workspace, dtype)
        kernels.attention_decode(q, in_int8, items, ids, workspace, dtype)
    cache, pages = torch.ones(2, 256, 2, 128, dtype=BF16), torch.zeros(2, dtype=torch.int32)
    for dtype in (None, E4M3):
        for shape in (tile_shapes(128, (9, 0))[0], wgmma):
            kernels.paged_attention(q, cache, tiles.repeat(1, 2), pages, shape, window=5, dtype=dtype)
        kernels.paged_attention(q, in_8_bits, tiles.repeat(1, 2), pages, tile_shapes(128, LEAST_TILED)[0], dtype=dtype)
    for kind in (E4M3, torch.int8):
        quantize(wide, kind, norm=weight, pending=wide.clone())
        quantize(wide, kind, gated=True)
        quantize(qkv.flatten(1)[:, :128], kind)
    x, w, scale = torch.ones(3, 1024, dtype=BF16), torch.ones(4096, 1024, dtype=BF16), torch.ones(3)
    shape = few_rows_shape(4096, 1024, 8, False, 132)
    assert shape is not None
    few_rows(x, w, shape, norm=torch.ones(1024, dtype=BF16))
    gemm_hopper(x, w, "swiglu", block_n=160)
    skinny = skinny_shape(4096, 1024, 32, 132)
    assert skinny is not None
    gemm_skinny(x, w, skinny, "residual", torch.ones(3, 4096, dtype=BF16))
    gemm_hopper(x.half(), w.half(), "residual", torch.ones(3, 4096, dtype=FP16))
    for kind in (E4M3, torch.int8):
        scales = {"row_scale": scale, "column_scale": torch.ones(4096)}
        gemm_hopper(x.to(kind), w.to(kind), "nothing", **scales)  # type: ignore[arg-type]
        gemm_hopper(x.to(kind), w.to(kind), "gelu", bias=torch.ones(4096, dtype=BF16), **scales)  # type: ignore[arg-type]
        gemm_skinny(x.to(kind), w.to(kind), replace(skinny, values=1), "nothing", **scales)  # type: ignore[arg-type]
    for product in (gemm_hopper, partial(gemm_skinny, shape=replace(skinny, values=1))):
        product(
            x.to(E4M3), w.to(E4M3), followed_by="swiglu in e4m3", row_scale=scale, column_scale=torch.ones(4096), y_scale=scale
        )
    in_blocks = skinny_shape(4096, 1024, 32, 132, 1, in_blocks=True)
    assert in_blocks is not None
    for product in (gemm_hopper, partial(gemm_skinny, shape=in_blocks)):
        product(x.to(E4M3), w.to(E4M3), followed_by="nothing", row_scale=scale, block_scale=torch.ones(8, 512))
    codes = torch.zeros(64, 1024, dtype=torch.uint8)
    four = pack(codes, Form(128, beside="zeros"), torch.ones(64, 8).half(), torch.zeros(64, 8, dtype=torch.uint8))
    packed_rows(x, four, PackedShape(2, 8, 2, 1, 3), "residual", torch.ones(3, 64, dtype=BF16), torch.ones(1024, dtype=BF16))
    packed_rows(x.half(), four, PackedShape(1, 16, 1, 1, 3), "swiglu")
    few_rows(x, four, FewRowsShape(2, 64, 3), "residual", torch.ones(3, 64, dtype=BF16), torch.ones(1024, dtype=BF16))
    kernels.linear_packed(x, replace(four, order=torch.arange(1024, dtype=torch.int32)))
    reorder(wide[:, :64], ids)
    reorder(wide, ids, weight)
    unpack(four, BF16)
    mins = pack(codes, Form(32, 5, "mins"), torch.ones(64, 32).half(), torch.ones(64, 32).half())
    packed_rows(x, mins, PackedShape(2, 8, 2, 1, 3))
    for weight, rows in ((four, 12), (mins, 64)):
        tiled = tiled_shape(len(weight), weight.k, padded(rows), weight.form, 132, 227 << 10)
        assert tiled is not None
        packed_tiles(x[:1].expand(rows, -1).contiguous(), weight, tiled)
        in_codes = skinny_shape(len(weight), weight.k, 16, 132, weight.form)
        assert in_codes is not None
        gemm_skinny(x, weight, in_codes, "residual", torch.ones(3, len(weight), dtype=BF16))
    weight, rows_of_x = trial(torch.device("cpu"))
    in_nvfp4, wide_y = nvfp4_rows(rows_of_x), torch.ones(len(rows_of_x), 2 * len(weight), dtype=BF16)
    nvfp4_tiles(in_nvfp4, weight, BF16, "residual", wide_y[:, : len(weight)])
    nvfp4_tiles(nvfp4_rows(rows_of_x.half()), weight, FP16, "swiglu")
    for dtype in (BF16, FP16):
        kernels.embed_packed(ids, mins, dtype)
        kernels.embed_packed(ids, mins, dtype, ids)
    unpack(mins, BF16)
    expected = {(source, entry) for source in SOURCES for entry in entries(source)}
    assert fake_kernels == expected - {("pool", "pool_finish")}, "pool_finish asks the tensor for its device"


def test_a_cache_of_other_heads_is_refused(fake_kernels: set[tuple[str, str]]) -> None:
    qkv, table, ids = torch.ones(3, 8, 128, dtype=BF16), torch.ones(9, 64, 2), torch.zeros(3, dtype=torch.int32)
    for shape in [(2, 128, 4, 128), (2, 128, 2, 64), (1, 128, 2, 128)]:
        with pytest.raises(BackendError, match=r"does not fit 2 key heads of 128; it needs \[2, rows, 2, 128\]"):
            kernels.rope_store(qkv, table, ids, 4, torch.ones(shape, dtype=BF16), ids)
    with pytest.raises(BackendError, match="kernel rope takes cache as a tensor of bfloat16, contiguous"):
        kernels.rope_store(qkv, table, ids, 4, torch.ones(2, 128, 4, 128, dtype=BF16)[:, :, :2], ids)
    assert not fake_kernels


def test_a_norm_of_strided_rows_is_refused(fake_kernels: set[tuple[str, str]]) -> None:
    wide, weight = torch.ones(3, 128, dtype=BF16), torch.ones(64, dtype=BF16)
    for call in (
        lambda: kernels.rms_norm(wide[:, :64], weight, 1e-6),
        lambda: kernels.rms_norm(X, weight, 1e-6, residual=wide[:, :64]),
        lambda: kernels.layer_norm(wide[:, 64:], weight, weight, 1e-6),
        lambda: kernels.rms_norm(X, weight.float(), 1e-6),
    ):
        with pytest.raises(BackendError, match=r"^kernel add_norm takes (x|residual|weight) as a tensor of bfloat16, contiguous"):
            call()
    assert not fake_kernels


def test_paged_attention_tells_its_kernel_where_things_lie(fake_kernels: set[tuple[str, str]]) -> None:
    q = torch.ones(3, 8, 128, dtype=BF16)[:, :4]
    cache, out = torch.ones(2, 256, 2, 128, dtype=BF16), torch.ones(3, 4, 128, dtype=BF16)
    tiles, pages = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    assert kernels.paged_attention(q, cache, tiles, pages, tile_shapes(128, (9, 0))[0], 7, out=out) is out
    ((grid, values),) = FakeKernel.launches
    addresses = [each.data_ptr() for each in (q, cache[0], cache[1], out, tiles)]
    assert (grid, values[:6]) == ((2, 1), [*addresses, 0])
    assert values[6:11] == [8 * 128, 2 * 128, 4 * 128, 7, 0]  # strides, then the window: tokens seen before and after
    assert values[-2:] == [pages.data_ptr(), 0]
    in_8_bits = Cache8.empty((2, 256, 2, 128), E4M3, q.device)
    kernels.paged_attention(q, in_8_bits, tiles, pages, tile_shapes(128, LEAST_TILED)[0], 7, out=out)
    _, (_, values) = FakeKernel.launches
    assert values[1:3] == [in_8_bits.values[0].data_ptr(), in_8_bits.values[1].data_ptr()]
    assert values[-2:] == [pages.data_ptr(), in_8_bits.scales.data_ptr()]
    with pytest.raises(AssertionError, match="wgmma"):
        kernels.paged_attention(q, in_8_bits, tiles, pages, HopperShape(128, 128, 2), 7, out=out)


@pytest.mark.parametrize("kind", ["pages", "tiles", "dtype", "shape"])
def test_paged_attention_refuses_what_it_would_misread(kind: str, fake_kernels: set[tuple[str, str]]) -> None:
    q, rows = torch.ones(3, 4, 128, dtype=BF16), 200 if kind == "pages" else 256
    many = torch.zeros(8, dtype=torch.int32)
    tiles = many[1:5].view(1, 4) if kind == "tiles" else many[:4].view(1, 4)
    out = torch.ones(2 if kind == "shape" else 3, 4, 128, dtype=torch.float16 if kind == "dtype" else BF16)
    with pytest.raises(AssertionError):
        kernels.paged_attention(q, torch.ones(2, rows, 2, 128, dtype=BF16), tiles, many, tile_shapes(128, (9, 0))[0], out=out)
    assert not fake_kernels


@pytest.mark.parametrize("width", [2, 4], ids=["plain", "prefixes"])
@pytest.mark.parametrize("num_tiles", [65_535, 65_536, 200_000])
def test_tiles_beyond_a_grids_limit_are_launched_in_parts(num_tiles: int, width: int, fake_kernels: set[tuple[str, str]]) -> None:
    """A pass of many short sequences has more pooled tiles than a grid's y dimension takes, which is 65,535."""
    q, k, v = torch.ones(3, 8, 128, dtype=BF16).split((4, 2, 2), dim=1)  # type: ignore[no-untyped-call]
    tiles, bounds = torch.zeros(num_tiles, width, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    kernels.attention(q, k, v, tiles, tile_shapes(128, (9, 0))[0], bounds, True)
    at = tiles.data_ptr()
    for (heads, count), values in FakeKernel.launches:  # type: ignore[misc]
        assert heads == 2
        assert count <= 65_535
        assert values[4] == at, "a launch begins where the launch before it ended"
        at += count * width * 4
    assert at == tiles.data_ptr() + tiles.nbytes


@pytest.mark.parametrize(
    ("rows", "large", "on_hopper", "sources", "launches"),
    [
        (8, False, True, "packed_rows", 1),
        (16, False, True, "packed_rows", 1),
        (17, False, True, "few_rows", 1),
        (32, False, True, "few_rows", 1),
        (33, False, True, "gemm_skinny", 1),
        (16, True, True, "packed_rows", 1),
        (17, True, True, "gemm_skinny", 1),
        (64, False, True, "gemm_skinny", 1),
        (65, False, True, "gemm_skinny", 1),
        (256, False, True, "gemm_skinny", 1),
        (257, False, True, "packed_rows", 1),
        (512, True, True, "gemm_skinny", 1),
        (513, True, True, "packed_rows", 1),
        (16, False, False, "packed_rows", 1),
        (17, False, False, "packed_tiles", 1),
        (65, False, False, "packed_rows", 1),
        (65, True, False, "packed_tiles", 1),
        (129, True, False, "packed_rows", 1),
    ],
)
def test_rows_that_multiply_a_matrix_as_it_is_in_4_bits(
    monkeypatch: pytest.MonkeyPatch,
    fake_kernels: set[tuple[str, str]],
    rows: int,
    large: bool,
    on_hopper: bool,
    sources: str,
    launches: int,
) -> None:
    """With other numbers of rows packed_rows.cu writes the matrix out first. Then cuBLAS follows."""
    for name in ("few_rows", "gemm_skinny"):
        monkeypatch.setattr(importlib.import_module(f"engine.kernels.{name}"), "is_hopper", lambda device: on_hopper)
    for name in ("few_rows", "gemm_skinny", "linear_packed"):
        monkeypatch.setattr(importlib.import_module(f"engine.kernels.{name}"), "LARGE", 1 if large else 1 << 25)
    four = pack(torch.zeros(64, 1024, dtype=torch.uint8), Form(128), torch.ones(64, 8).half())
    x, residual = torch.ones(rows, 1024, dtype=BF16), torch.ones(rows, 64, dtype=BF16)
    assert kernels.linear_packed_add(x, four, residual) is residual
    assert {name for name, _ in fake_kernels} == set(sources.split())
    assert len(FakeKernel.launches) == launches


@pytest.mark.parametrize(
    ("rows", "sources", "launches"),
    [(1, "reorder packed_rows", 2), (16, "reorder packed_rows", 2), (64, "reorder packed_tiles", 2)],
)
def test_x_gets_the_order_of_the_records(fake_kernels: set[tuple[str, str]], rows: int, sources: str, launches: int) -> None:
    """The kernel that brings x into this order also computes the norm."""
    four = pack(torch.zeros(64, 1024, dtype=torch.uint8), Form(128), torch.ones(64, 8).half())
    four = replace(four, order=torch.arange(1024, dtype=torch.int32))
    kernels.linear_packed(torch.ones(rows, 1024, dtype=BF16), four, torch.ones(1024, dtype=BF16), 1e-6)
    assert {name for name, _ in fake_kernels} == set(sources.split())
    assert len(FakeKernel.launches) == launches


# Families with unusual tensors: biases of scores, norms of parts of QKV, windows. Our attention takes their head dimensions.
FAMILIES: dict[str, dict[str, Any]] = {
    "mpnet": {"hidden_size": 128},
    "qwen3": {},
    "jina_bert_code": {"hidden_size": 128},
    "modernbert": {"hidden_size": 128},
    "gemma3": {"head_dim": 64},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_family_launches_fits(kind: str, tiny: Callable[..., Path], request: pytest.FixtureRequest) -> None:
    engine = Engine.load(tiny(kind, **FAMILIES[kind]), dtype="bfloat16", device="cpu")
    launched = request.getfixturevalue("fake_kernels")
    config, model = engine.config, engine.model
    group = config.n_heads // config.n_kv_heads
    tiling = Tiling(config.head_dim, group, config.n_kv_heads, (9, 0), 132, config.causal, model.biases_scores)
    texts = [np.arange(5, 5 + length, dtype=np.int32) for length in (9, 1, 20)]  # longer texts take another path on a CPU
    with torch.inference_mode():
        hidden = model.forward(replace(engine.packer, tiling=tiling).pack(texts))
    assert hidden.shape == (30, config.hidden_size)
    assert {("embed", "embed"), ("norm", "add_norm"), ("attention", "attention")} <= launched
