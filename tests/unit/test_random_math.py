"""templates/random.h, run by the host compiler: the numbers of the interpreter, to the bit."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import coda
from coda.errors import CodaError
from coda.runtime.inputs import random_inputs
from coda.runtime.philox import uniform, uniform_at
from coda.runtime.reference import evaluate
from coda.target import lower
from tests.hostmath import compile_cpp, compile_plan, compile_plans
from tests.support import bf16, program

EXAMPLES = Path(__file__).parents[2] / "examples"
DRIVER = """
#include "random.h"
extern "C" void draw(int64_t seed, int64_t offset, int64_t const* at, float* pairs, float* singles, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    auto const two = coda::uniform(seed, offset, coda::Two<int64_t>{at[i], at[i] + 1});
    pairs[2 * i] = two.x, pairs[2 * i + 1] = two.y, singles[i] = coda::uniform(seed, offset, at[i]);
  }
}
"""
SEEDS = [(0, 0), (11, 5), (2**53 + 1, 2**40 + 3), (-1, -(2**63)), (2**63 - 1, 1)]


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return compile_cpp(DRIVER)


def draw(seed: int, offset: int, at: Tensor) -> tuple[Tensor, Tensor]:
    pairs, singles = torch.empty(len(at), 2), torch.empty(len(at))
    integers, pointers = [ctypes.c_int64] * 2, [ctypes.c_void_p] * 3
    _library().draw.argtypes = [*integers, *pointers, ctypes.c_int64]
    _library().draw(seed, offset, at.data_ptr(), pairs.data_ptr(), singles.data_ptr(), len(at))
    return pairs, singles


@pytest.mark.parametrize(("seed", "offset"), SEEDS)
def test_positions_of_any_size(seed: int, offset: int):
    at = torch.cat([torch.arange(64), torch.tensor([2**31 - 2, 2**33 + 5, 2**34 - 1, 2**40 + 7])])
    pairs, singles = draw(seed, offset, at)
    assert torch.equal(singles, uniform_at(seed, offset, at))
    assert torch.equal(pairs, torch.stack([uniform_at(seed, offset, at), uniform_at(seed, offset, at + 1)], 1))
    assert torch.equal(singles[:60], uniform(seed, offset, [5, 12]).flatten())


@pytest.mark.parametrize("width", [6, 7])
@pytest.mark.parametrize("name", ["dropout_residual", "stochastic_depth"])
def test_generated_masks_are_the_interpreters(name: str, width: int):
    """Rows of odd width begin anywhere within a block of four. Seeds beyond 2^53 stay exact."""
    p = coda.parse(EXAMPLES / f"{name}.coda").programs[name]
    inputs = {"o": bf16(9, 8), "w": bf16(width, 8), "x": bf16(9, width), "seed": 2**60 + 1, "offset": 3, "p": 0.5}
    (got,), (want,) = compile_plan(lower(p))(inputs).values(), evaluate(p, inputs).values()
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    inputs["seed"] = torch.tensor(2**60 + 1)  # in memory
    assert torch.equal(compile_plan(lower(p))(inputs)["y"], got)


def test_forward_and_backward_draw_the_same_mask():
    forward, backward = (
        coda.parse(EXAMPLES / f"{name}.coda").programs[name]
        for name in ("dropout_residual", "dropout_residual_backward")
    )
    seeds = {"seed": 7, "offset": 9, "p": 0.3}
    x = torch.zeros(16, 24).bfloat16()
    y = evaluate(forward, {"o": torch.ones(16, 8).bfloat16(), "w": torch.ones(24, 8).bfloat16(), "x": x, **seeds})["y"]
    dz, w = torch.ones(16, 8).bfloat16(), torch.ones(8, 24).bfloat16()
    masked = evaluate(backward, {"dz": dz, "w": w, **seeds})["masked"]
    assert torch.equal(y != 0, masked != 0)
    assert 0.6 < float((y != 0).float().mean()) < 0.8


def test_any_order_of_axes_and_scalars():
    p = program("program p(x: bf16[M, K], w: bf16[N, K], s: i64[]) { return x @ w.T * rand(s, 1, [N, M]): f32 }")
    inputs = {"x": torch.ones(4, 1).bfloat16(), "w": torch.ones(6, 1).bfloat16(), "s": 5}
    want = uniform(5, 1, [6, 4]).T
    assert torch.equal(evaluate(p, inputs)["out"], want)
    assert torch.equal(compile_plan(lower(p))(inputs)["out"], want)


def test_sizes_of_rows_and_columns_are_known_to_the_epilogue():
    p = program("program p(x: bf16[M, K], w: bf16[N, K]) { return x @ w.T / size(N) + size(M): f32 }")
    inputs = {"x": torch.ones(4, 8).bfloat16(), "w": torch.ones(6, 8).bfloat16()}
    assert torch.equal(compile_plan(lower(p))(inputs)["out"], evaluate(p, inputs)["out"])


def test_torchs_mask_is_refused():
    with pytest.raises(CodaError, match="'dropout' would promise torch's mask") as caught:
        program("program p(x: bf16[M, K], w: bf16[N, K]) { return dropout(x @ w.T, 0.5): bf16 }")
    assert "rand(seed, offset, [M, D])" in str(caught.value)


GROUPED = """
program rows(x: bf16[(B T), K], w: bf16[N, K], r: bf16[(B T), N], seed: i64[], offset: i64[], p: f32) {
    return y = r + where(rand(seed, offset, [B, T, N]) >= p, (x @ w.T) / (1 - p), 0): bf16
}
program columns(x: bf16[M, K], w: bf16[(H d), K], seed: i64[], offset: i64[]) {
    return y = (x @ w.T) * rand(seed, offset, [M, H, d]): f32
}
program any_order(x: bf16[(B T), K], w: bf16[(H d), K], seed: i64[], offset: i64[]) {
    return y = (x @ w.T) * rand(seed, offset, [H, T, d, B]): f32
}
program lanes(x: bf16[M, K], w: bf16[(s=2 F), K], seed: i64[], offset: i64[]) {
    z = (x @ w.T) * rand(seed, offset, [M, s, F])
    return y = z.s[0] * z.s[1]: f32, z: f32[M, (s F)]
}
program counted(x: bf16[(B T), K], w: bf16[(H d), K]) {
    z = x @ w.T
    return y = z * (index(T) - index(B)) + index(H) * index(d): f32, s = sum(z, (B T)) + index(d): f32,
        r = sum(z, (H d)) * index(T): f32
}
"""


def test_positions_in_groups_and_lanes():
    """Rows in batches, columns in heads, both halves of a gated unit: in any order of the axes."""
    programs = coda.parse(GROUPED).programs
    for p, host in zip(programs.values(), compile_plans([lower(p) for p in programs.values()]), strict=True):
        every = {"B": 3, "T": 5, "K": 8, "N": 6, "H": 2, "d": 7, "M": 9, "F": 6}
        sizes = {a.name: every[a.name] for a in p.free_axes}
        inputs = random_inputs(p, sizes, 1) | ({"seed": 2**60 + 1} if p.name != "counted" else {})
        got, want = host(inputs, sizes), evaluate(p, inputs, dims=sizes)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=2**-7 if p.name == "rows" else 1e-6, atol=1e-6)
