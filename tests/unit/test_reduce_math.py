"""templates/reduce.h, run by the host compiler: the log-sum-exp that is accumulated a few columns at a time."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from tests.hostmath import compile_cpp

DRIVER = """
#include "operand.h"
#include "reduce.h"
// The partials [count][rows] of a row, as the epilogue of a product reads them.
extern "C" float partials(float const* data, int count, int row, int rows) {
  coda::Operand o{};
  o.data = data, o.row = 1, o.column = rows, o.extent = count;
  return coda::load_partials<coda::Sum>(o, row, rows);
}
// Columns in two tiles of four threads each, eight values a step, combined as a kernel combines them.
extern "C" float lse(float const* x, int steps) {
  using R = coda::LogSumExp;
  R::State tiles[2] = {R::identity(), R::identity()};
  for (int tile = 0; tile < 2; ++tile)
    for (int thread = 0; thread < 4; ++thread) {
      R::State state = R::identity();
      for (int step = 0; step < steps; ++step, x += 8) state = R::add(state, reinterpret_cast<float const(&)[8]>(*x));
      tiles[tile] = R::combine(tiles[tile], state);
    }
  return R::value(R::combine(tiles[0], tiles[1]));
}
"""
STEPS = 3
COUNT = 2 * 4 * STEPS * 8
INF, NAN = math.inf, math.nan


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = compile_cpp(DRIVER)
    library.lse.restype, library.lse.argtypes = ctypes.c_float, (ctypes.c_void_p, ctypes.c_int)
    return library


def lse(x: Tensor) -> float:
    padded = torch.full((COUNT,), -INF)
    padded[: len(x)] = x
    return _library().lse(padded.data_ptr(), STEPS)


@pytest.mark.parametrize("count", [1, 2, 9, 100, COUNT])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4, 1e38])
@pytest.mark.parametrize("offset", [0.0, 20.0, -20.0, -1e4])
def test_any_number_of_columns(count: int, scale: float, offset: float):
    """Also with the tail beyond the last column, which counts as -inf, and with nothing above zero (D2, H1)."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * scale + offset
    assert lse(x) == pytest.approx(float(x.double().logsumexp(0)), rel=1e-6, abs=1e-6)


def test_ascending_and_descending_columns():
    x = torch.arange(COUNT, dtype=torch.float32)
    assert lse(x) == pytest.approx(float(x.double().logsumexp(0)), rel=1e-6)
    assert lse(x.flip(0)) == pytest.approx(float(x.double().logsumexp(0)), rel=1e-6)


@pytest.mark.parametrize("special", [[], [-INF], [-INF, -INF], [1.0, -INF], [INF], [INF, 1.0], [INF, -INF], [INF, INF],
                                     [NAN], [NAN, INF], [1.0, NAN], [3e38, 3e38], [-3e38, -3e38]])  # fmt: skip
@pytest.mark.parametrize("first", [0, 5, 40, 150])
def test_special_values_wherever_they_stand(special: list[float], first: int):
    x = torch.full((COUNT,), -INF)
    x[first : first + len(special)] = torch.tensor(special)
    want = float(x.logsumexp(0))
    got = lse(x)
    assert got == pytest.approx(want, rel=1e-6) or (math.isnan(got) and math.isnan(want))


@pytest.mark.parametrize("count", [0, 1, 3, 15, 16, 17, 32, 33, 100])
def test_partials_are_added_up_in_the_order_of_a_finish_kernel(count: int) -> None:
    """templates/finish.h: sixteen running sums, joined in a tree. To the bit, so that it does not matter who adds."""
    rows, row = 5, 3
    x = torch.randn(count, rows, generator=torch.Generator().manual_seed(count)) * 1000
    running = torch.zeros(16)
    for i in range(count):
        running[i % 16] += x[i, row]
    for half in (8, 4, 2, 1):
        running[:half] += running[half : 2 * half]
    function = _library().partials
    function.restype, function.argtypes = ctypes.c_float, (ctypes.c_void_p, *[ctypes.c_int] * 3)
    assert function(x.data_ptr(), count, row, rows) == float(running[0])
