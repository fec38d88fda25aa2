"""Elements of tensors at symbolic indices, and the arithmetic of what is known of them."""

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


def rule(*names: str) -> Any:
    """Register a function as what ATen operations compute, all overloads: of the elements of tensors, the node, an
    index of its result, and its arguments."""

    def decorate(function: Callable[..., Value]) -> Callable[..., Value]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


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
        return bool(float(a) <= float(b)) if is_number(a) and is_number(b) else None  # type: ignore[arg-type]

    def along(self, x: fx.Node, index: Index, dim: int) -> Callable[[Expr], Value]:
        """A tensor as a function of one of its indices."""
        return lambda i: self.at(x, (*index[:dim], i, *index[dim + 1 :]))


def stored(value: Value, dtype: torch.dtype) -> Value:
    """A value as an element of a tensor of a dtype; None where it cannot be said what becomes of it."""
    if not is_number(value):
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


def is_number(value: Value) -> bool:
    return bool(value.is_Integer) if isinstance(value, Expr) else value is not None


def _number(value: Value) -> float | Expr | None:
    return Integer(value) if isinstance(value, bool) else value


def calculated(compute: Callable[[Any, Any], Any], a: Value, b: Value) -> Value:
    a, b = _number(a), _number(b)
    if a is None or b is None:
        return None
    if isinstance(a, Expr) and isinstance(b, Expr):
        is_affine = compute is not operator.mul or not (a.has(Dummy) and b.has(Dummy))
        return sympy.expand(compute(a, b)) if is_affine else None
    return float(compute(float(a), float(b))) if is_number(a) and is_number(b) else None


def negated(a: Value) -> bool | None:
    return None if a is None else not a


def both(a: Value, b: Value) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True
