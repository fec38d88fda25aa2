"""A matrix as a sum of terms ``row * tile * column``: what an operand of a product is, whatever it was called.

``rms_norm(x, g)`` is one term with row ``rsqrt(mean(x * x) + eps)``, tile ``x`` and column ``g``; a ``layer_norm`` is
three, two of which have no tile. Found by meaning: by the axes over which the factors of a product vary. Sums are taken
apart only where that separates a row factor from the tile; everything else is a tile as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

from coda.dtypes import F32, DType
from coda.frontend.rounding import is_stored
from coda.ir import Node
from coda.ops import build

MOST_TERMS = 4  # a product of sums is not multiplied out beyond this


@dataclass(frozen=True)
class Term:
    """``row`` varies over the outer axes only, ``column`` over the inner axes only (or is a number); None is 1."""

    row: Node | None = None
    tile: Node | None = None
    column: Node | None = None

    @property
    def rest(self) -> Node:
        """The term without its row factor, which leaves something."""
        return multiply(self.tile, self.column)


@dataclass
class Separation:
    """The terms of a value; ``inside`` are the operations that disappear when a row factor leaves its tile."""

    terms: list[Term]
    inside: set[Node] = field(default_factory=set)

    @property
    def has_row(self) -> bool:
        return any(t.row is not None for t in self.terms)


def multiply(*factors: Node | None) -> Node:
    """The product of the factors that are there, at least one."""
    return reduce(lambda a, b: build("mul", a, b), [f for f in factors if f is not None])


def times(a: Node | None, b: Node | None) -> Node | None:
    """The product of two factors, of which None is 1."""
    return b if a is None else a if b is None else build("mul", a, b)


def is_rounding(cast: Node) -> bool:
    """Whether a cast only rounds, to a float type with room for what has not been scaled yet."""
    return not cast.attr("saturate") and cast.dtype.kind == "float" and cast.dtype.bits >= 16


def rounded(value: Node, dtype: DType) -> Node:
    """The value in a storage dtype, in which it may be stored already."""
    if value.dtype == dtype and is_stored(value):
        return value
    return build("cast", value, dtype=dtype, saturate=False, span=value.span)


def scaled_weight(weight: Node, column: Node) -> Node:
    """A right operand times a vector over the contracted axis, rounded: w.T * g as (w * g).T."""
    turned = weight.op == "transpose"
    value = multiply(weight.args[0] if turned else weight, column)
    value = build("cast", value, dtype=weight.dtype, saturate=False, span=weight.span)
    return build("transpose", value) if turned else value


def separate(value: Node, outer: frozenset[str], inner: frozenset[str]) -> Separation:
    """The terms of a value over its outer (row) and inner (column) axes."""
    return _Separator(outer, inner).of(value)


@dataclass
class _Separator:
    outer: frozenset[str]
    inner: frozenset[str]

    def of(self, value: Node) -> Separation:
        if value.type.names <= self.inner:
            return Separation([Term(column=value)])
        if value.type.names <= self.outer:
            return Separation([Term(row=value)])
        found = self.structured(value)
        return found if found is not None and found.has_row else Separation([Term(tile=value)])

    def structured(self, value: Node) -> Separation | None:
        """The terms of a product, quotient, sum, rounding or layout; None where it stays one tile."""
        match value.op:
            case "mul":
                return self.product(value)
            case "div":
                return self.quotient(value)
            case "add" | "sub":
                return self.sum(value)
            case "layout" | "transpose":  # axes go by name
                found = self.of(value.args[0])
                return Separation(found.terms, found.inside | {value})
            case "cast" if is_rounding(value):
                found = self.of(value.args[0])
                terms = [t if t.tile is None else Term(t.row, rounded(t.rest, value.dtype)) for t in found.terms]
                return Separation(terms, found.inside | {value})
            case "neg":
                found = self.of(value.args[0])
                return Separation([_negated(t) for t in found.terms], found.inside | {value})
        return None

    def product(self, value: Node) -> Separation | None:
        a, b = (self.of(x) for x in value.args)
        if len(a.terms) * len(b.terms) > MOST_TERMS:
            return None
        terms = [
            Term(times(s.row, t.row), times(s.tile, t.tile), times(s.column, t.column))
            for s in a.terms
            for t in b.terms
        ]
        return Separation(terms, a.inside | b.inside | {value})

    def quotient(self, value: Node) -> Separation | None:
        a, divisor = self.of(value.args[0]), value.args[1]
        if divisor.type.names and divisor.type.names <= self.outer:
            one = build("const", value=1.0, dtype=F32)
            over = lambda row: build("div", one if row is None else row, divisor, span=value.span)  # noqa: E731
            terms = [Term(over(t.row), t.tile, t.column) for t in a.terms]
        else:
            if any(t.tile is None for t in a.terms):
                return None
            terms = [Term(t.row, build("div", t.rest, divisor, span=value.span)) for t in a.terms]
        return Separation(terms, a.inside | {value})

    def sum(self, value: Node) -> Separation | None:
        """A sum comes apart where one side has the tile and the other none, as in x - mean."""
        a, b = (self.of(x) for x in value.args)
        terms = a.terms + (b.terms if value.op == "add" else [_negated(t) for t in b.terms])
        if sum(t.tile is not None for t in terms) != 1 or len(terms) > MOST_TERMS:
            return None
        return Separation(terms, a.inside | b.inside | {value})


def _negated(term: Term) -> Term:
    negative = lambda x: build("neg", x, span=x.span)  # noqa: E731
    if term.row is not None:
        return Term(negative(term.row), term.tile, term.column)
    if term.tile is not None:
        return Term(None, negative(term.tile), term.column)
    assert term.column is not None
    return Term(None, None, negative(term.column))
