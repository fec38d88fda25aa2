"""Row kernels, run by the host compiler: the generated code of a row, with a team of one thread.

``compile_rows`` makes one library of a batch of plans. A ``HostRows`` is called with a program's operands and returns
its outputs as ``coda.runtime.reference.evaluate`` does: it binds tensors as the launcher does, runs every row, then the
finish kernels over the partial results of one block.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.ir import dim_size
from coda.ops.reduce import REDUCTIONS
from coda.runtime.binding import bind, evaluate_size, shapes_of
from coda.target import emit, emit_rows
from coda.target.rowplan import MAX_LEVELS, OCTET, Access, Partials, RowFinishing, RowPart, RowPlan
from tests.hostmath import PREAMBLE, Entry, compile_cpp


class RowEntry(ctypes.Structure):
    """coda::RowTensor of templates/launch.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("level", ctypes.c_int64 * MAX_LEVELS),
        ("column", ctypes.c_int64),
        ("gather", ctypes.c_int64),
        ("extent", ctypes.c_int64),
        ("integer", ctypes.c_int64),
        ("value", ctypes.c_float),
        ("vector", ctypes.c_int32),
    )


def part_type(part: RowPart) -> type[ctypes.Structure]:
    """coda::Rows of templates/launch.h."""

    class Rows(ctypes.Structure):
        _fields_ = (
            *((name, ctypes.c_int32) for name in ("rows", "threads", "groups", "blocks", "chunks")),
            ("sizes", ctypes.c_int32 * max(len(part.levels), 1)),
            ("columns", ctypes.c_int32 * len(part.spaces)),
            ("tensors", RowEntry * len(part.accesses)),
        )

    return Rows


def launch_type(plan: RowPlan) -> type[ctypes.Structure]:
    """coda::RowParts of templates/launch.h, with the parts as part0, part1 ..."""
    kinds = [part_type(part) for part in plan.parts]
    return type("Parts", (ctypes.Structure,), {"_fields_": [(f"part{i}", kind) for i, kind in enumerate(kinds)]})


def compile_rows(plans: Sequence[RowPlan]) -> list[HostRows]:
    plans = [replace(plan, name=f"p{i}_{plan.name}") for i, plan in enumerate(plans)]
    library = compile_cpp("\n".join([PREAMBLE, '#include "serial_team.h"', *map(_driver, plans)]))
    return [HostRows(plan, library) for plan in plans]


def _driver(plan: RowPlan) -> str:
    lines = [f"namespace {plan.name} {{\n{emit_rows.row_body(plan)}\n}}"]
    parts = ", ".join(f"{plan.name}::{name}" for name in emit_rows.part_names(plan))
    for octets in _variants(plan):
        head = f'extern "C" void {plan.name}_{octets}(coda::launch_of<{parts}> const* p)'
        lines.append(f"{head} {{ run_parts<{octets}, {parts}>(*p); }}")
    for finishing in plan.finishings:
        inputs, outputs = len(finishing.partials) + len(finishing.operands), len(finishing.results)
        name = f"{plan.name}_finish_{finishing.label}"
        lines += [
            emit.finish_kernel(plan, finishing),
            f'extern "C" void {name}_all(Entry const* entries, int length) {{',
            f"  auto const p = finish<coda::Finish<{inputs}, {outputs}>>(entries, {inputs}, {outputs}, length, 0);",
            f"  for (threadIdx.x = 0; threadIdx.x < length; ++threadIdx.x) {name}(p);",
            "}",
        ]
    return "\n".join(lines)


def _variants(plan: RowPlan) -> tuple[int, ...]:
    """Enough octets for one thread to hold the small rows of tests; and the streaming variant."""
    return (16, 0) if plan.variants[-1].octets == 0 else (16,)


@dataclass(frozen=True)
class HostRows:
    """A plan compiled for the host."""

    plan: RowPlan
    library: ctypes.CDLL

    def __call__(
        self, inputs: Mapping[str, Any], octets: int = 16, dims: Mapping[str, int] | None = None
    ) -> dict[str, Tensor]:
        return _Call(self, inputs, octets, dims).outputs()


class _Call:
    def __init__(self, program: HostRows, inputs: Mapping[str, Any], octets: int, dims: Mapping[str, int] | None):
        self.plan, self.library, self.octets = program.plan, program.library, octets
        self.sizes = bind(self.plan.program, shapes_of(inputs), dims)
        self.tensors = dict(inputs)
        for arg in self.plan.args:
            if arg.inout:
                self.tensors[arg.name] = inputs[arg.name].clone()
            elif arg.is_output:
                shape = [self.size(d) for d in arg.dims]
                self.tensors[arg.name] = torch.full(shape, -777.0).to(torch_dtype(arg.dtype))
        self.partials = [torch.full((*self._counts(p), *self._state(i)), -777.0)
                         for i, p in enumerate(self.plan.partials)]  # fmt: skip

    def size(self, size: Any) -> int:
        return evaluate_size(size, self.sizes)

    def _counts(self, p: Partials) -> tuple[int, int]:
        """[count, length] of partials: the rows of a group are one block."""
        groups = self.size(dim_size(self.plan.parts[p.part].groups))
        return (1 if p.kept else groups) if p.blocks else self.size(p.count), self.size(p.length)

    def _state(self, slot: int) -> tuple[int, ...]:
        """What follows a partial's position: the values that it is."""
        floats = REDUCTIONS[self.plan.stores[slot].reduction or ""].floats
        return (floats,) if floats > 1 and self.plan.partials[slot].blocks else ()

    def outputs(self) -> dict[str, Tensor]:
        launch = launch_type(self.plan)()
        for i, part in enumerate(self.plan.parts):
            self._fill_part(getattr(launch, f"part{i}"), part)
        run = getattr(self.library, f"{self.plan.name}_{self.octets}")
        run.restype = None
        run(ctypes.byref(launch))
        for finishing in self.plan.finishings:
            self._finish(finishing)
        return {o.name: self.tensors[o.into or o.name] for o in self.plan.program.outputs}

    def _fill_part(self, p: Any, part: RowPart) -> None:
        levels = [self.size(dim_size(level)) for level in part.levels]
        columns = [self.size(dim_size(space)) for space in part.spaces]
        assert self.octets == 0 or max(columns) <= OCTET * self.octets
        p.rows, p.groups = math.prod(levels), math.prod(levels[: part.fixed])
        p.sizes[: len(levels)], p.columns[:] = levels, columns
        for k, access in enumerate(part.accesses):
            self._fill(p.tensors[k], access)

    def _fill(self, entry: RowEntry, access: Access) -> None:
        """As bind_row_tensor in templates/host/rows.h."""
        if access.slot is not None:
            entry.data = self.partials[access.slot].data_ptr()
            entry.level[: len(access.levels)] = [0 if s is None else self.size(s.scale) for s in access.levels]
            return
        if access.arg is None:
            entry.integer = self.size(access.size)
            return
        value, default = self.tensors.get(access.arg), self.plan.arg(access.arg).default
        if value is None:
            value = access.identity if default is None else default
        if not isinstance(value, Tensor):
            entry.value, entry.integer = value, int(value) if abs(value) < 2**62 else 0
            return
        stride = lambda s: 0 if s is None or value.shape[s.dim] == 1 else value.stride(s.dim) * self.size(s.scale)  # noqa: E731
        offset = sum(value.stride(dim) * self.size(elements) for dim, elements in access.offsets)
        entry.data = value.data_ptr() + offset * value.element_size()
        entry.level[: len(access.levels)] = [stride(s) for s in access.levels]
        entry.column = stride(access.column)
        if access.partial is not None:
            entry.gather, entry.extent = value.stride(0), len(value)
        steps = [*entry.level]
        if access.gather is not None:
            entry.gather, entry.extent = stride(access.gather[0]), self.size(access.gather[1])
            steps.append(entry.gather)
        aligned = not any(step * value.element_size() % 16 for step in steps)
        beyond = entry.data % 16
        if aligned and entry.column == 1 and beyond == 0:
            entry.vector = 1
        elif aligned and entry.column == 2 and beyond in (0, value.element_size()):
            entry.vector = 2 + (beyond != 0)

    def _finish(self, finishing: RowFinishing) -> None:
        """As launch_finish in templates/host/finish.h."""
        partials = [self.partials[i] for i in finishing.partials]
        entries = [Entry(data=x.data_ptr(), extent=x.shape[0]) for x in partials]
        for access in finishing.accesses:
            t = RowEntry()
            self._fill(t, access)
            inner = self.size(finishing.inner)
            entries.append(Entry(t.data, t.level[1], 0, t.level[0], t.value, t.integer, inner))
        run = getattr(self.library, f"{self.plan.name}_finish_{finishing.label}_all")
        run.restype, run.argtypes = None, (ctypes.c_void_p, ctypes.c_int)
        run((Entry * len(entries))(*entries), partials[0].shape[1])
