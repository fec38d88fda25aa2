"""Head-wise epilogues, run by the host compiler: generated segments with their stores, in the 32 threads of a warp.

A ``HostHeads`` takes a program's operands and returns its outputs as ``coda.runtime.reference.evaluate`` does: tensors
are bound as the launcher binds them, and each band of 16 rows visits every head of the product, or every strip of one,
whose accumulators the interpreter has computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.ir import Output as Result
from coda.ir import dim_size
from coda.runtime.binding import bind, evaluate_size, shapes_of
from coda.runtime.reference import evaluate_sized
from coda.target import emit
from coda.target.emit_heads import HeadEmitter
from coda.target.plan import Operand, Plan, Store
from tests.abi import harness
from tests.hostmath import compile_cpp

PREAMBLE = """
#include <cutlass/cutlass.h>
#include <vector>

#include "heads.h"
#include "operand.h"
"""


def compile_heads(plans: Sequence[Plan]) -> list[HostHeads]:
    plans = [replace(plan, name=f"p{i}_{plan.name}") for i, plan in enumerate(plans)]
    library = compile_cpp("\n".join([PREAMBLE, *map(_driver, plans)]))
    return [HostHeads(plan, library) for plan in plans]


def _driver(plan: Plan) -> str:
    assert plan.heads is not None
    dispatch = "\n".join(HeadEmitter(plan).dispatch())
    return f"""
namespace {plan.name} {{
{emit.body(plan)}
struct Launch {{ coda::Operand const* operands; coda::Output const* outputs; int m; }};
{dispatch}
{_column(plan)}
template <class Segment>
void visit(typename Segment::Where const& w, Launch const& p, Body::Uniform const& u,
           std::vector<Body::Row> const& rows, float const* acc, int head, int g, int row, int width) {{
  constexpr int kHead = {plan.heads.unit};
  alignas(16) char slot[Segment::kSlotBytes + 16];
  for (int pair = 0; pair < kHead / 2; ++pair) Segment::stage(w, slot, p.operands, u, g, pair);
  run_warp([&](int lane) {{
    int const q = lane & 3, first = row + (lane >> 2);
    float mine[kHead / 2];
    for (int i = 0; i < kHead / 2; ++i) {{
      int const m = first + 8 * (i >> 1 & 1), n = head * kHead + 8 * (i >> 2) + 2 * q + (i & 1);
      mine[i] = m < p.m ? acc[int64_t(m) * width + column(n)] : 0.0f;
    }}
    Body::Row const pair[2] = {{rows[first], rows[first + 8]}};
    Segment::visit(w, coda::HeadView{{mine}}, p, u, pair, slot, g, first, q);
  }});
}}
}}  // namespace {plan.name}
extern "C" void {plan.name}_run(coda::Operand const* in, coda::Output const* out, float const* acc, int m, int width) {{
  using namespace {plan.name};
  Launch const p{{in, out, m}};
  int const heads = width / {plan.heads.unit};
  auto const u = Body::uniform(in, m, width);
  std::vector<Body::Row> rows;
  for (int row = 0; row < (m + 15) / 16 * 16; ++row) rows.push_back(Body::row(in, u, row, m));
  for (int row = 0; row < m; row += 16)
    for (int head = 0; head < heads; ++head)
      dispatch(head, heads, [&](auto segment, auto const& where, int g) {{
        visit<decltype(segment)>(where, p, u, rows, acc, head, g, row, width);
      }});
}}
"""


def _column(plan: Plan) -> str:
    """The column of the product that column ``n`` of the tiles is: as Runs in templates/mainloop.h."""
    assert plan.heads is not None
    if (strip := plan.heads.strip) is None:
        return "inline int column(int n) { return n; }"
    return f"""inline int column(int n) {{
  int const run = n / {strip.run}, part = run % {strip.parts}, strip = run / {strip.parts};
  int const head = strip / {plan.heads.strips}, first = strip % {plan.heads.strips} * {strip.run};
  int const group = n % {strip.run} / 8, q = n % 8 / 2;  // a thread's columns are neighbours
  int const own = q * {strip.run // 4} + group * 2 + n % 2;
  return head * {plan.heads.dim} + part * {plan.heads.dim // strip.parts} + first + own;
}}"""


@dataclass(frozen=True)
class HostHeads:
    """A plan compiled for the host."""

    plan: Plan
    library: ctypes.CDLL

    def __call__(self, inputs: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Tensor]:
        return _Call(self, inputs, dims).outputs()


class _Call:
    def __init__(self, program: HostHeads, inputs: Mapping[str, Any], dims: Mapping[str, int]):
        self.plan, self.library, self.inputs = program.plan, program.library, inputs
        self.sizes = bind(self.plan.program, shapes_of(inputs), dims)
        self.tensors = {o.name: torch.full([evaluate_size(dim_size(d), self.sizes) for d in o.type.dims], -777.0)
                        .to(torch_dtype(o.type.dtype)) for o in self.plan.program.outputs}  # fmt: skip

    def outputs(self) -> dict[str, Tensor]:
        rows, width = (evaluate_size(dim_size(d), self.sizes) for d in (self.plan.rows, self.plan.columns))
        acc = self._accumulators().reshape(rows, width).contiguous()
        operands = (harness.Operand * max(len(self.plan.operands), 1))(*map(self._operand, self.plan.operands))
        results = (harness.Output * len(self.plan.stores))(*map(self._output, self.plan.stores))
        run = getattr(self.library, f"{self.plan.name}_run")
        run.restype = None
        run(operands, results, ctypes.c_void_p(acc.data_ptr()), rows, width)
        return self.tensors

    def _accumulators(self) -> Tensor:
        (dot,) = self.plan.products
        program = self.plan.program.with_outputs([Result("acc", dot, dot.type)])
        return evaluate_sized(program, self.inputs, self.sizes)["acc"].float()

    def _operand(self, spec: Operand) -> harness.Operand:
        """As bind_operand in templates/host/bind.h."""
        if spec.size is not None:
            return harness.Operand(integer=evaluate_size(spec.size, self.sizes))
        value, default = self.inputs.get(spec.arg), self.plan.arg(spec.arg).default
        if value is None:
            value = spec.identity if default is None else default
        if not isinstance(value, Tensor):
            return harness.Operand(value=value, integer=int(value))
        assert spec.walk is not None
        row, column, head = self._strides(value, spec)
        extent = value.shape[0 if spec.partial else spec.walk.row] if spec.walk.row is not None else 0
        return harness.Operand(value.data_ptr(), row, column, head, 0.0, extent, 0)

    def _output(self, spec: Store) -> harness.Output:
        """As bind_walked_output in templates/host/bind.h."""
        y = self.tensors[spec.arg or ""]
        assert spec.walk is not None
        row, column, head = self._strides(y, spec)
        batch = 0 if spec.walk.batch is None else y.stride(spec.walk.batch)
        per_batch = 0 if spec.walk.batch is None else y.shape[spec.walk.row or 0]
        places = [y.data_ptr(), *(step * y.element_size() for step in (row, head, batch))]
        vector = column == 1 and not any(x % 16 for x in places)
        return harness.Output(y.data_ptr(), row, column, head, vector, per_batch, batch)

    @staticmethod
    def _strides(x: Tensor, spec: Operand | Store) -> tuple[int, int, int]:
        walk = spec.walk
        assert walk is not None
        row, column, head = (0 if dim is None or x.shape[dim] == 1 else x.stride(dim)
                             for dim in (walk.row, walk.column, walk.head))  # fmt: skip
        return row, column, head * walk.head_scale
