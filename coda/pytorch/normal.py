"""A translated program in the form in which the compiler knows rotary embeddings: pieces and tables.

Models spell them over whole heads, ``q * cos + rotate_half(q) * sin`` with a table for the positions of one sequence.

* ``distribute``: an elementwise operation on a ``concat`` becomes the ``concat`` of it on the pieces. Bitwise.
* ``tables``: an operand over a part of the rows and one head's columns becomes a table from which rows are gathered:
  ``cos[pos]``. Bitwise.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import sympy

from coda.dtypes import I64
from coda.ir import Axis, Dim, Node, Param, Program, Type, rewrite, substitute
from coda.ops import OPS, build
from coda.passes.naming import Fresh, taken_names


def distribute(program: Program) -> Program:
    """The program with concats above elementwise operations. Pieces of one size of an axis share an axis."""
    shared: dict[tuple[Axis, sympy.Expr], Axis] = {}
    return rewrite(program, lambda node, args: _distributed(node, args, shared))


def _distributed(node: Node, args: tuple[Node, ...], shared: dict[tuple[Axis, sympy.Expr], Axis]) -> Node | None:
    joined = [a for a in args if a.op == "concat"]
    if not joined or not _is_elementwise(node):
        return None
    axis: Axis = joined[0].attr("axis")
    pieces = _pieces(joined[0])
    if any(a.attr("axis") != axis or [p.size for p in _pieces(a)] != [p.size for p in pieces] for a in joined):
        return None
    starts = [sympy.Add(*(p.size for p in pieces[:i])) for i in range(len(pieces))]
    into = [shared.setdefault((axis, p.size), p) for p in pieces]
    values = [
        build(node.op, *(_part(a, axis, start, piece) for a in args), **dict(node.attrs))
        for start, piece in zip(starts, into, strict=True)
    ]
    return build("concat", *values, axis=axis, parts=tuple(p.name for p in into))


def _is_elementwise(node: Node) -> bool:
    return OPS[node.op].family == "pointwise" or node.op == "cast"


def _pieces(concat: Node) -> list[Axis]:
    return [a.type.axis(name) for a, name in zip(concat.args, concat.attr("parts"), strict=True)]  # type: ignore[misc]


def _part(value: Node, axis: Axis, start: sympy.Expr, into: Axis) -> Node:
    """Positions of an axis of a value, as near to its leaves as they can be taken."""
    if value.type.axis(axis.name) is None or axis == into:
        return value
    if value.op == "concat" and value.attr("axis") == axis:
        offset = sympy.Integer(0)
        for operand, piece in zip(value.args, _pieces(value), strict=True):
            if offset == start and piece.size == into.size:
                return _part(operand, piece, sympy.Integer(0), into)
            offset += piece.size
    if value.op == "part" and value.attr("into") == axis:
        (whole,) = value.args
        return build("part", whole, axis=value.attr("axis"), start=value.attr("start") + start, into=into)
    if _is_elementwise(value):
        return build(value.op, *(_part(a, axis, start, into) for a in value.args), **dict(value.attrs))
    return build("part", value, axis=axis.name, start=start, into=into)


@dataclass(frozen=True)
class Positions:
    """A parameter that says which row of a table belongs to each row: ``own`` of the axes ``rows`` count."""

    param: Param
    rows: Dim
    own: Dim


def tables(program: Program, constant: Collection[str]) -> tuple[Program, list[Positions], dict[str, Dim]]:
    """The program with tables, the parameters for positions, and for the rows of a table the axes they were. Only
    parameters named in ``constant`` become tables: a gather has no derivative."""
    matrices = [p.type.dims[0] for p in program.params if len(p.type.dims) == 2]
    rows = max((d for d in matrices if all(a.is_free for a in d)), key=len, default=())
    heads = {a for t in _types(program) for dim in t.dims if len(dim) > 1 and not dim[0].is_free for a in dim[1:]}
    fresh, positions, was = Fresh(taken_names(program)), dict[Dim, Positions](), dict[str, Dim]()
    replaced, params = dict[Node, Node](), list[Param]()
    for param in program.params:
        if param.name not in constant or not _is_table(param.type, rows, heads):
            params.append(param)
            continue
        own, columns = param.type.dims
        if own not in positions:
            positions[own] = Positions(Param(fresh("pos"), Type(I64, (rows,))), rows, own)
        axis = Axis.free(fresh("P"))
        was[axis.name] = own
        params.append(Param(param.name, Type(param.type.dtype, ((axis,), columns))))
        table, index = (build("input", name=p.name, type=p.type) for p in (params[-1], positions[own].param))
        replaced[build("input", name=param.name, type=param.type)] = build("gather", table, index, axis=axis.name)
    if not replaced:
        return program, [], {}
    new = substitute((o.value for o in program.outputs), replaced)
    outputs = [replace(o, value=new[o.value]) for o in program.outputs]
    params += [p.param for p in positions.values()]
    return Program.of(program.name, params, outputs, dict(program.names)), list(positions.values()), was


def _types(program: Program) -> list[Type]:
    return [p.type for p in program.params] + [o.type for o in program.outputs]


def _is_table(type_: Type, rows: Dim, heads: Collection[Axis]) -> bool:
    """Whether an operand has a row for some of the axes of the rows, and a column for each of a head."""
    if len(type_.dims) != 2 or not rows:
        return False
    own, columns = type_.dims
    return all(a.is_free and a in rows for a in own) and len(columns) == 1 and columns[0] in heads
