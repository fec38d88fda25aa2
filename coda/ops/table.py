"""What an operation is: one record, from which typing, reference, derivative, printing and C++ follow.

Adding a pointwise operation is one entry in ``coda/ops/pointwise.py``; CONTRIBUTING.md shows it. The families
register into one table; ``build`` makes a typed node, ``rebuild`` re-makes one over new operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coda.dtypes import BOOL, F32, I64, DType
from coda.errors import Span
from coda.ir import Dim, Node, Type, intern


class OpError(Exception):
    """An operation refuses its operands. The checker adds the place in the source."""

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass(frozen=True)
class Op:
    """An operation.

    ``arity``: number of operands, None when any. ``infer(types, attrs)`` gives the result type or raises OpError.
    ``torch(context, node, *tensors)`` is the reference: operands and result carry the axes of their node's type, in
    that order. ``cpp`` is the C++ expression over operands ``{0}``, ``{1}`` (None: lowered structurally), which are
    converted to the arithmetic type of the result, or of ``operands`` where that is given.
    ``derivative`` has one program text for each operand, over ``a``, ``b``, ``c`` (operands), ``y`` (result) and
    ``dy``; None where the operand gets no gradient. ``symbol`` is the infix or prefix spelling; ``surface`` says
    whether a program may call it by name.
    """

    name: str
    arity: int | None
    infer: Callable[[Sequence[Type], dict[str, Any]], Type]
    torch: Callable[..., Any]
    doc: str
    cpp: str | None = None
    derivative: tuple[str | None, ...] | None = None
    symbol: str | None = None
    surface: bool = True
    family: str = "pointwise"
    operands: DType | None = None


OPS: dict[str, Op] = {}
FINISH = "finish"  # the only operation that reads partial results


def register(op: Op) -> Op:
    if op.name in OPS:
        raise ValueError(f"operation {op.name!r} is registered twice")
    OPS[op.name] = op
    return op


def build(op: str, *args: Node, span: Span | None = None, **attrs: Any) -> Node:
    """A node of the table's operation; its type is inferred. Raises OpError with a sentence when it cannot be."""
    record = OPS[op]
    if record.arity is not None and len(args) != record.arity:
        raise OpError(f"'{op}' takes {record.arity} operand{'s' * (record.arity != 1)}, got {len(args)}")
    if op != FINISH and any(a.type.partial for a in args):
        raise OpError("partial results are finished before they are used", "write finish(...) around them")
    result = record.infer([a.type for a in args], attrs)
    if len(result.names) != len(result.axes):
        names = [a.name for a in result.axes]
        twice = next(n for n in names if names.count(n) > 1)
        raise OpError(f"the result would have axis '{twice}' twice", "rename it in one of the operands")
    return intern(op, args, attrs, result, span)


def rebuild(node: Node, args: Sequence[Node]) -> Node:
    """The same operation over other operands (leaves are kept as they are)."""
    if not node.args:
        return node
    if tuple(args) == node.args:
        return node
    return build(node.op, *args, span=node.span, **dict(node.attrs))


def broadcast(types: Sequence[Type]) -> tuple[Dim, ...]:
    """The dims of an elementwise result: those of the operand with most axes, then the axes it lacks, each a dim.

    Raises OpError where one axis name has two sizes.
    """
    seen: dict[str, Any] = {}
    for t in types:
        for axis in t.axes:
            if axis.name in seen and seen[axis.name] != axis.size:
                raise OpError(
                    f"axis '{axis.name}' has size {seen[axis.name]} in one operand and {axis.size} in the other",
                    "axes broadcast by name, so equal names need equal sizes; rename one of the axes",
                )
            seen[axis.name] = axis.size
    if not types:
        return ()
    primary = max(types, key=lambda t: len(t.axes))
    dims = list(primary.dims)
    have = {a.name for a in primary.axes}
    for t in types:
        for axis in t.axes:
            if axis.name not in have:
                have.add(axis.name)
                dims.append((axis,))
    return tuple(dims)


def arithmetic_dtype(types: Sequence[Type]) -> DType:
    """f32 as soon as a float or bool takes part, else the integer type (i64 where they differ)."""
    ints = [t.dtype for t in types if t.dtype.kind == "int"]
    if len(ints) < len(types):
        return F32
    return ints[0] if all(d == ints[0] for d in ints) else I64


def infer_arithmetic(types: Sequence[Type], attrs: dict) -> Type:
    return Type(arithmetic_dtype(types), broadcast(types))


def infer_float(types: Sequence[Type], attrs: dict) -> Type:
    return Type(F32, broadcast(types))


def infer_bool(types: Sequence[Type], attrs: dict) -> Type:
    return Type(BOOL, broadcast(types))
