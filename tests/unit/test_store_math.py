"""templates/store.h, run by 32 threads of the host: where each element of a step goes, and what rows are reduced to."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from tests.hostmath import compile_cpp

ROWS, WIDTH = 16, 40  # of the output: less than the steps cover, which begin at column 16
FIRST = 16
DRIVER = """
#include <cutlass/cutlass.h>
#include "store.h"

struct Place { void* data; int64_t row, column, lane; int vector, rows, columns; };
static coda::Output output(Place const& p) {
  coda::Output o{};
  o.data = p.data, o.row = p.row, o.column = p.column, o.lane = p.lane, o.vector = p.vector;
  return o;
}
static coda::StepPosition position(Place const& p, int lane) {
  coda::StepPosition at{};
  at.row = lane >> 2, at.column = 16, at.rows = p.rows, at.columns = p.columns, at.q = lane & 3;
  return coda::at_rows(output(p), at);
}
// Values [16][width] as a thread holds them: the pair at row half rr of group j.
template <int kColumns, class T, class Value, class Pair>
static void fill(T const* values, int lane, Value (&pairs)[kColumns / 4], Pair const& pair) {
  for (int i = 0; i < kColumns / 4; ++i) {
    T const* p = values + (8 * (i & 1) + (lane >> 2)) * kColumns + 8 * (i >> 1) + 2 * (lane & 3);
    pairs[i] = pair(p[0], p[1]);
  }
}
static uint32_t word8(uint8_t a, uint8_t b) { return uint32_t(a) | uint32_t(b) << 8; }
static uint32_t word16(uint16_t a, uint16_t b) { return uint32_t(a) | uint32_t(b) << 16; }
static coda::Two<float> two(float a, float b) { return {a, b}; }

#define STORE(bits, T, Value, pair)                                                                    \\
  template <int kColumns> static void store##bits##_all(Place const& p, T const* values) {            \\
    run_warp([&](int lane) {                                                                           \\
      Value pairs[kColumns / 4];                                                                       \\
      fill<kColumns>(values, lane, pairs, pair);                                                       \\
      coda::store##bits<kColumns>(output(p), 1, pairs, position(p, lane));                             \\
    });                                                                                                \\
  }                                                                                                    \\
  extern "C" void store##bits##_32(Place const* p, T const* v) { store##bits##_all<32>(*p, v); }       \\
  extern "C" void store##bits##_16(Place const* p, T const* v) { store##bits##_all<16>(*p, v); }
STORE(8, uint8_t, uint32_t, word8)
STORE(16, uint16_t, uint32_t, word16)
STORE(32, float, coda::Two<float>, two)

// What a thread of a strip has of its two rows: kColumns / 4 columns that are neighbours.
#define RUN(bits, T, Value, pair)                                                                      \\
  template <int kColumns> static void run##bits##_all(Place const& p, T const* values) {              \\
    run_warp([&](int lane) {                                                                           \\
      coda::StepPosition const at = position(p, lane);                                                 \\
      for (int rr = 0; rr < 2; ++rr) {                                                                 \\
        int const row = at.row + 8 * rr, own = kColumns / 4 * at.q;                                    \\
        Value pairs[kColumns / 8];                                                                     \\
        for (int j = 0; j < kColumns / 8; ++j) {                                                       \\
          T const* v = values + row * kColumns + own + 2 * j;                                          \\
          pairs[j] = pair(v[0], v[1]);                                                                 \\
        }                                                                                              \\
        if (row < p.rows) coda::store_run<T>(output(p), 1, pairs, at.offset[rr], at.column + own);     \\
      }                                                                                                \\
    });                                                                                                \\
  }                                                                                                    \\
  extern "C" void run##bits##_32(Place const* p, T const* v) { run##bits##_all<32>(*p, v); }           \\
  extern "C" void run##bits##_16(Place const* p, T const* v) { run##bits##_all<16>(*p, v); }
RUN(8, uint8_t, uint32_t, word8)
RUN(16, uint16_t, uint32_t, word16)
RUN(32, float, coda::Two<float>, two)

#define INTERLEAVED(bits, T, pair)                                                                     \\
  extern "C" void interleaved##bits(Place const* p, T const* values) {                                \\
    run_warp([&](int lane) {                                                                           \\
      uint32_t first[8], second[8];                                                                    \\
      fill<32>(values, lane, first, pair), fill<32>(values + 16 * 32, lane, second, pair);             \\
      coda::store##bits##_interleaved<32>(output(*p), first, second, position(*p, lane));              \\
    });                                                                                                \\
  }
INTERLEAVED(8, uint8_t, word8)
INTERLEAVED(16, uint16_t, word16)

// The row statistics of one step that is the first of tile 0 (its columns begin at 16, as those of all steps here).
extern "C" void lse(Place const* p, float const* values, coda::LogSumExp::State* states) {
  run_warp([&](int lane) {
    coda::Two<float> pairs[8];
    fill<32>(values, lane, pairs, two);
    coda::StepPosition const at = position(*p, lane);
    coda::LogSumExp::State totals[2] = {coda::LogSumExp::identity(), coda::LogSumExp::identity()};
    coda::accumulate_step<32>(totals, pairs, at);
    coda::Output o{};
    o.data = states, o.row = 1, o.column = p->rows;
    for (int rr = 0; rr < 2; ++rr)
      coda::store_row_partial<coda::LogSumExp>(o, totals[rr], at.row + 8 * rr, p->rows, 0, 1, at.q);
  });
}
template <class R> static void columns_all(Place const& p, float const* values, float* partials) {
  run_warp([&](int lane) {
    coda::Two<float> pairs[8];
    fill<32>(values, lane, pairs, two);
    coda::Output o{};
    o.data = partials, o.row = p.columns, o.column = 1;
    coda::store_column_partials<R, 32>(o, pairs, position(p, lane), 0, lane);
  });
}
extern "C" void columns_sum(Place const* p, float const* v, float* o) { columns_all<coda::Sum>(*p, v, o); }
extern "C" void columns_max(Place const* p, float const* v, float* o) { columns_all<coda::Max>(*p, v, o); }
extern "C" void columns_min(Place const* p, float const* v, float* o) { columns_all<coda::Min>(*p, v, o); }
extern "C" void columns_logsumexp(Place const* p, float const* v, float* o) { columns_all<coda::LogSumExp>(*p, v, o); }
extern "C" void pick(Place const* p, float const* values, int64_t const* labels, int column, float* picked) {
  run_warp([&](int lane) {
    coda::Two<float> pairs[8];
    fill<32>(values, lane, pairs, two);
    coda::StepPosition at = position(*p, lane);
    at.column = column;
    int64_t const index[2] = {labels[at.row], labels[at.row + 8]};
    coda::Output o{};
    o.data = picked, o.row = 1;
    coda::store_pick<32>(o, pairs, index, at);
  });
}
"""


class Place(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("column", ctypes.c_int64), ("lane", ctypes.c_int64),
        ("vector", ctypes.c_int), ("rows", ctypes.c_int), ("columns", ctypes.c_int),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return compile_cpp(DRIVER)


def call(name: str, place: Place, *args: Tensor | int) -> None:
    function = getattr(_library(), name)
    function.restype = None
    function(ctypes.byref(place), *(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in args))


def values(bits: int, *shape: int) -> Tensor:
    if bits == 32:
        return torch.randn(shape)
    return torch.randint(1, 1 << (bits - 1), shape).to({8: torch.uint8, 16: torch.int16}[bits])


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize("rows", [ROWS, 13, 7])
@pytest.mark.parametrize("columns", [48, 32, 64])
def test_a_step_of_one_lane(bits: int, width: int, vector: bool, rows: int, columns: int):
    step = values(bits, ROWS, width)
    out = torch.zeros(ROWS + 1, 2, 64, dtype=step.dtype)  # lane 1 of [row, lane, column]
    place = Place(out.data_ptr(), 128, 1, 64, vector, rows, columns)
    call(f"store{bits}_{width}", place, step)
    last = min(columns, FIRST + width)
    assert torch.equal(out[:rows, 1, FIRST:last], step[:rows, : last - FIRST])
    out[:rows, 1, FIRST:last] = 0
    assert not out.any()


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("columns", [17, 31, 45])
def test_columns_that_end_anywhere_and_lie_apart(bits: int, columns: int):
    step = values(bits, ROWS, 32)
    out = torch.zeros(64, 2, ROWS, dtype=step.dtype)  # stored by columns
    call(f"store{bits}_32", Place(out.data_ptr(), 1, 2 * ROWS, ROWS, False, 11, columns), step)
    assert torch.equal(out[FIRST:columns, 1, :11].T, step[:11, : columns - FIRST])
    assert int((out != 0).sum()) == 11 * (columns - FIRST)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize("vector", [True, False])
def test_a_run_of_a_strip(bits: int, width: int, vector: bool):
    """Adjacent columns, or columns that lie apart; rows that are there."""
    run = values(bits, ROWS, width)
    step = 1 if vector else 3
    out = torch.zeros(ROWS, 2, 64 * step, dtype=run.dtype)
    call(f"run{bits}_{width}", Place(out.data_ptr(), 128 * step, step, 64 * step, vector, 13, 64), run)
    assert torch.equal(out[:13, 1, FIRST * step : (FIRST + width) * step : step], run[:13])
    assert int((out != 0).sum()) == 13 * width


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("vector", [True, False])
def test_interleaved_lanes(bits: int, vector: bool):
    steps = values(bits, 2, ROWS, 32)
    out = torch.zeros(ROWS, 64, 2, dtype=steps.dtype)
    call(f"interleaved{bits}", Place(out.data_ptr(), 128, 2, 1, vector, 13, 40), steps)
    assert torch.equal(out[:13, FIRST:40], steps.movedim(0, -1)[:13, : 40 - FIRST])
    assert int((out != 0).sum()) == 2 * 13 * (40 - FIRST)


@pytest.mark.parametrize("kind", ["sum", "max", "min", "logsumexp"])
@pytest.mark.parametrize("rows", [ROWS, 13, 3])
@pytest.mark.parametrize("columns", [17, 31, 48])
def test_rows_of_a_band_are_reduced(kind: str, rows: int, columns: int):
    """Rows that are there, in columns that are there; of log-sum-exp a maximum and a sum relative to it."""
    x = torch.randn(ROWS, 32) - 50
    x[rows:] = float("nan")
    partials = torch.full((columns, 2) if kind == "logsumexp" else (columns,), -777.0)
    call(f"columns_{kind}", Place(0, 0, 0, 0, False, rows, columns), x, partials)
    inside = x[:rows, : columns - FIRST]
    if kind == "logsumexp":
        assert torch.equal(partials[FIRST:, 0], inside.amax(0))
        got, want = partials[FIRST:, 0] + partials[FIRST:, 1].log(), inside.logsumexp(0)
    else:
        got, want = partials[FIRST:], {"sum": inside.sum, "max": inside.amax, "min": inside.amin}[kind](0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    assert (partials[:FIRST] == -777.0).all()


@pytest.mark.parametrize("columns", [17, 30, 48])
@pytest.mark.parametrize("offset", [20.0, -20.0, -1e4])
def test_log_sum_exp_of_the_columns_there_are(columns: int, offset: float):
    x = torch.randn(ROWS, 32) + offset
    x[2, 0], x[3] = float("inf"), float("-inf")
    states = torch.full((ROWS, 2), -777.0)
    call("lse", Place(0, 0, 0, 0, 0, 13, columns), x, states)
    got = torch.where(states[:, 0].isinf(), 0, states[:, 0]) + states[:, 1].log()
    torch.testing.assert_close(got[:13], x[:13, : columns - FIRST].logsumexp(1), rtol=1e-6, atol=1e-6)
    assert states[13:].eq(-777).all()


def test_every_label_is_picked_once():
    """Steps at columns 0 and 32 of an output of 50 columns; a label outside gives 0, from the first step."""
    x = torch.randn(ROWS, 64)
    for label in (*range(-2, 53), 1 << 40, -(1 << 40)):
        labels = torch.full((ROWS,), label)
        picked = torch.full((ROWS,), -777.0)
        for column in (0, 32):
            step = x[:, column : column + 32].contiguous()
            call("pick", Place(0, 0, 0, 0, 0, 13, 50), step, labels, column, picked)
        inside = 0 <= label < 50
        assert torch.equal(picked[:13], x[:13, label] if inside else torch.zeros(13)), label
        assert picked[13:].eq(-777).all()
