"""Named axes for torch dims.

A torch tensor has dims in order; our axes have names. A *cell* is a piece of a torch dim that becomes one axis. Each
dim of an input starts as one cell of its own; what the operations say about them is collected as facts: two dims that
meet in an addition are the same, a view of 4096 as 32 x 128 takes a cell apart. Facts only accumulate, so the graph is
walked until nothing new is learnt; then every dim knows the axes it is made of (``translate.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sympy

from coda.pytorch.refusal import Refusal


@dataclass(frozen=True)
class Cell:
    """A piece of a dim. ``size`` is what it is in this graph, ``fixed`` whether the program states it as a number:
    sizes of weights are, the rows of activations are not. A part of another cell remembers where it was cut."""

    key: str
    size: sympy.Expr
    fixed: bool
    parent: Cell | None = None
    start: int = 0


Group = tuple[Cell, ...]
Dims = tuple[Group, ...]


@dataclass(frozen=True)
class Cut:
    """Positions of a dim: those from ``first`` of one ``cell`` as the part ``into``, or only ``first`` where that is
    None; ``group`` is what the dim is then."""

    cell: Cell
    first: int
    into: Cell | None
    group: Group


@dataclass
class Cells:
    """What is known of the cells of a region."""

    facts: dict[str, Group] = field(default_factory=dict)
    tensors: list[Dims] = field(default_factory=list)  # of the inputs: no axis may be in one of them twice
    learnt: bool = False

    def resolve(self, group: Group) -> Group:
        """The cells that a group is made of, as far as known."""
        while any(c.key in self.facts for c in group):
            group = tuple(part for c in group for part in self.facts.get(c.key, (c,)))
        return group

    def resolve_dims(self, dims: Dims) -> Dims:
        return tuple(map(self.resolve, dims))

    def unify(self, one: Group, other: Group) -> bool:
        """Learn that two dims are the same. False where that would put an axis twice into one tensor."""
        a, b = list(self.resolve(one)), list(self.resolve(other))
        while a and b:
            x, y = a[0], b[0]
            if x == y:
                a.pop(0), b.pop(0)
            elif x.size == y.size:
                if not self.equate(x, y):
                    return False
            elif (inner := ratio(x.size, y.size)) is not None:
                self.split(x, (y.size, inner))
            elif (inner := ratio(y.size, x.size)) is not None:
                self.split(y, (x.size, inner))
            else:
                raise Refusal(f"dims of sizes {x.size} and {y.size} meet")
            a, b = list(self.resolve(tuple(a))), list(self.resolve(tuple(b)))
        if a or b:
            raise Refusal(f"a dim of size {total(one)} meets one of size {total(other)}")
        return True

    def equate(self, x: Cell, y: Cell) -> bool:
        """Learn that two cells of one size are the same axis."""
        if not y.fixed and x.fixed:  # a number says more than a symbol
            x, y = y, x
        if any(self._twice(dims, x, y) for dims in self.tensors):
            return False
        self._learn(x, (y,))
        if x.parent is not None and x.parent == y.parent and _are_lanes(x, y):
            count = ratio(x.parent.size, x.size)
            if count is not None and x.parent.key not in self.facts:
                self.split(x.parent, (count, x.size))
        return True

    def _twice(self, dims: Dims, x: Cell, y: Cell) -> bool:
        cells = [c for group in self.resolve_dims(dims) for c in group]
        return x in cells and y in cells

    def split(self, cell: Cell, sizes: Sequence[sympy.Expr]) -> None:
        """Learn that a cell is made of cells of these sizes. A part of a product's columns that splits into heads
        splits the columns, so that the heads are those of the weight."""
        key = f"{cell.key}:{sizes[-1]}"
        parts = tuple(Cell(f"{key}.{i}", sympy.sympify(s), cell.fixed) for i, s in enumerate(sizes))
        self._learn(cell, parts)
        inner = sizes[-1]
        if cell.parent is not None and cell.parent.size % inner == 0 and cell.start % inner == 0:
            known = self.resolve((cell.parent,))
            if len(known) == 1:
                self.split(known[0], (known[0].size / inner, inner))
                known = self.resolve((cell.parent,))
            self.unify((known[-1],), (parts[-1],))

    def cut(self, group: Group, key: str, start: int, stop: int) -> Cut:
        """How positions ``start`` to ``stop`` of a dim are cut out of it; ``key`` names the part."""
        group = self.resolve(group)
        if not group:
            raise Refusal("a dim of size 1 is cut")
        outer, rest = group[0], group[1:]
        inner = int(total(rest))
        if start % inner or stop % inner:
            raise Refusal(f"positions {start}..{stop} cut through groups of {inner}")
        first, count = start // inner, (stop - start) // inner
        if count == 1:
            return Cut(outer, first, None, rest)
        size = sympy.Integer(count)
        into = Cell(f"{key}:{size}", size, outer.fixed, parent=outer, start=first)
        return Cut(outer, first, into, (into, *rest))

    def _learn(self, cell: Cell, group: Group) -> None:
        if any(c.key == cell.key for c in self.resolve(group)):
            raise Refusal(f"a dim of size {cell.size} would be a part of itself")
        self.facts[cell.key] = group
        self.learnt = True


def _are_lanes(x: Cell, y: Cell) -> bool:
    """Whether two cells are whole lanes, like gate and up, of the rows of a weight; not halves of a head."""
    whole = x.parent is not None and ":" not in x.parent.key
    return whole and x.start % x.size == 0 and y.start % y.size == 0 and x.start != y.start


def total(group: Iterable[Cell]) -> sympy.Expr:
    return sympy.Mul(*(c.size for c in group))


def ratio(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """a / b where that is a size, else None."""
    quotient = sympy.cancel(a / b)
    return quotient if sympy.denom(quotient) == 1 and quotient != 1 else None
