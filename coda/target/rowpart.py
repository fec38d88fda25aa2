"""Lower one part of a row kernel: values over the same rows and columns, to a ``RowPart``.

A team of threads owns a row: it holds the row's operands, reduces over the columns as often as the values ask (the
mean, then the variance around it), and stores. What is reduced over rows is left as partials: of each block where the
threads that hold its columns add up their rows; of each row where it is one value for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from coda.dtypes import BF16, F16, F32, I64
from coda.errors import CodaError, Diagnostic
from coda.ir import Axis, Dim, Node, Param, dim_size
from coda.target.loops import Tensor, is_leaf, joined, tensor_of
from coda.target.lower import walk
from coda.target.plan import counted_axes
from coda.target.rowplan import MAX_LEVELS, Access, Partials, Reading, RowPart, Stride, Total, Writing

STORED = (BF16, F16, F32)


def fail(message: str, node: Node | Param | None = None, hint: str | None = None) -> CodaError:
    return CodaError([Diagnostic(message, node.span if node else None, hint)])


def is_reduction(node: Node) -> bool:
    return node.op.startswith("reduce_")


def math(roots: Iterable[Node]) -> list[Node]:
    """What roots are computed from, operands first, with the values that select from tables."""
    roots = list(roots)
    indices = [i for leaf in walk(roots, is_leaf) if is_leaf(leaf) for i in index_of(leaf)]
    return walk([*indices, *roots], is_leaf)


def index_of(leaf: Node) -> list[Node]:
    index = tensor_of(leaf).index
    return [] if index is None else [index]


@dataclass(frozen=True)
class Late:
    """A value that a row does not finish: ``value`` reduced over the rows ``over`` as ``reduction`` says, for each step
    of the rows ``kept``. Where nothing is left to reduce, ``value`` is the reduction."""

    reduction: Node
    value: Node
    over: tuple[Axis, ...]
    kept: tuple[Axis, ...]


class PartLowering:
    """``stored``: values with the tensors they go to; ``late``: what is left as partials, in slots from ``slot`` on;
    the threads of a team share ``columns``, the axis ``family`` or its pieces and what lies in front of them."""

    def __init__(
        self, number: int, stored: Sequence[tuple[Node, Tensor]], late: Sequence[Late], family: frozenset[str],
        columns: frozenset[str], slot: int,
    ):  # fmt: skip
        self.number, self.stored, self.late, self.slot = number, stored, late, slot
        self.roots = [v for v, _ in stored] + [x.value for x in late]
        self.nodes = math(self.roots)
        self.tensors = {n: tensor_of(n) for n in self.nodes if is_leaf(n)}
        self.family, self.columns = family, columns
        self.spaces = self._spaces()
        self.levels, self.fixed = self._levels()
        self.accesses: list[Access] = []

    # ---- rows and columns ----

    def is_over_columns(self, node: Node) -> bool:
        return is_reduction(node) and bool(self.family & set(node.attr("axes")))

    def _all_tensors(self) -> list[Tensor]:
        """What the loops step through: operands, results and partials."""
        partials = [Tensor("", F32, (x.over, x.kept, self._columns_of(x.value))) for x in self.late]
        return [*self.tensors.values(), *(t for _, t in self.stored), *partials]

    def _columns_of(self, node: Node) -> Dim:
        return tuple(a for a in node.type.axes if a.name in self.columns)

    def _spaces(self) -> tuple[Dim, ...]:
        """The column spaces, one for the family and each of its pieces: first what is reduced."""
        values = [n.args[0] for n in self.nodes if self.is_over_columns(n)] + self.nodes
        found = dict.fromkeys(self._columns_of(n) for n in values if n.type.names & self.family)
        return tuple(space for space in found if not any(set(space) < set(other) for other in found)) or ((),)

    def _counted(self) -> list[frozenset[str]]:
        """Axes whose position is a value: loops of their own."""
        return [frozenset(a.name for a in axes) for axes in filter(None, map(counted_axes, self.nodes))]

    def _row_axes(self) -> list[Axis]:
        """All other axes, those that totals keep first, in the order of a result that has them, or of the largest
        value."""
        columns = {a.name for s in self.spaces for a in s} | self.family
        first = [a for x in self.late if self._is_kept_in_blocks(x) for a in x.kept]
        values = sorted((n.type.axes for n in self.nodes), key=lambda axes: -len(axes))
        rows = dict.fromkeys(a for axes in values for a in axes if a.name not in columns)
        stored = [tuple(a for dim in t.dims for a in dim if a in rows) for _, t in self.stored]
        whole = [axes for axes in stored if len(axes) == len(rows)]
        return list(dict.fromkeys([*first, *(whole[0] if whole else rows)]))

    def _levels(self) -> tuple[tuple[Dim, ...], int]:
        """The loops, and how many of them totals keep."""
        levels = joined(self._row_axes(), self._all_tensors(), self._counted())
        if len(levels) > MAX_LEVELS:
            names = ", ".join(" ".join(a.name for a in level) for level in levels)
            raise fail(f"the rows are counted by {len(levels)} loops ({names}); a kernel has up to {MAX_LEVELS}")
        kept = {x.kept: x for x in self.late if self._is_kept_in_blocks(x)}
        if len(kept) > 1:
            raise fail("two reductions keep different rows of one kernel", next(iter(kept.values())).reduction)
        fixed = {a.name for axes in kept for a in axes}
        return levels, sum({a.name for a in level} <= fixed for level in levels)

    def _is_kept_in_blocks(self, late: Late) -> bool:
        """Whether a total of blocks is one for each step of some rows."""
        return self._of_blocks(late) and bool(late.kept)

    def _of_blocks(self, late: Late) -> bool:
        """Whether the rows of a block are reduced in the kernel: columns, or all there is of a value of each row."""
        return late.value is not late.reduction and (bool(self._columns_of(late.value)) or not late.kept)

    def space(self, node: Node) -> int | None:
        """The column space of a value; None for one value of each row."""
        inside = [i for i, s in enumerate(self.spaces) if node.type.names & {a.name for a in s}]
        if len(inside) > 1:
            raise fail("a value over two parts of one axis at once", node)
        return inside[0] if inside else None

    def _row_names(self, node: Node) -> frozenset[str]:
        return node.type.names & {a.name for level in self.levels for a in level}

    # ---- the part ----

    def part(self) -> RowPart:
        stages = self._stages()
        readings = (*(self._reading(n) for n in self.nodes if is_leaf(n)), *self._sizes())
        writings = tuple(self._writing(v, t) for v, t in self.stored)
        totals = []
        for k, late in enumerate(self.late, self.slot):
            if self._of_blocks(late):
                totals.append(self._total(late, k))
            else:
                writings += (self._row_partial(late, k),)
        return RowPart(
            self.levels, self.spaces, tuple(self.accesses), readings, stages, writings, tuple(totals),
            self.fixed,
        )  # fmt: skip

    def partials(self) -> list[Partials]:
        """The slots that the part fills."""
        return [self._partials(late) for late in self.late]

    def _partials(self, late: Late) -> Partials:
        length = dim_size((*late.kept, *self._columns_of(late.value)))
        blocks = self._of_blocks(late)
        count = sympy.Integer(0) if blocks else dim_size(late.over)
        return Partials(self.number, length, count, blocks, blocks and bool(late.kept))

    def _stages(self) -> tuple[tuple[Node, ...], ...]:
        """The reductions over columns by when they are known."""
        stage: dict[Node, int] = {}
        found: list[list[Node]] = []
        for node in self.nodes:
            stage[node] = 0 if is_leaf(node) else max((stage[a] for a in node.args), default=0)
            if self.is_over_columns(node):
                stage[node] += 1
                while len(found) < stage[node]:
                    found.append([])
                found[stage[node] - 1].append(node)
        return tuple(map(tuple, found))

    # ---- tensors ----

    def _add(self, access: Access) -> int:
        if access not in self.accesses:
            self.accesses.append(access)
        return self.accesses.index(access)

    def _space_of(self, node: Node) -> tuple[int | None, Dim | None]:
        space = self.space(node)
        return space, None if space is None else self.spaces[space]

    def _reading(self, leaf: Node) -> Reading:
        tensor, (space, columns) = self.tensors[leaf], self._space_of(leaf)
        index = tensor.index
        if index is not None and (self.space(index) is not None or is_reduction(index)):
            raise fail(
                "a table is read at a position of its own for each column; a kernel takes one for each row", leaf
            )
        varies = bool(self._row_names(leaf)) or index is not None
        return Reading(leaf, self._add(tensor.access(self.levels, columns)), space, varies, index)

    def _writing(self, value: Node, tensor: Tensor) -> Writing:
        if tensor.dtype not in STORED:
            raise fail(f"output '{tensor.arg}' is {tensor.dtype}; this release stores bf16, f16 and f32", value)
        space, columns = self._space_of(value)
        access = tensor.access(self.levels, columns)
        missing = tuple(i for i, stride in enumerate(access.levels) if stride is None)
        return Writing(value, self._add(access), space, missing)

    def _missing(self, value: Node) -> tuple[int, ...]:
        """The levels over which a value is the same."""
        return tuple(i for i, level in enumerate(self.levels) if not value.type.names & {a.name for a in level})

    def _total(self, late: Late, slot: int) -> Total:
        """Partials of each block."""
        access = self._add(Access(None, F32, slot=slot))
        return Total(late.reduction, late.value, access, self.space(late.value), self._missing(late.value))

    def _row_partial(self, late: Late, slot: int) -> Writing:
        """Partials of each row, [over][kept]."""
        order = (*late.over, *late.kept)
        strides: list[Stride | None] = []
        for level in self.levels:
            at = next((i for i, axis in enumerate(order) if axis == level[-1]), None)
            strides.append(None if at is None else Stride(None, dim_size(order[at + 1 :])))
        access = self._add(Access(None, F32, tuple(strides), slot=slot))
        return Writing(late.value, access, None, self._missing(late.value))

    def _sizes(self) -> tuple[Reading, ...]:
        nodes = [n for n in self.nodes if n.op == "size" and not n.attr("expr").is_Integer]
        return tuple(Reading(n, self._add(Access(None, I64, size=n.attr("expr"))), None, False) for n in nodes)
