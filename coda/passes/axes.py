"""Values over the axes they should have: broadcasting undone, slices and parts put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key, reduce

import sympy

from coda.dtypes import F32, I64
from coda.ir import Axis, Dim, Node, Size, Type
from coda.ops import build


def number(value: float) -> Node:
    return build("const", value=value, dtype=F32)


def position(axes: Dim) -> Node:
    """The position along axes that one loop may count."""
    return build("index", axis=axes[0]) if len(axes) == 1 else build("position", axes=axes)


def zeros(*axes: Axis) -> Node:
    """0 at each position of axes that one loop may count."""
    return build("mul", number(0.0), position(axes))


def expand(value: Node, dims: Sequence[Dim]) -> Node:
    """The value repeated over those axes of ``dims`` that it lacks. A dim that it lacks whole stays together: nobody
    may be able to tell B and T of ``(B T)``."""
    for dim in dims:
        lacking = tuple(a for a in dim if a.name not in value.type.names)
        for run in [lacking] if lacking == dim else [(a,) for a in lacking]:
            value = build("add", value, zeros(*run))
    return value


def conform(value: Node, type_: Type) -> Node:
    """The value with exactly the dims of a type, as ``@`` needs it."""
    return arranged(expand(value, type_.dims), type_)


def arranged(value: Node, type_: Type) -> Node:
    """The value with its axes grouped and ordered as in a type, if they are the same axes."""
    if value.type.dims == type_.dims or value.type.names != type_.names:
        return value
    if len(type_.dims) in (2, 3) and value.type.dims == (*type_.dims[:-2], *type_.dims[:-3:-1]):
        return build("transpose", value)
    return build("layout", value, dims=type_.dims)


def sum_to(value: Node, target: Type, axes: Sequence[Axis]) -> Node:
    """The gradient of an operand of type ``target`` that was broadcast to ``axes``, from what reaches each position
    of these; ``value`` may lack axes along which that is constant."""
    excess = tuple(a.name for a in value.type.axes if a.name not in target.names)
    if excess:
        value = build("reduce_sum", value, axes=excess)
    times = [a.size for a in axes if a.name not in target.names and a.name not in (value.type.names | set(excess))]
    return build("mul", value, build("size", expr=sympy.Mul(*times))) if times else value


def add_all(values: Sequence[Node]) -> Node:
    return reduce(lambda a, b: build("add", a, b), values)


def join_slices(slices: Mapping[int, Node], axis: Axis) -> Node:
    """The value whose positions along an axis are given, and 0 elsewhere."""
    if axis.static is not None:
        return build("stack", *(slices.get(i, number(0.0)) for i in range(axis.static)), axis=axis)
    return add_all([_at(axis, i, x) for i, x in slices.items()])


def _at(axis: Axis, position: int, value: Node) -> Node:
    there = build("eq", build("index", axis=axis), build("const", value=position, dtype=I64))
    return build("where", there, value, number(0.0))


@dataclass(frozen=True)
class Part:
    """A value for the positions from ``start`` of an axis, under the axis ``into`` of its own."""

    start: Size
    into: Axis
    value: Node

    @property
    def end(self) -> Size:
        return sympy.expand(self.start + self.into.size)


def join_parts(parts: Sequence[Part], axis: Axis, fresh: Callable[[str], str]) -> Node:
    """The sum of parts of one axis, 0 where there is none. Parts that do not overlap are joined by one ``concat``."""
    rest, rows = sorted(parts, key=cmp_to_key(_by_start)), []
    while rest:
        row = [rest.pop(0)]
        for part in list(rest):
            if sympy.expand(part.start - row[-1].end).is_nonnegative:
                row.append(part)
                rest.remove(part)
        rows.append(_row(row, axis, fresh))
    return add_all(rows)


def _by_start(a: Part, b: Part) -> int:
    """Which part comes first; 0 where the sizes do not tell."""
    return int(bool((a.start - b.start).is_positive)) - int(bool((b.start - a.start).is_positive))


def _row(parts: Sequence[Part], axis: Axis, fresh: Callable[[str], str]) -> Node:
    """Parts in order, with zeros in the gaps."""
    pieces: list[Part] = []
    position: Size = sympy.Integer(0)
    for part in parts:
        pieces += [*_gap(position, part.start, axis, fresh), part]
        position = part.end
    pieces += _gap(position, axis.size, axis, fresh)
    values = [expand(p.value, ((p.into,),)) for p in pieces]
    return build("concat", *values, axis=axis, parts=tuple(p.into.name for p in pieces))


def _gap(start: Size, end: Size, axis: Axis, fresh: Callable[[str], str]) -> list[Part]:
    size = sympy.expand(end - start)
    if size == 0:
        return []
    into = Axis(fresh(f"{axis.name}_gap"), size)
    return [Part(start, into, zeros(into))]
