"""What ATen operations compute at an index of their result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sympy import Dummy, Expr, Integer
from torch import Tensor, fx

from coda.pytorch.aten import operation
from coda.pytorch.elements.evaluate import Elements, Index, Value, both, calculated, is_number, negated, rule, stored
from coda.pytorch.values import shape_of


@rule("arange")
def arange(e: Elements, node: fx.Node, index: Index, *bounds: Any, **_: Any) -> Value:
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    return calculated(operator.add, e.number(start), calculated(operator.mul, e.number(step), index[0]))


@rule("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones")
def zeros_or_ones(e: Elements, node: fx.Node, index: Index, *_: Any, **__: Any) -> Value:
    return Integer("ones" in operation(node))


@rule("scalar_tensor", "full", "full_like", "new_full")
def full(e: Elements, node: fx.Node, index: Index, *args: Any, **_: Any) -> Value:
    return e.number(args[-1])


@rule("alias", "clone", "detach", "contiguous", "to", "_to_copy", "type_as")
def same(e: Elements, node: fx.Node, index: Index, x: fx.Node, *_: Any, **__: Any) -> Value:
    return e.at(x, index)


@rule("lift_fresh", "lift_fresh_copy")
def literal(e: Elements, node: fx.Node, index: Index, x: fx.Node) -> Value:
    """``torch.tensor(number)``."""
    tensor = getattr(node.graph.owning_module, str(x.target), None) if x.op == "get_attr" else None
    return e.number(tensor.item()) if tensor is not None and type(tensor) is Tensor and tensor.numel() == 1 else None


@rule("expand", "expand_as", "repeat")
def expand(e: Elements, node: fx.Node, index: Index, x: fx.Node, *_: Any, **__: Any) -> Value:
    sizes = zip(reversed(shape_of(x)), reversed(shape_of(node)), strict=False)
    return e.at(x, index) if all(before in (1, after) for before, after in sizes) else None


@rule("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "flatten")
def view(e: Elements, node: fx.Node, index: Index, x: fx.Node, *_: Any) -> Value:
    """Dims of size 1 come and go."""
    kept = [(size, i) for size, i in zip(shape_of(node), index, strict=True) if size != 1]
    if [size for size, _ in kept] != [size for size in shape_of(x) if size != 1]:
        return None
    rest = (i for _, i in kept)
    return e.at(x, tuple(Integer(0) if size == 1 else next(rest) for size in shape_of(x)))


@rule("permute")
def permute(e: Elements, node: fx.Node, index: Index, x: fx.Node, order: Sequence[int]) -> Value:
    dims = [dim % len(order) for dim in order]
    return e.at(x, tuple(index[dims.index(dim)] for dim in range(len(dims))))


@rule("transpose", "t")
def transpose(e: Elements, node: fx.Node, index: Index, x: fx.Node, first: int = 0, second: int = -1) -> Value:
    turned = list(index)
    turned[first], turned[second] = turned[second], turned[first]
    return e.at(x, tuple(turned))


@rule("slice")
def slice_(
    e: Elements, node: fx.Node, index: Index, x: fx.Node, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> Value:
    dim %= len(index)
    first = _from_start(e, x, dim, start or 0)
    return None if first is None else e.along(x, index, dim)(first + index[dim] * step)


@rule("select")
def select(e: Elements, node: fx.Node, index: Index, x: fx.Node, dim: int, position: Any) -> Value:
    dim %= len(index) + 1
    first = _from_start(e, x, dim, position)
    return None if first is None else e.at(x, (*index[:dim], first, *index[dim:]))


def _from_start(e: Elements, x: fx.Node, dim: int, position: Any) -> Expr | None:
    """A position along a dim, which counts from the end if it is negative."""
    found = e.number(position)
    if isinstance(found, Integer) and found < 0:
        found += shape_of(x)[dim]
    return found if isinstance(found, Expr) and e.region.is_natural(found) else None


@rule("index")
def index_(e: Elements, node: fx.Node, index: Index, x: fx.Node, positions: Sequence[fx.Node | None]) -> Value:
    """A table read at positions along some dims, one behind the other."""
    first = next(i for i, p in enumerate(positions) if p is not None)
    last = len(index) - len(shape_of(x)) + len(positions)
    if any(p is None or p.meta["val"].dtype is not torch.int64 for p in positions[first:]):
        return None
    found = [e.at(p, index[first:last]) for p in positions[first:]]
    sizes = shape_of(x)[first:]
    if not all(e.at_most(Integer(0), at) and e.at_most(at, size - 1) for at, size in zip(found, sizes, strict=False)):
        return None  # a negative one counts from the end
    return e.at(x, (*index[:first], *found, *index[last:]))


@rule("diff")
def diff(
    e: Elements, node: fx.Node, index: Index, x: fx.Node, n: int = 1, dim: int = -1, first: Any = None, last: Any = None
) -> Value:
    """Known where neighbours differ by one number everywhere."""
    dim %= len(index)
    i, at = Dummy(integer=True), e.along(x, index, dim)
    step = calculated(operator.sub, at(i), at(i - 1))
    if n != 1 or last is not None or not is_number(step):
        return None
    if first is not None:  # what stands before the rest
        start = e.along(first, index, dim)(Integer(0)) if shape_of(first)[dim] == 1 else None
        return step if calculated(operator.sub, at(Integer(0)), start) == step else None
    return step


@rule("cumsum")
def cumsum(e: Elements, node: fx.Node, index: Index, x: fx.Node, dim: int, **_: Any) -> Value:
    """Known where all that is added is one number."""
    dim %= len(index)
    each = e.along(x, index, dim)(Dummy(integer=True))
    return calculated(operator.mul, each, index[dim] + 1) if is_number(each) else None


def _pair(e: Elements, index: Index, a: Any, b: Any) -> tuple[Value, Value]:
    """The elements of two operands. Numbers that the dtype of both does not have are not known: kernels differ in where
    they round these."""
    found = e.at(a, index), e.at(b, index)
    if not all(map(is_number, found)):
        return found
    values = (x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b))
    dtype = torch.result_type(*(1 if isinstance(v, torch.SymInt) else v for v in values))
    there = [stored(v, dtype) for v in found]
    is_exact = all(t is not None and float(t) == float(v) for t, v in zip(there, found, strict=True))  # type: ignore[arg-type]
    return found if is_exact else (None, None)


CALCULATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
}


@rule(*CALCULATIONS)
def calculate(e: Elements, node: fx.Node, index: Index, a: Any, b: Any, alpha: Any = 1) -> Value:
    return calculated(CALCULATIONS[operation(node)], *_pair(e, index, a, b)) if alpha == 1 else None


@rule("neg")
def neg(e: Elements, node: fx.Node, index: Index, a: Any) -> Value:
    return calculated(operator.mul, Integer(-1), e.at(a, index))


COMPARISONS: dict[str, Callable[[Elements, Value, Value], bool | None]] = {
    "le": lambda e, a, b: e.at_most(a, b),
    "ge": lambda e, a, b: e.at_most(b, a),
    "gt": lambda e, a, b: negated(e.at_most(a, b)),
    "lt": lambda e, a, b: negated(e.at_most(b, a)),
    "eq": lambda e, a, b: both(e.at_most(a, b), e.at_most(b, a)),
    "ne": lambda e, a, b: negated(both(e.at_most(a, b), e.at_most(b, a))),
}


@rule(*COMPARISONS)
def compare(e: Elements, node: fx.Node, index: Index, a: Any, b: Any) -> Value:
    return COMPARISONS[operation(node)](e, *_pair(e, index, a, b))


LOGIC: dict[str, Callable[..., bool | None]] = {
    "and": both,
    "or": lambda a, b: negated(both(negated(a), negated(b))),
    "not": negated,
}


@rule(*(name.format(what) for what in LOGIC for name in ("__{}__", "bitwise_{}", "logical_{}")))
def logic(e: Elements, node: fx.Node, index: Index, *operands: Any) -> Value:
    what = operation(node).strip("_").split("_")[-1]
    return LOGIC[what](*(_truth(e, node, index, x) for x in operands))


def _truth(e: Elements, node: fx.Node, index: Index, x: Any) -> bool | None:
    """An operand of a logical operation; None of one on the bits of integers."""
    value = e.at(x, index)
    return bool(value != 0) if node.meta["val"].dtype is torch.bool and is_number(value) else None


@rule("where")
def where(e: Elements, node: fx.Node, index: Index, condition: fx.Node, a: Any, b: Any) -> Value:
    return _chosen(node, e.at(condition, index), e.at(a, index), e.at(b, index))


@rule("masked_fill")
def masked_fill(e: Elements, node: fx.Node, index: Index, x: fx.Node, condition: fx.Node, value: Any) -> Value:
    return _chosen(node, e.at(condition, index), e.at(value, index), e.at(x, index))


@rule("tril", "triu")
def triangle(e: Elements, node: fx.Node, index: Index, x: fx.Node, diagonal: Any = 0) -> Value:
    edge = calculated(operator.add, index[-2], e.number(diagonal))
    is_kept = e.at_most(index[-1], edge) if operation(node) == "tril" else e.at_most(edge, index[-1])
    return _chosen(node, is_kept, e.at(x, index), Integer(0))


def _chosen(node: fx.Node, condition: Value, a: Value, b: Value) -> Value:
    """One of two. Of floats both are known: one that is not may have a gradient, of zeros."""
    if node.meta["val"].dtype.is_floating_point and (a is None or b is None):
        return None
    if condition is None:
        return a if a == b else None
    return a if condition else b
