"""Random numbers on the device: the interpreter's to the bit, whatever the tile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import coda
from coda.runtime.compare import compare
from coda.runtime.inputs import poisoned_outputs, random_inputs
from coda.runtime.philox import uniform
from tests.gpu.support import warm_or_skip
from tests.gpu.test_examples import TILE_NAMES, compiled, kernels, run

SPECIAL = Path(__file__).parents[1] / "programs" / "lowering" / "special.coda"
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
    warm_or_skip(call)
    for m, n, k in SHAPES:
        inputs = random_inputs(call.program, {"M": m, "N": n, "K": k}, 0, "cuda")
        for scalar in (seed, torch.tensor(seed, device="cuda")):
            inputs |= {"seed": scalar, "offset": 2**33 + 5}
            (got,) = run(call, inputs, m).values()
            assert torch.equal(got, uniform(seed, 2**33 + 5, [m, n], "cuda")), (tile, (m, n, k))


@pytest.mark.parametrize("tile", TILE_NAMES)
@pytest.mark.parametrize("name", ["dropout", "positions", "counted"])
def test_positions_in_groups(name: str, tile: str) -> None:
    """Rows in batches and columns in heads: numbers of positions along each axis, in any order of the axes."""
    call = coda.compile(SPECIAL, program=name, tile=tile, fallback="strict")
    warm_or_skip(call)
    for b, h, k in ((1, 2, 64), (3, 3, 72), (7, 5, 200)):
        sizes = {"B": b, "T": 43, "H": h, "d": 88, "K": k}
        inputs = random_inputs(call.program, sizes, b, "cuda")
        out = poisoned_outputs(call.program, sizes, "cuda")
        leading = {b * 43: (b, 43), h * 88: (h, 88)}
        given = {o: x.view(*leading[len(x)], *x.shape[1:]) for o, x in out.items()}
        matrices = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        opened = {n: x.view(*leading[len(x)], *x.shape[1:]) for n, x in matrices.items()}
        call(**inputs | opened, out=given)
        assert call.last_route.kind == "kernel", call.last_route
        result = compare(call.program, inputs, out, dims=sizes)
        assert result.ok, f"{tile} {sizes}\n{result}"


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
