"""Factors of whole rows move behind the product: ``(r * x * g) @ w`` becomes ``r * ((x * g) @ w)``.

This is what makes a norm free. ``r`` is a statistic of the whole row, so a kernel that makes ``x`` tile by tile does
not know it; behind the product it is one multiplication in the next kernel's epilogue. The pass knows nothing of norms:
it takes the operands of products apart (``terms.py``), by the axes over which their factors vary, on both sides of
``@``. So it also moves the scales of a quantised weight, and ``dy.T @ (h * g)`` becomes ``(dy.T @ h) * g``.

A factor moves only where it helps: where the tile comes from memory, or from a product on which the factor depends.
It is refused where the whole matrix is needed anyway (it is returned, or something else than a product reads it):
computing it twice would be a silent cost. And in training where the result of the product is returned, over many more
columns than the matrix has, as logits are: the factor belongs to the gradient of the result, too, and so does the sum
that is the factor's own gradient. Where a kernel makes that gradient its epilogue has both for nothing; one that comes
from outside would be read, scaled and written for them.

``layer_norm`` leaves terms without a tile, ``row * (column @ w)``: column sums of the weight, worth it where these are
known ahead, for a frozen weight:

    layer_norm(x, g, b) @ w.T = r * (x @ wg.T - mean * sum(wg, D)) + sum(w * b, D)      with wg = w * g rounded

Since x is not centred, its error is that of the plain product times up to |mean| / std; the sums are taken of the
rounded wg, so that a constant row cancels as well as f32 sums do. In training LayerNorm is a row kernel.

Label: algebraic. The rounding before ``@`` moves from the normalised value to ``x * g``; no other operation changes.
``numerics="eager"`` rounds where eager PyTorch rounds, so there nothing moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coda.dtypes import F16
from coda.ir import Node, Program, dim_size, rewrite, topological
from coda.ops import build
from coda.passes.axes import add_all, conform
from coda.passes.labels import Label, Note, note
from coda.passes.naming import source_name
from coda.passes.terms import Term, is_rounding, multiply, rounded, scaled_weight, separate

NAME = "delay_norm"
WIDE = 4  # times the columns of the operand: over these, scaling costs more than a norm that stays


def delay_norm(program: Program, numerics: str = "fused", trained: bool = False) -> tuple[Program, tuple[Note, ...]]:
    """The program with row factors behind the products, and for each product what moved or why nothing did.
    ``trained``: gradients will be derived."""
    delay = _Delay(program, numerics, trained)
    moved = rewrite(program, lambda node, args: delay.product(node, args) if node.op == "dot" else None)
    return replace(moved, names=(*moved.names, *delay.names.items())), tuple(delay.notes)


def delayed_operands(program: Program, numerics: str = "fused") -> dict[Node, tuple[Node, ...]]:
    """What each product of a program reads once row factors have moved behind it."""
    delay = _Delay(program, numerics)
    rewrite(program, lambda node, args: delay.product(node, args) if node.op == "dot" else None)
    return delay.operands


@dataclass(frozen=True)
class _Side:
    """One operand of a product, taken apart: ``main`` is the term with a tile, ``others`` have none."""

    index: int  # 0: left, 1: right
    outer: frozenset[str]  # the names of its axes in the result
    main: Term
    tile: Node
    others: tuple[Term, ...]
    inside: frozenset[Node]  # the operations that disappear when the row factors leave

    @classmethod
    def of(cls, dot: Node, index: int) -> _Side | None:
        """None where no row factor would leave, or there is not exactly one tile."""
        value, peeled = dot.args[index], set()
        contracted = frozenset(a.name for a in value.type.dims[-2 if index else -1])
        batch = frozenset(a.name for dim in value.type.dims[:-2] for a in dim)  # what varies over it alone is a number
        outer, inner = value.type.names - contracted, contracted | batch
        while value.op in ("transpose", "layout") or (value.op == "cast" and is_rounding(value)):
            peeled.add(value)
            (value,) = value.args
        found = separate(value, outer, inner)
        tiles = [t for t in found.terms if t.tile is not None]
        if len(tiles) != 1 or tiles[0].tile is None or not found.has_row:
            return None
        others = tuple(t for t in found.terms if t.tile is None)
        return cls(index, outer, tiles[0], tiles[0].tile, others, frozenset(found.inside | peeled))

    @property
    def rows(self) -> list[Node]:
        return [t.row for t in (self.main, *self.others) if t.row is not None]


class _Delay:
    """The decisions, which look at the program as it is, and the rewrite of one product at a time."""

    def __init__(self, program: Program, numerics: str, trained: bool = False):
        self.program, self.numerics, self.trained = program, numerics, trained
        self.users, self.stored = program.users(), {o.value for o in program.outputs}
        self.frozen = {p.name for p in program.params if p.frozen}
        self.called = dict(program.names)
        self.names: dict[Node, str] = {}
        self.operands: dict[Node, tuple[Node, ...]] = {}  # of each product, as it is written then
        self.notes: list[Note] = []

    def product(self, node: Node, args: tuple[Node, ...]) -> Node:
        """A product of the program over its new operands, with the row factors of either side behind it."""
        dot = build("dot", *args, span=node.span)
        scales: list[Node] = []
        shifts: list[Node] = []
        for index in (0, 1):
            if self.decide(node, _Side.of(node, index)) and (side := _Side.of(dot, index)):
                scales += [side.main.row] if side.main.row is not None else []
                shifts += _shifts(dot, side)
                dot = _without_rows(dot, side)
        self.names |= {n: "r" for n in scales if n not in self.called}
        self.operands[node] = dot.args
        return add_all([multiply(*scales, dot), *shifts])

    def decide(self, node: Node, side: _Side | None) -> bool:
        """Whether the row factors of one side of a product move; what was decided is noted."""
        if side is None or not _would_help(side):
            return False
        which = source_name(node.args[side.index], self.called) or ("right operand" if side.index else "left operand")
        if refusal := self.refusal(node, side):
            self.notes.append(note(NAME, f"'{which}' is scaled before the product: {refusal}", None, node))
            return False
        moved = f"'{which}' is rounded without its row factor"
        if side.others:
            moved = f"{moved} and mean; the error grows like |mean| / std"
        self.notes.append(note(NAME, f"a row factor of '{which}' is behind the product", Label(moved), node))
        return True

    def refusal(self, node: Node, side: _Side) -> str | None:
        """Why row factors that would help must stay, as a clause; None if they may move."""
        if self.numerics == "eager":
            return "numerics=eager rounds where eager PyTorch rounds"
        if escape := self.escape(node, side):
            return escape
        if self.trained and not side.index and _is_wide(node) and self.is_returned(node):
            return f"the gradient of what it makes comes from outside, over more than {WIDE} times as many columns"
        if side.others and (side.index or not self.is_frozen(node.args[1])):
            return "it is shifted, too, and column sums of a weight are worth it only where the weight is frozen"
        if node.args[side.index].dtype == F16 and side.main.column is not None:
            return "without it the value could leave the range of f16"
        return None

    def escape(self, node: Node, side: _Side) -> str | None:
        """Who else needs the scaled matrix."""
        for n in self.program.nodes():
            if n not in side.inside:
                continue
            if n in self.stored:
                return "it is returned as well"
            for user in self.users[n]:
                is_operand = user.op == "dot" and user.args[side.index] is n and user.args[1 - side.index] is not n
                if user not in side.inside and not is_operand and not self.feeds_statistic(user, side):
                    return f"'{user.op}' needs it as well"
        return None

    def is_returned(self, product: Node) -> bool:
        """Whether a tensor over the rows and columns of a product is returned, with no other product in between."""
        pending, names = [product], product.type.names
        while pending:
            n = pending.pop()
            if n in self.stored and names <= n.type.names:
                return True
            pending += [user for user in self.users[n] if user.op != "dot"]
        return False

    def feeds_statistic(self, user: Node, side: _Side) -> bool:
        """Whether a value only serves to compute statistics of rows, as the squares of x - mean do."""
        pending, outer = [user], side.outer
        while pending:
            n = pending.pop()
            if n.type.names <= outer:
                continue
            if n in self.stored or n.op == "dot" or not self.users[n]:
                return False
            pending += self.users[n]
        return True

    def is_frozen(self, value: Node) -> bool:
        """Whether a value is made of frozen weights alone."""
        read = {n.attr("name") for n in topological([value]) if n.op == "input"}
        return bool(read) and read <= self.frozen


def _is_wide(product: Node) -> bool:
    """Whether a product has many more columns than its left operand, as far as that is known."""
    columns, inner = (dim_size(value.type.dims[-1]) for value in (product, product.args[0]))
    return bool(columns.is_Integer and inner.is_Integer and columns > WIDE * inner)


def _would_help(side: _Side) -> bool:
    """Whether a kernel would otherwise be needed for the row factors: their tile comes from memory, or from a product
    that must be complete before they are known."""
    products = _products(side.tile, side.outer)
    return not products or any(n in products for n in topological(side.rows))


def _products(tile: Node, outer: frozenset[str]) -> set[Node]:
    """The products that a tile is computed from element by element: not those behind another, or behind a statistic."""
    inside = topological([tile], lambda n: () if n.op == "dot" or n.type.names <= outer else n.args)
    return {n for n in inside if n.op == "dot"}


def _without_rows(dot: Node, side: _Side) -> Node:
    """The product of the tile alone; beside shifts, with the column factor in the weight."""
    old, args = dot.args[side.index], list(dot.args)
    if side.others:
        args[0] = conform(rounded(side.tile, old.dtype), old.type)
        args[1] = _weight(dot, side)
    else:
        args[side.index] = conform(rounded(side.main.rest, old.dtype), old.type)
    return build("dot", *args, span=dot.span)


def _weight(dot: Node, side: _Side) -> Node:
    return dot.args[1] if side.main.column is None else scaled_weight(dot.args[1], side.main.column)


def _shifts(dot: Node, side: _Side) -> list[Node]:
    """row * sum(w * column) for each term without tile, from the weight as the product reads it where it can be."""
    weight, shifts = dot.args[1], list[Node]()
    contracted = tuple(a.name for a in weight.type.dims[-2])
    for term in side.others:
        is_main = term.column is side.main.column
        value = _weight(dot, side) if is_main else multiply(weight, term.column)
        shifts.append(multiply(term.row, build("reduce_sum", value, axes=contracted)))
    return shifts
