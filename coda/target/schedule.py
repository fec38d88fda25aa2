"""Schedules: the kernels of a program in the order in which they run, and the memory between them.

A step is a visitor plan (a GEMM) or a row plan, with its finish kernels. Steps read and write the arguments of the
program and *temporaries*, which live in the workspace: from the step that writes one to the last that reads it. Those
whose lives do not overlap share a buffer. Sizes are formulas over the axes, which the launcher evaluates.

Some steps may be a *loop*, run once for each chunk of an axis (``coda/passes/chunk.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from coda.dtypes import DType
from coda.ir import Axis, Program, Size, nominal
from coda.target.plan import Arg, Plan, Variant
from coda.target.rowplan import RowPlan

Kernel = Plan | RowPlan


@dataclass(frozen=True)
class Temporary:
    """A tensor between kernels. ``buffer`` is the piece of the workspace it lies in. ``step``: the tiles of this step
    leave it unfinished, as [count, rows]."""

    name: str
    dtype: DType
    dims: tuple[Size, ...]
    axes: tuple[str, ...]
    buffer: int
    step: int | None = None


@dataclass(frozen=True)
class Part:
    """What the steps of a loop see of argument ``of``: its chunk along dim ``dim``."""

    name: str
    of: str
    dim: int


@dataclass(frozen=True)
class Loop:
    """Steps ``first`` up to ``end`` run for one chunk after the other of ``axis``: ``width`` positions of it, the last
    chunk has what is left. There the axis is called ``part``, and ``start`` is a scalar, the chunk's first position."""

    first: int
    end: int
    axis: Axis
    part: Axis
    width: int
    start: str
    parts: tuple[Part, ...]

    def __contains__(self, step: int) -> bool:
        return self.first <= step < self.end

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that only its steps know, in the order in which the launcher counts them."""
        return (*(part.name for part in self.parts), self.start)

    def whole(self, size: Size) -> Size:
        """A size in terms of the whole axis."""
        return sympy.sympify(size).subs(self.part.size, self.axis.size)


@dataclass(frozen=True)
class Schedule:
    """A program as one or more kernels. ``args`` are the positions of ``NAME_run``."""

    name: str
    program: Program
    args: tuple[Arg, ...]
    steps: tuple[Kernel, ...]
    temporaries: tuple[Temporary, ...] = ()
    loop: Loop | None = None
    groups: tuple[int, ...] = ()  # for each step how many, from it on, one launch runs; 0 where one before does

    @classmethod
    def of(cls, kernel: Kernel) -> Schedule:
        """The schedule of a program that is one kernel."""
        return cls(kernel.name, kernel.program, kernel.args, (kernel,))

    @property
    def gemms(self) -> tuple[Plan, ...]:
        return tuple(step for step in self.steps if isinstance(step, Plan))

    @property
    def members(self) -> tuple[int, ...]:
        """For each step how many one launch runs, from it on; 0 where a launch before does."""
        return self.groups or (1,) * len(self.steps)

    def leader(self, step: Kernel) -> Kernel:
        """The step whose launch runs this one."""
        index = self._index(step)
        return self.steps[max(i for i in range(index + 1) if self.members[i])]

    def launched_with(self, step: Kernel) -> tuple[Kernel, ...]:
        """The steps behind this one that its launch runs as well."""
        index = self._index(step)
        return self.steps[index + 1 : index + self.members[index]]

    def _index(self, step: Kernel) -> int:
        return next(i for i, s in enumerate(self.steps) if s is step)

    @property
    def buffers(self) -> int:
        return 1 + max((t.buffer for t in self.temporaries), default=-1)

    def arg(self, name: str) -> Arg:
        return next(a for a in self.args if a.name == name)

    def rounds(self, step: Kernel, sizes: Mapping[str, int] | None) -> int:
        """How often a step runs in a row, with others: once for each chunk. 1 where the axis has no known size."""
        if self.loop is None or self._index(step) not in self.loop:
            return 1
        return -(-(sizes or {}).get(self.loop.axis.name, 1) // self.loop.width)

    def with_chunk(self, sizes: Mapping[str, int] | None) -> dict[str, int]:
        """The sizes that are known, with that of a chunk."""
        known = dict(sizes or {})
        if self.loop is not None:
            known[self.loop.part.name] = min(self.loop.width, known.get(self.loop.axis.name, self.loop.width))
        return known


@dataclass(frozen=True)
class Assembly:
    """A schedule with the tiles its GEMMs are built for: what an artifact holds of a program."""

    schedule: Schedule
    variants: tuple[Variant, ...]

    @property
    def name(self) -> str:
        return self.schedule.name

    def variants_of(self, step: Kernel) -> tuple[Variant, ...]:
        """The kernels that may run a step: those of the step whose launch it shares."""
        leader = self.schedule.leader(step)
        return tuple(v for v in self.variants if v.plan is leader)

    def built_of(self, step: Kernel) -> tuple[Variant, ...]:
        """The kernels that are built for a step."""
        return self.variants_of(step) if self.schedule.leader(step) is step else ()


def schedule_steps(
    program: Program,
    args: Sequence[Arg],
    steps: Sequence[Kernel],
    loop: Loop | None = None,
    groups: Sequence[int] = (),
) -> Schedule:
    """The schedule of kernels that run in this order: what is no argument of the program is a temporary. ``groups``:
    see ``Schedule``."""
    known = {a.name for a in args} | set(loop.names if loop else ())
    between = {a.name: a for step in steps for a in step.args if a.name not in known}
    lives = {name: _life(name, steps, loop, groups) for name in between}
    buffers = share({name: (*lives[name], _nominal(arg)) for name, arg in between.items()})
    partial = {s.arg: i for i, step in enumerate(steps) for s in step.stores if s.kind == "row"}
    temporaries = tuple(Temporary(n, a.dtype, a.dims, a.axes, buffers[n], partial.get(n)) for n, a in between.items())
    return Schedule(
        program.name, program, tuple(args), tuple(steps), temporaries, loop, tuple(groups) if 0 in groups else ()
    )


def _life(name: str, steps: Sequence[Kernel], loop: Loop | None, groups: Sequence[int]) -> tuple[int, int]:
    """The first and the last step that a tensor is alive in: of steps that run as one, all. What a loop finds there is
    read in each of its rounds."""
    inside = [i for i, step in enumerate(steps) if any(a.name == name for a in step.args)]
    first, last = inside[0], inside[-1]
    if groups:
        begins = [i for i, count in enumerate(groups) if count]
        first, leader = (max(b for b in begins if b <= i) for i in (first, last))
        last = leader + groups[leader] - 1
    if loop is not None and first < loop.first <= last < loop.end:
        last = loop.end - 1
    return first, last


def share(lives: dict[str, tuple[int, int, int]]) -> dict[str, int]:
    """A buffer for each (first step, last step, bytes): a free one of about its size, or a new one. There are as many
    as tensors that are alive at once."""
    chosen: dict[str, int] = {}
    busy_until: list[int] = []
    largest: list[int] = []
    for name, (first, last, size) in sorted(lives.items(), key=lambda item: (item[1][0], -item[1][2])):
        free = [b for b, until in enumerate(busy_until) if until < first]
        if free:
            buffer = min(free, key=lambda b: (abs(largest[b] - size), b))
            busy_until[buffer], largest[buffer] = last, max(largest[buffer], size)
        else:
            buffer = len(busy_until)
            busy_until.append(last)
            largest.append(size)
        chosen[name] = buffer
    return chosen


def _nominal(arg: Arg) -> int:
    return nominal(sympy.Mul(*arg.dims)) * arg.dtype.bytes
