"""Sizes become numbers: those of heads, which a head-wise epilogue knows when it is built.

Everything else of a program stays symbolic, so that one artifact serves every number of rows. Label: bitwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy

from coda.ir import Axis, Node, Program, Type, appearing_axes, intern, size_symbol, topological
from coda.passes.lanes import lane_axes


def with_head_sizes(program: Program, sizes: Mapping[str, int]) -> Program:
    """The program with the sizes of its heads as numbers, as far as they are among ``sizes``."""
    names = {s.name for axis in head_axes(program) for s in axis.size.free_symbols}
    return with_sizes(program, {n: sizes[n] for n in names & sizes.keys()})


def head_axes(program: Program) -> list[Axis]:
    """The axes of the columns of products of which the program sees a part: heads, and columns in three lanes; and in
    a backward those that products contract, which it puts together of parts."""
    lanes = set(lane_axes(program))
    types = [*(p.type for p in program.params), *(o.type for o in program.outputs)]
    nodes = program.nodes()
    found: dict[Axis, None] = {}
    for columns in (n.type.dims[-1] for n in nodes if n.op == "dot"):
        axes = [a for a in columns if a not in lanes]
        names = {a.name for a in axes}
        in_tensors = any(0 < len(names & {a.name for a in dim}) < len(names) for t in types for dim in t.dims)
        in_lanes = any(a in lanes and a.static != 2 for a in columns)
        if in_lanes or in_tensors or any(_is_inside(n, names) for n in nodes):
            found |= dict.fromkeys(axes)
    for contracted in (n.args[0].type.dims[-1] for n in nodes if n.op == "dot"):
        if any(n.op == "concat" and n.attr("axis") in contracted for n in nodes):
            found |= dict.fromkeys(contracted)
    return list(found)


def _is_inside(node: Node, names: set[str]) -> bool:
    """Whether an operation looks inside a group of axes."""
    if node.op == "part":
        return node.attr("axis") in names
    return node.op.startswith("reduce_") and 0 < len(names & set(node.attr("axes"))) < len(names)


def with_sizes(program: Program, sizes: Mapping[str, int]) -> Program:
    """The program at some sizes of free axes."""
    if not sizes:
        return program
    values = {size_symbol(name): size for name, size in sizes.items()}

    def at(x: Any) -> Any:
        if isinstance(x, Axis):
            return Axis(x.name, x.size.subs(values))
        if isinstance(x, Type):
            return Type(x.dtype, at(x.dims))
        if isinstance(x, sympy.Basic):
            return x.subs(values)
        return tuple(map(at, x)) if isinstance(x, tuple) else x

    new: dict[Node, Node] = {}
    for node in topological(o.value for o in program.outputs):
        attrs = {key: at(value) for key, value in node.attrs}
        new[node] = intern(node.op, [new[a] for a in node.args], attrs, at(node.type), node.span)
    params = tuple(replace(p, type=at(p.type)) for p in program.params)
    outputs = tuple(replace(o, value=new[o.value], type=at(o.type)) for o in program.outputs)
    names = tuple((new[n], name) for n, name in program.names if n in new)
    axes = appearing_axes(params, outputs)
    return replace(program, params=params, outputs=outputs, axes=axes, names=names)
