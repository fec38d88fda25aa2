"""The axes of one program and their sizes.

An axis is mentioned in a type, given by ``dim`` or a static factor, or made by an operation. A ``const`` size is a
symbol until a value is given for it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import sympy

from coda.errors import did_you_mean
from coda.frontend import syntax
from coda.frontend.report import Failed, Report
from coda.ir import Axis, Size

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass
class AxisTable:
    """``known`` are the axes met so far; ``declared`` the ``dim`` statements; ``factors`` static sizes in types;
    ``mentioned`` all names that some type or ``dim`` makes an axis; ``cut_from`` for a part of an axis that axis."""

    report: Report
    consts: dict[str, Size] = field(default_factory=dict)
    known: dict[str, Axis] = field(default_factory=dict)
    declared: dict[str, syntax.Declare] = field(default_factory=dict)
    factors: dict[str, int] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)
    cut_from: dict[str, str] = field(default_factory=dict)
    _resolving: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return set(self.known) | self.mentioned | set(self.consts) | set(self.declared)

    def mentions(self, name: str) -> bool:
        return name in self.names

    def find(self, name: str) -> Axis | None:
        """The axis of this name if something gives it a size; a free axis only once a type has mentioned it."""
        if name in self.known:
            return self.known[name]
        if name in self.declared:
            return self.add(Axis.of(name, self._declared_size(self.declared[name])))
        if name in self.factors:
            return self.add(Axis.of(name, self.factors[name]))
        if name in self.consts:
            return self.add(Axis.of(name, self.consts[name]))
        return None

    def mention(self, name: str) -> Axis:
        """The axis of this name in a type: a free one when nothing else gives it a size."""
        return self.find(name) or self.add(Axis.free(name))

    def add(self, axis: Axis) -> Axis:
        return self.known.setdefault(axis.name, axis)

    def fresh(self, name: str, size: Size) -> Axis:
        """An axis of this size called ``name``, or name_2, name_3 ... where that is another axis already."""
        candidate, n = name, 1
        while candidate in self.names and (self.find(candidate) is None or self.known[candidate].size != size):
            n += 1
            candidate = f"{name}_{n}"
        return self.add(Axis.of(candidate, size))

    # Sizes.

    def size(self, expr: syntax.Expr) -> Size:
        """The value of a size expression: numbers, axes, const sizes and + - * / between them."""
        match expr:
            case syntax.Number(value, span):
                if not isinstance(value, int) or isinstance(value, bool):
                    raise self.report.error(f"a size is a whole number, not {value}", span)
                return sympy.Integer(value)
            case syntax.Name():
                return self._named_size(expr)
            case syntax.Negation(operand):
                return -self.size(operand)
            case syntax.Binary(symbol, left, right) if symbol in ARITHMETIC:
                a, b = self.size(left), self.size(right)
                if symbol == "/" and b == 0:
                    raise self.report.error("a size is divided by zero", expr.span)
                return ARITHMETIC[symbol](a, b)
            case syntax.Call(callee) if callee.name == "ragged":
                hint = "for now write one program for each expert, or pad the groups to one size"
                raise self.report.error("ragged axes are planned for a later release", expr.span, hint)
        hint = "a size is made of numbers, axes, const sizes and + - * /"
        raise self.report.error("this is not a size", expr.span, hint)

    def _named_size(self, name: syntax.Name) -> Size:
        if name.name in self.consts:
            return self.consts[name.name]
        if self.mentions(name.name):
            return self.mention(name.name).size
        hint = did_you_mean(name.name, self.names) or f"an axis of a parameter, or a parameter const {name.name}"
        raise self.report.error(f"'{name.name}' is not a size", name.span, hint)

    def _declared_size(self, declare: syntax.Declare) -> Size:
        name = declare.name.name
        if name in self._resolving:
            cycle = " -> ".join([*self._resolving, name])
            raise self.report.error(f"the size of axis '{name}' depends on itself ({cycle})", declare.span)
        self._resolving.append(name)
        try:
            size = self.size(declare.size)
        except Failed:
            size = Axis.free(name).size  # reported once; the axis goes on as a free one
        finally:
            self._resolving.pop()
        if size.is_number and not (size.is_integer and size >= 0):
            self.report.error(f"axis '{name}' would have size {size}", declare.span)
        return size
