"""Emission of what a tile does with a strip of a head (templates/mainloop.h): runs of columns, of which a thread has
neighbours in memory, so that it reads tables and stores results 16 bytes at a time, with no exchange between threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coda.target.plan import Block, Heads, Strip


@dataclass(frozen=True)
class Table:
    """A gathered table that elements of a block read: its row, which is a member of ``Row``, its dtype, and the column
    of it that belongs to the first of the block."""

    row: str
    dtype: str
    column: int


@dataclass(frozen=True)
class Sink:
    """A result of elements of a block: the output it is stored to, by an expression, that of where its rows begin, its
    dtype's bits, and its first column in the head."""

    output: str
    rows: str
    bits: int
    column: int


def enter(heads: Heads, strip: Strip) -> list[str]:
    """From the number of a strip to that of its head, and where its runs begin in the parts of that."""
    return [f"    int const strip = g % {heads.strips} * {strip.run};", f"    g /= {heads.strips};"]


def unit(heads: Heads) -> str:
    """What a tile holds whole: ``kHead`` columns of a head."""
    if heads.strip is None:
        return f"static constexpr int kHead = {heads.unit}, kRun = 0;"
    parts = f"kParts = {heads.strip.parts}, kHeadColumns = {heads.dim}"
    return f"static constexpr int kHead = {heads.unit}, kRun = {heads.strip.run}, {parts};"


def steps(
    heads: Heads, strip: Strip, number: int, block: Block, tables: Sequence[Table], sinks: Sequence[Sink]
) -> list[str]:
    """The lines that work on what a strip has of a block: one run, with a lane in each part, or a run in each part."""
    starts = [part * heads.dim // strip.parts for part in range(strip.parts)]
    lanes = [part * strip.run // 8 for part in range(strip.parts)]
    if len(block.offsets) == strip.parts:
        return _step(strip, number, 0, lanes, tables, sinks)
    runs = zip(starts, lanes, strict=True)
    return [line for start, lane in runs for line in _step(strip, number, start, [lane], tables, sinks)]


def _step(
    strip: Strip, number: int, start: int, lanes: Sequence[int], tables: Sequence[Table], sinks: Sequence[Sink]
) -> list[str]:
    """The run that begins ``start`` columns behind that of the first part. ``lanes``: the groups of accumulators."""
    pairs = strip.run // 8
    products = "".join(f", v.pair({lane} + j, rr)" for lane in lanes)
    read = "".join(f", table{k}.pairs[j]" for k in range(len(tables)))
    own = f"{start} + strip + {2 * pairs} * q" if start else f"strip + {2 * pairs} * q"
    lines = [
        "    CUTLASS_PRAGMA_UNROLL",
        "    for (int rr = 0; rr < 2; ++rr) {",
        f"      int const own = {own};  // the first of the thread's columns",
        *(f"      auto const table{k} = coda::load_run<{t.dtype}, {pairs}>(rows[rr].{t.row}, own + {t.column});"
          for k, t in enumerate(tables)),
        *(f"      {_PAIR[sink.bits]} piece{k}[{pairs}];" for k, sink in enumerate(sinks)),
        "      CUTLASS_PRAGMA_UNROLL",
        f"      for (int j = 0; j < {pairs}; ++j) {{",
        f"        auto const result = Block{number}::element(p.operands, u, rows[rr], heads[rr], "
        f"typename Block{number}::Columns{{}}, row + 8 * rr, own + 2 * j{products}{read});",
        *(f"        piece{k}[j] = result.piece{k};" for k in range(len(sinks))),
        "      }",
        "      if (row + 8 * rr >= p.m) continue;",
    ]  # fmt: skip
    for k, sink in enumerate(sinks):
        place = f"{sink.rows}[rr], own + {sink.column}"
        lines.append(f"      coda::store_run<{_STORED[sink.bits]}>({sink.output}, g, piece{k}, {place});")
    return [*lines, "    }"]


_PAIR = {8: "uint32_t", 16: "uint32_t", 32: "coda::Two<float>"}
_STORED = {8: "uint8_t", 16: "uint16_t", 32: "float"}
