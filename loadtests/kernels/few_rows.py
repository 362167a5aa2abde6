"""Measures x W^T for a few rows at the models' shapes, beside cuBLAS and the time to read W.

The products are measured alone and as a chain of layers.

python -m loadtests.kernels.few_rows
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.kernels.activation import swiglu
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.linear import linear, linear_add, linear_swiglu
from engine.kernels.norm import rms_norm
from engine.measure.timing import copy_bandwidth, seconds_of
from loadtests.kernels.gemm import LAYERS
from loadtests.report import write

ROWS = (1, 16, 32, 64, 96, 128)
EPS = 1e-6
NUM_LAYERS = {"0.6B": 28, "4B": 36, "8B": 36, "14B": 40}
W = TypeVar("W")
Product = Callable[[Any, W, FollowedBy, Tensor, Tensor], Any]
ROTATE_BYTES = 400 << 20  # bytes of the weights that take turns, so that none is in the L2 cache


def product(x: Tensor, w: Tensor, follows: FollowedBy, y: Tensor, norm: Tensor) -> Tensor:
    """A product as in a layer: either x is normalised first, or the product is added to `y`."""
    if follows == "residual":
        return linear_add(x, w, y)
    return (linear_swiglu if follows == "swiglu" else linear)(x, w, norm, EPS)


def usual(x: Tensor, w: Tensor, follows: FollowedBy, y: Tensor, norm: Tensor) -> Tensor:
    """The same with cuBLAS, and with a kernel each for the norm and for SwiGLU."""
    if follows == "residual":
        return y.addmm_(x, w.t())
    product = torch.mm(rms_norm(x, norm, EPS), w.t())
    return swiglu(product, interleaved=True) if follows == "swiglu" else product


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def matrix(n: int, k: int) -> Tensor:
    return random(n, k) / k**0.5


def products(bandwidth: float) -> Iterator[dict[str, Any]]:
    for model, layer in LAYERS.items():
        for m in ROWS:
            for name, n, k, follows in layer:
                x, norm, y = random(m, k), random(k), random(m, n)
                weights = [random(n, k) for _ in range(-(-ROTATE_BYTES // (2 * n * k)))]
                count = len(weights)
                ours = seconds_of(lambda i: product(x, weights[i % count], follows, y, norm))  # noqa: B023
                theirs = seconds_of(lambda i: usual(x, weights[i % count], follows, y, norm))  # noqa: B023
                alone = seconds_of(lambda i: torch.mm(x, weights[i % count].t()))  # noqa: B023
                floor = 2 * n * k / bandwidth
                yield {
                    "model": model,
                    "rows": m,
                    "product": name,
                    "cuBLAS, the product alone us": 1e6 * alone,
                    "cuBLAS, with what lies around it us": 1e6 * theirs,
                    "ours, with what lies around it us": 1e6 * ours,
                    "floor us": 1e6 * floor,
                    "floor / ours": floor / ours,
                }


def chains(
    bandwidth: float,
    rows: Sequence[int],
    matrix: Callable[[int, int], W],
    nbytes: Callable[[W], int],
    product: Product[W],
    models: Sequence[str] = tuple(LAYERS),
) -> Iterator[dict[str, Any]]:
    """Measures all products of a forward pass. Each product waits for the one before it.

    Args:
        matrix: makes W [n, k].
        product: a function like `product` in this file.
    """
    for model in models:
        layer = LAYERS[model]
        weights = [[matrix(n, k) for _, n, k, _ in layer] for _ in range(NUM_LAYERS[model])]
        width, mixed = layer[0][2], layer[1][2]
        floor = sum(nbytes(w) for its in weights for w in its) / bandwidth
        for m in rows:
            hidden, norm = random(m, width), torch.ones(width, device="cuda", dtype=torch.bfloat16)

            def run() -> None:
                for qkv, out, gate_up, down in weights:  # noqa: B023
                    x = product(hidden, qkv, "nothing", hidden, norm)  # noqa: B023
                    product(x[:, :mixed], out, "residual", hidden, norm)  # noqa: B023
                    x = product(hidden, gate_up, "swiglu", hidden, norm)  # noqa: B023
                    product(x, down, "residual", hidden, norm)  # noqa: B023

            run()  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # a kernel takes microseconds, and the host would be slower than the GPU
                run()
            seconds = seconds_of(lambda _: graph.replay(), captured=False)  # noqa: B023
            yield {"model": model, "rows": m, "ours ms": 1e3 * seconds, "floor ms": 1e3 * floor, "floor / ours": floor / seconds}


@torch.inference_mode()
def main() -> None:
    bandwidth = copy_bandwidth()
    tables = {
        "x W^T": list(products(bandwidth)),
        "Four products a layer, all layers": list(chains(bandwidth, ROWS, matrix, lambda w: w.nbytes, product)),
    }
    notes = [
        "bf16; qkv and gate_up normalise x first, out and down add to what is there, gate_up ends in SwiGLU",
        f"floor: W's bytes at the {bandwidth / 1e9:,.0f} GB/s of a large copy, read and written",
        "20 calls to a CUDA graph, over weights that take turns; a chain is one call, and a graph of its own",
    ]
    write("kernels_few_rows", "python -m loadtests.kernels.few_rows", tables, notes)


if __name__ == "__main__":
    main()
