"""Externs: opaque functions, declared with the types of their operands and results.

    extern attention(q: bf16[B, H, T, d], k: bf16[B, G, T, d], v: bf16[B, G, T, d]) -> o: bf16[(B T), (H d)]
    extern attention_backward(q: ..., k: ..., v: ..., d_o: bf16[(B T), (H d)]) -> d_q: ..., d_k: ..., d_v: ...

``NAME_backward`` is the derivative of NAME; operands and gradients are told by their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from coda.dtypes import TABLE
from coda.errors import Span, did_you_mean
from coda.frontend import syntax
from coda.frontend.arguments import parameter_of
from coda.frontend.expressions import value
from coda.frontend.readers import unknown_dtype_hint
from coda.frontend.report import Failed, Report
from coda.frontend.rounding import round_to
from coda.frontend.scope import Scope
from coda.ir import Axis, Node, Type
from coda.ops.calls import Extern, Typed

SUFFIX = "_backward"


def externs(definitions: Iterable[syntax.Definition], report: Report) -> dict[str, Extern]:
    """The externs of a source text by name, each with its derivative. What is wrong with one is reported."""
    found: dict[str, Extern] = {}
    written = {d.name.name: d for d in definitions if d.kind == "extern"}
    for name, definition in written.items():
        with contextlib.suppress(Failed):
            found[name] = _Reader(definition, report).read()
    for name, extern in list(found.items()):
        if (backward := found.get(name + SUFFIX)) is not None:
            with contextlib.suppress(Failed):
                _check_backward(extern, backward, written[name + SUFFIX], report)
                found[name] = replace(extern, backward=backward)
    return found


class _Reader:
    """One declaration, read."""

    def __init__(self, definition: syntax.Definition, report: Report):
        self.definition, self.report = definition, report
        self.sizes: dict[str, Axis] = {}

    def read(self) -> Extern:
        for factor in self.factors():
            if factor.size is not None:
                self.sized(factor)
        name = self.definition.name.name
        params = tuple(self.typed(p) for p in self.definition.parameters)
        results = tuple(self.typed(p) for p in self.definition.results)
        names = [p.name for p in (*self.definition.parameters, *self.definition.results)]
        for i, written in enumerate(names):
            if written.name in {n.name for n in names[:i]}:
                raise self.report.error(f"'{written.name}' stands twice in extern '{name}'", written.span)
        self.check_axes(params, results)
        return Extern(name, params, results)

    def factors(self) -> list[syntax.Factor]:
        types = [p.type for p in (*self.definition.parameters, *self.definition.results)]
        return [f for t in types if t is not None and t.axes is not None for dim in t.axes.dims for f in dim]

    def sized(self, factor: syntax.Factor) -> None:
        axis = Axis.of(factor.name.name, factor.size or 0)
        if self.sizes.setdefault(axis.name, axis) != axis:
            hint = "one axis name has one size"
            raise self.report.error(f"axis '{axis.name}' gets a second size", factor.span, hint)

    def typed(self, p: syntax.Parameter) -> Typed:
        if p.qualifier or p.optional or p.default is not None or p.choices or p.axes or p.type is None:
            hint = f"write {p.name.name}: bf16[M, D]"
            raise self.report.error("the operands and results of an extern are tensors, always there", p.span, hint)
        written = p.type
        if written.dtype.name not in TABLE:
            hint = unknown_dtype_hint(written.dtype.name)
            raise self.report.error(f"unknown dtype '{written.dtype.name}'", written.dtype.span, hint)
        if written.parts_of is not None:
            hint = "partial results go from one program to another; return them finished"
            raise self.report.error("an extern takes and gives finished values", written.parts_of.span, hint)
        dims = written.axes.dims if written.axes is not None else ()
        type_ = Type(TABLE[written.dtype.name], tuple(tuple(self.axis(f.name.name) for f in dim) for dim in dims))
        if len(type_.names) != len(type_.axes):
            raise self.report.error("an axis stands twice in one type", written.span)
        return p.name.name, type_

    def axis(self, name: str) -> Axis:
        return self.sizes.get(name) or Axis.free(name)

    def check_axes(self, params: tuple[Typed, ...], results: tuple[Typed, ...]) -> None:
        known = {a.name for _, t in params for a in t.axes} | self.sizes.keys()
        for p, (_, type_) in zip(self.definition.results, results, strict=True):
            for axis in type_.axes:
                if axis.name not in known:
                    hint = did_you_mean(axis.name, known) or "give it a size, as in n=16"
                    raise self.report.error(f"no operand has axis '{axis.name}' of a result", p.span, hint)


def _check_backward(forward: Extern, backward: Extern, written: syntax.Definition, report: Report) -> None:
    """The derivative takes what there is and returns gradients, of the types that these have."""
    gradients = {f"d_{name}": t for name, t in forward.params if t.dtype.kind == "float"}
    given = dict(forward.params) | dict(forward.results) | {f"d_{name}": t for name, t in forward.results}
    places = {p.name.name: p.span for p in (*written.parameters, *written.results)}
    for name, type_ in backward.params:
        _same(name, type_, given, f"operand or result of '{forward.name}', nor the gradient of one", report, places)
    for name, type_ in backward.results:
        _same(name, type_, gradients, f"gradient of an operand of '{forward.name}'", report, places)


def _same(
    name: str, type_: Type, known: Mapping[str, Type], what: str, report: Report, places: Mapping[str, Span]
) -> None:
    if name not in known:
        hint = did_you_mean(name, set(known)) or f"there are {', '.join(known)}"
        raise report.error(f"'{name}' is no {what}", places[name], hint)
    if type_.dims != known[name].dims:
        raise report.error(f"'{name}' is {type_} here and {known[name]} there", places[name], "use the same axes")


def call_extern(scope: Scope, callee: Extern, expr: syntax.Call) -> list[Node]:
    """The results of an opaque call. Operands are rounded to the declared dtypes."""
    declared = dict(callee.params)
    signature = f"it is {callee.name}({', '.join(f'{name}: {t}' for name, t in callee.params)})"
    given: dict[str, Node] = {}
    for argument in expr.arguments:
        name = parameter_of(scope, argument, [n for n in declared if n not in given], signature, callee.name)
        if name not in declared or name in given:
            what = "is given twice" if name in given else "is no operand"
            raise scope.fail(f"'{name}' {what} of extern '{callee.name}'", argument.span, signature)
        given[name] = round_to(value(scope, argument.value), declared[name].dtype)
    missing = [name for name in declared if name not in given]
    if missing:
        raise scope.fail(f"'{callee.name}' lacks its operand '{missing[0]}'", expr.span, signature)
    operands = [given[name] for name in declared]
    return [scope.build(expr.span, "call", *operands, callee=callee, result=i) for i in range(len(callee.results))]
