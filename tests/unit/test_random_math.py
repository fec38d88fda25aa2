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
from coda.runtime.philox import uniform, uniform_at
from coda.runtime.reference import evaluate
from coda.target import lower
from tests.hostmath import compile_cpp, compile_plan
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
