"""An element of a tensor of a graph, as far as its position says what it is.

Tensors that are made from positions alone (``arange``, comparisons, views, tables read at positions) are functions of
their indices. ``Elements.at`` evaluates one at symbolic indices, operation by operation: an integer is an expression,
affine in the indices; a bool or a float is a number; and what depends on data is None, not known, as is what follows
from it, but for ``False and`` something not known.

A comparison of integers is decided where it has one outcome in all of a region. An affine function is least and
greatest at corners of a region, so these decide; the sizes in them may be symbols with known bounds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from sympy import Dummy, Expr, Integer
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from coda.pytorch.aten import operation
from coda.pytorch.values import shape_of

DEEPEST = 64  # operations behind each other; longer chains are made of data
LARGEST = 2**31  # numbers in an expression: smaller ones, times sizes, do not overflow 64 bits

Index: TypeAlias = tuple[Expr, ...]
Value: TypeAlias = bool | float | Expr | None  # an index is a Dummy, a size another Symbol
RULES: dict[str, Callable[..., Value]] = {}


@dataclass(frozen=True)
class Region:
    """What lies between corners, each a number or a size for each of some indices."""

    corners: Sequence[dict[Dummy, Expr]]
    sizes: ShapeEnv

    def at_most(self, a: Expr, b: Expr) -> bool | None:
        """Whether a <= b: everywhere, nowhere, or not known."""
        gaps = {sympy.expand((b - a).xreplace(corner)) for corner in self.corners}
        if all(self.is_natural(gap) for gap in gaps):
            return True
        return False if all(self.is_natural(-gap - 1) for gap in gaps) else None

    def is_natural(self, size: Expr) -> bool:
        """Whether a number or a size is known not to be negative."""
        return not size.has(Dummy) and bool(self.sizes.bound_sympy(size).lower >= 0)


@dataclass
class Elements:
    """Elements of tensors in a region. ``operands``: of the inputs of graphs that other graphs call; ``written``: the
    tensors in memory that is written in place."""

    region: Region
    operands: dict[fx.Node, fx.Node] = field(default_factory=dict)
    written: set[fx.Node] = field(default_factory=set)
    known: dict[tuple[fx.Node, Index], Value] = field(default_factory=dict)
    depth: int = 0

    def at(self, x: Any, index: Index) -> Value:
        """An operand at an index of a result: a number, or a tensor, which is broadcast."""
        if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), Tensor):
            return self.number(x)
        shape = shape_of(x)
        index = index[len(index) - len(shape) :]
        key = x, tuple(Integer(0) if size == 1 else i for i, size in zip(index, shape, strict=True))
        if key not in self.known:
            self.depth += 1
            self.known[key] = self._read(*key) if self.depth <= DEEPEST else None
            self.depth -= 1
        return self.known[key]

    def _read(self, node: fx.Node, index: Index) -> Value:
        if node in self.written:
            return None
        if node in self.operands:
            return self.at(self.operands[node], index)
        compute = RULES.get(operation(node)) if isinstance(node.target, OpOverload) else None
        if compute is None:
            return None
        return stored(compute(self, node, index, *node.args, **node.kwargs), node.meta["val"].dtype)

    def number(self, x: Any) -> Value:
        """A number in the arguments of an operation."""
        value = x.meta.get("val") if isinstance(x, fx.Node) else x
        if isinstance(value, torch.SymInt):
            size: Expr = value.node.expr
            return size
        if isinstance(value, (bool, float)):
            return value if value == value else None  # not a NaN
        return Integer(value) if isinstance(value, int) else None

    def at_most(self, a: Value, b: Value) -> bool | None:
        """Whether a <= b."""
        a, b = _number(a), _number(b)
        if isinstance(a, Expr) and isinstance(b, Expr):
            return self.region.at_most(a, b)
        return bool(float(a) <= float(b)) if _is_number(a) and _is_number(b) else None  # type: ignore[arg-type]

    def along(self, x: fx.Node, index: Index, dim: int) -> Callable[[Expr], Value]:
        """A tensor as a function of one of its indices."""
        return lambda i: self.at(x, (*index[:dim], i, *index[dim + 1 :]))


def stored(value: Value, dtype: torch.dtype) -> Value:
    """A value as an element of a tensor of a dtype; None where it cannot be said what becomes of it."""
    if not _is_number(value):
        return value if isinstance(value, Expr) and dtype is torch.int64 and _is_small(value) else None
    if dtype is torch.bool:
        return bool(value != 0)
    if dtype.is_floating_point:
        rounded = float(torch.tensor(float(value), dtype=torch.float64, device="cpu").to(dtype))  # type: ignore[arg-type]
        return None if rounded != rounded else rounded
    if isinstance(value, float) and not value.is_integer():
        return None
    whole = Integer(int(value))  # type: ignore[arg-type]
    return whole if 0 <= whole < 128 or (dtype is torch.int64 and _is_small(whole)) else None


def _is_small(expr: Expr) -> bool:
    return all(abs(number) < LARGEST for number in expr.atoms(Integer))


def _is_number(value: Value) -> bool:
    return bool(value.is_Integer) if isinstance(value, Expr) else value is not None


def _number(value: Value) -> float | Expr | None:
    return Integer(value) if isinstance(value, bool) else value


def _calculated(compute: Callable[[Any, Any], Any], a: Value, b: Value) -> Value:
    a, b = _number(a), _number(b)
    if a is None or b is None:
        return None
    if isinstance(a, Expr) and isinstance(b, Expr):
        is_affine = compute is not operator.mul or not (a.has(Dummy) and b.has(Dummy))
        return sympy.expand(compute(a, b)) if is_affine else None
    return float(compute(float(a), float(b))) if _is_number(a) and _is_number(b) else None


def _not(a: Value) -> bool | None:
    return None if a is None else not a


def _and(a: Value, b: Value) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


# What operations compute: at an index of the result of a node, from its arguments.


def rule(*names: str) -> Any:
    """Register a function as what ATen operations compute, all overloads."""

    def decorate(function: Callable[..., Value]) -> Callable[..., Value]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


@rule("arange")
def arange(e: Elements, node: fx.Node, index: Index, *bounds: Any, **_: Any) -> Value:
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    return _calculated(operator.add, e.number(start), _calculated(operator.mul, e.number(step), index[0]))


@rule("zeros", "zeros_like", "new_zeros")
def zeros(*_: Any, **__: Any) -> Value:
    return Integer(0)


@rule("ones", "ones_like", "new_ones")
def ones(*_: Any, **__: Any) -> Value:
    return Integer(1)


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
    step = _calculated(operator.sub, at(i), at(i - 1))
    if n != 1 or last is not None or not _is_number(step):
        return None
    if first is not None:  # what stands before the rest
        start = e.along(first, index, dim)(Integer(0)) if shape_of(first)[dim] == 1 else None
        return step if _calculated(operator.sub, at(Integer(0)), start) == step else None
    return step


@rule("cumsum")
def cumsum(e: Elements, node: fx.Node, index: Index, x: fx.Node, dim: int, **_: Any) -> Value:
    """Known where all that is added is one number."""
    dim %= len(index)
    each = e.along(x, index, dim)(Dummy(integer=True))
    return _calculated(operator.mul, each, index[dim] + 1) if _is_number(each) else None


def _pair(e: Elements, index: Index, a: Any, b: Any) -> tuple[Value, Value]:
    """The elements of two operands. Floats are as they are in the dtype that both are converted to, as kernels differ
    in where they round a number: then the result of one operation is known."""
    found = e.at(a, index), e.at(b, index)
    if not all(map(_is_number, found)):
        return found
    values = (x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b))
    dtype = torch.result_type(*(1 if isinstance(v, torch.SymInt) else v for v in values))
    is_same = not dtype.is_floating_point or all(stored(v, dtype) == float(v) for v in found)  # type: ignore[arg-type]
    return found if is_same else (None, None)


CALCULATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
}


@rule(*CALCULATIONS)
def calculate(e: Elements, node: fx.Node, index: Index, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _calculated(CALCULATIONS[operation(node)], *_pair(e, index, a, b)) if alpha == 1 else None


@rule("neg")
def neg(e: Elements, node: fx.Node, index: Index, a: Any) -> Value:
    return _calculated(operator.mul, Integer(-1), e.at(a, index))


COMPARISONS: dict[str, Callable[[Elements, Value, Value], bool | None]] = {
    "le": lambda e, a, b: e.at_most(a, b),
    "ge": lambda e, a, b: e.at_most(b, a),
    "gt": lambda e, a, b: _not(e.at_most(a, b)),
    "lt": lambda e, a, b: _not(e.at_most(b, a)),
    "eq": lambda e, a, b: _and(e.at_most(a, b), e.at_most(b, a)),
    "ne": lambda e, a, b: _not(_and(e.at_most(a, b), e.at_most(b, a))),
}


@rule(*COMPARISONS)
def compare(e: Elements, node: fx.Node, index: Index, a: Any, b: Any) -> Value:
    return COMPARISONS[operation(node)](e, *_pair(e, index, a, b))


@rule("__and__", "bitwise_and", "logical_and")
def and_(e: Elements, node: fx.Node, index: Index, a: Any, b: Any) -> Value:
    return _and(_truth(e, node, index, a), _truth(e, node, index, b))


@rule("__or__", "bitwise_or", "logical_or")
def or_(e: Elements, node: fx.Node, index: Index, a: Any, b: Any) -> Value:
    return _not(_and(_not(_truth(e, node, index, a)), _not(_truth(e, node, index, b))))


@rule("bitwise_not", "logical_not")
def not_(e: Elements, node: fx.Node, index: Index, a: Any) -> Value:
    return _not(_truth(e, node, index, a))


def _truth(e: Elements, node: fx.Node, index: Index, x: Any) -> bool | None:
    """An operand of a logical operation; None of one on the bits of integers."""
    value = e.at(x, index)
    return bool(value != 0) if node.meta["val"].dtype is torch.bool and _is_number(value) else None


@rule("where")
def where(e: Elements, node: fx.Node, index: Index, condition: fx.Node, a: Any, b: Any) -> Value:
    return _chosen(node, e.at(condition, index), e.at(a, index), e.at(b, index))


@rule("masked_fill")
def masked_fill(e: Elements, node: fx.Node, index: Index, x: fx.Node, condition: fx.Node, value: Any) -> Value:
    return _chosen(node, e.at(condition, index), e.at(value, index), e.at(x, index))


@rule("tril")
def tril(e: Elements, node: fx.Node, index: Index, x: fx.Node, diagonal: Any = 0) -> Value:
    edge = _calculated(operator.add, index[-2], e.number(diagonal))
    return _chosen(node, e.at_most(index[-1], edge), e.at(x, index), Integer(0))


@rule("triu")
def triu(e: Elements, node: fx.Node, index: Index, x: fx.Node, diagonal: Any = 0) -> Value:
    edge = _calculated(operator.add, index[-2], e.number(diagonal))
    return _chosen(node, e.at_most(edge, index[-1]), e.at(x, index), Integer(0))


def _chosen(node: fx.Node, condition: Value, a: Value, b: Value) -> Value:
    """One of two. Of floats both are known: one that is not may have a gradient, of zeros."""
    if node.meta["val"].dtype.is_floating_point and (a is None or b is None):
        return None
    if condition is None:
        return a if a == b else None
    return a if condition else b
