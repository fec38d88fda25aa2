"""Rounding as eager PyTorch rounds: the program of ``numerics = "eager"``.

In our language arithmetic between casts is f32. Eager PyTorch stores every intermediate tensor, so each operation
rounds to the dtype that torch's type promotion gives its result. This pass makes those roundings visible casts; the
result is an ordinary program, and interpreting it in f32 gives eager's bits wherever sums are exact.

The rules, all torch's own:

* An elementwise result has the promoted dtype of the operands *with dims*; a 0-dim tensor or a Python number takes
  part only where it is of a higher kind (bool < int < float). It is not rounded itself: CUDA takes Python numbers in
  f32; the CPU does in some operations and operand orders only.
* A product rounds to its operands' dtype, except that a product plus a bias vector of that dtype is one operation
  with one rounding, as in ``F.linear`` and ``addmm``. Eager torch has no arithmetic in fp8: nothing is rounded to it.
* An activation (gelu, silu) is one operation, a reduction is one operation; both compute in f32 and round once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from coda.dtypes import BOOL, F32, I64, DType
from coda.ir import Node, Program, rewrite
from coda.ops import OPS, build

_KINDS = ("bool", "int", "float")
_KEEPS_OPERAND_DTYPE = {"gather", "pick", "slice", "part", "transpose", "layout", "default"}


class Rank(IntEnum):
    """torch's three categories of operands in type promotion."""

    NUMBER = 0
    SCALAR = 1  # a 0-dim tensor
    TENSOR = 2


@dataclass(frozen=True)
class Eager:
    """What a value would be in eager PyTorch."""

    dtype: DType
    rank: Rank


def round_as_eager(program: Program) -> Program:
    """The same program with a cast wherever eager PyTorch rounds. Idempotent."""
    eager: dict[Node, Eager] = {}
    fused = _biased_products(program)

    def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
        eager[node] = _eager(node, [eager[a] for a in node.args])
        if node.op == "partial" or _is_void_cast(node, args):  # eager reductions are finished
            return args[0]
        if node in fused or not _rounds(node, eager[node].dtype):
            return None
        new = build(node.op, *args, span=node.span, **dict(node.attrs)) if args else node
        return _cast(new, eager[node].dtype)

    rounded = rewrite(program, visit)
    types = {o: o.type.with_dtype(o.type.dtype) for o in rounded.outputs}  # of finished values
    return rounded.with_outputs(replace(o, value=_cast(o.value, t.dtype), type=t) for o, t in types.items())


def _is_void_cast(node: Node, args: tuple[Node, ...]) -> bool:
    """A cast to the dtype its new operand already has."""
    return node.op == "cast" and not node.attr("saturate") and args[0].dtype == node.dtype


def _rounds(node: Node, dtype: DType) -> bool:
    """Whether eager stores the result of this operation in less than f32."""
    if node.op == "cast" or OPS[node.op].family in ("structure", "index", "call"):
        return False
    return dtype.kind == "float" and dtype.bits == 16


def _cast(value: Node, dtype: DType) -> Node:
    return value if value.dtype == dtype else build("cast", value, span=value.span, dtype=dtype, saturate=False)


def _eager(node: Node, args: Sequence[Eager]) -> Eager:
    """The eager dtype and rank of a node's result."""
    rank = Rank.TENSOR if node.type.dims else max((a.rank for a in args), default=Rank.SCALAR)
    if node.op in ("const", "size"):
        return Eager(node.dtype, Rank.NUMBER)
    if not args or node.op in ("cast", "call") or node.dtype == BOOL:
        return Eager(node.dtype, rank)
    if node.op in _KEEPS_OPERAND_DTYPE or node.op == "dot":
        dtype = args[0].dtype
        return Eager(F32 if node.op == "dot" and dtype.bits == 8 else dtype, rank)
    promoted = promote(args[1:] if node.op == "where" else args)
    return Eager(promoted if node.dtype.kind == promoted.kind else node.dtype, rank)


def promote(operands: Sequence[Eager]) -> DType:
    """torch.result_type: the operands of highest rank decide, unless a lower rank has a higher kind."""
    result: DType | None = None
    for rank in sorted(Rank, reverse=True):
        dtypes = [o.dtype for o in operands if o.rank == rank]
        if not dtypes:
            continue
        own = dtypes[0]
        for dtype in dtypes[1:]:
            own = _promote_two(own, dtype)
        if result is None or _KINDS.index(own.kind) > _KINDS.index(result.kind):
            result = own
    if result is None:
        raise ValueError("an operation without operands has no promoted dtype")
    return F32 if result.kind == "float" and result.bits == 8 else result


def _promote_two(a: DType, b: DType) -> DType:
    """torch.promote_types on the language's dtypes: two different floats give f32, two different ints the wider."""
    if a == b:
        return a
    if a.kind != b.kind:
        return max(a, b, key=lambda d: _KINDS.index(d.kind))
    if a.kind == "float":
        return F32
    return max(a, b, key=lambda d: d.bits) if a.kind == "int" else I64


def _biased_products(program: Program) -> set[Node]:
    """Products whose only reader adds a vector over their columns, in their operands' dtype: F.linear with a bias."""
    users = program.users()
    stored = {o.value for o in program.outputs}
    fused = set()
    for node in program.nodes():
        if node.op != "dot" or node in stored or len(users[node]) != 1 or users[node][0].op != "add":
            continue
        (add,) = users[node]
        other = add.args[1] if add.args[0] is node else add.args[0]
        bias = other.args[0] if other.op == "default" else other
        if bias.op == "input" and bias.dtype == node.args[0].dtype and node.type.dims[1:] == (bias.type.axes,):
            fused.add(node)
    return fused
