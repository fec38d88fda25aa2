"""Random numbers on the device: the interpreter's to the bit, whatever the tile."""

from __future__ import annotations

import pytest
import torch

import coda
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs
from coda.runtime.philox import uniform
from tests.gpu.test_examples import TILE_NAMES, compiled, kernels, run

SHAPES = ((1, 8, 8), (7, 9, 64), (129, 264, 72), (300, 1001, 200), (257, 520, 1032))  # M, D, K
DRAW = """
program draw(x: bf16[M, K], w: bf16[N, K], seed: i64[], offset: i64[]) {
    return x @ w.T * 0 + rand(seed, offset, [M, N]): f32
}
"""


@pytest.mark.parametrize("tile", TILE_NAMES)
@pytest.mark.parametrize("seed", [0, 2**60 + 1, -1])
def test_numbers_are_the_interpreters(tile: str, seed: int) -> None:
    call = coda.compile(DRAW, tile=tile, fallback="strict")
    for m, n, k in SHAPES:
        inputs = random_inputs(call.program, {"M": m, "N": n, "K": k}, 0, "cuda")
        for scalar in (seed, torch.tensor(seed, device="cuda")):
            inputs |= {"seed": scalar, "offset": 2**33 + 5}
            (got,) = run(call, inputs, m).values()
            assert torch.equal(got, uniform(seed, 2**33 + 5, [m, n], "cuda")), (tile, (m, n, k))


@pytest.mark.parametrize(
    ("name", "tile"), kernels(["dropout_residual", "dropout_residual_backward", "stochastic_depth"])
)
def test_examples(name: str, tile: str) -> None:
    call = compiled(name, tile)
    for seed, (m, n, k) in enumerate(SHAPES):
        sizes = {"M": m, "D": n // 8 * 8, "A": k, "F": k}  # TMA reads rows of whole 16 bytes
        inputs = random_inputs(call.program, sizes, seed, "cuda")
        result = compare(call.program, inputs, run(call, inputs, m))
        assert result.ok, f"{name} {tile} {(m, n, k)}\n{result}"
