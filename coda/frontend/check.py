"""Programs: parameters, statements, results. One file's programs are checked one by one; all errors are collected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import sympy

from coda.dtypes import F32, DType
from coda.errors import did_you_mean
from coda.frontend import syntax
from coda.frontend.axes import AxisTable
from coda.frontend.expressions import value
from coda.frontend.report import Failed, Report
from coda.frontend.rounding import round_to
from coda.frontend.scope import UNKNOWN, Context, Scope
from coda.frontend.statements import assign, declared_type, dtype_of
from coda.ir import Node, Output, Param, Partial, Program, Size, Type, appearing_axes, size_symbol, written_at
from coda.ops import build
from coda.ops.calls import Extern
from coda.ops.reduce import PARTIALS, partial_of

Consts = dict[str, "int | str"]


def factors_in(types: Iterable[syntax.TypeSyntax | None]) -> Iterable[syntax.Factor]:
    return (f for t in types if t is not None and t.axes is not None for dim in t.axes.dims for f in dim)


@dataclass
class ProgramChecker:
    """Checks one program. ``params`` and ``outputs`` grow as it goes."""

    definition: syntax.Definition
    report: Report
    functions: dict[str, syntax.Definition]
    externs: dict[str, Extern]
    inlined: set[str]
    consts: Consts
    params: list[Param] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def check(self) -> Program:
        """The program. After an error it is whatever could be checked, and the report says what is wrong."""
        self.table = AxisTable(self.report)
        self.context = Context(self.report, self.table, self.functions, self.externs, inlined=self.inlined)
        self.scope = Scope(self.context)
        self.collect_axes()
        for parameter in self.definition.parameters:
            self.attempt(self.parameter, parameter)
        for declare in self.table.declared:
            self.attempt(self.table.find, declare)
        for statement in self.definition.body:
            self.attempt(self.statement, statement)
        self.attempt(self.finish)
        axes = appearing_axes(self.params, self.outputs)
        names = tuple((v, name) for name, v in self.scope.variables.items() if isinstance(v, Node) and v.args)
        name = self.definition.name.name
        return Program(name, tuple(self.params), tuple(self.outputs), axes, self.report.source, names)

    def attempt(self, step: Callable[..., object], *args: object) -> None:
        """Run one step; an error that it reported does not keep the next from being checked."""
        with contextlib.suppress(Failed):
            step(*args)

    # Axes and sizes.

    def collect_axes(self) -> None:
        """What the whole text says about axes, before the first type is read: they may be declared below their use."""
        for p in self.definition.parameters:
            if p.qualifier == "const" and p.type is None and p.choices is None:
                self.attempt(self.const_size, p)
        for statement in self.definition.body:
            if isinstance(statement, syntax.Declare):
                self.attempt(self.declare, statement)
        types = [p.type for p in self.definition.parameters]
        self.table.mentioned.update(f.name.name for f in factors_in(types))
        for statement in self.definition.body:
            if isinstance(statement, syntax.Return):
                types += [r.type for r in statement.results]
        reduced = [f for t in types if t is not None and t.parts_of is not None for f in t.parts_of.dim]
        for factor in (*factors_in(types), *reduced):
            self.attempt(self.static_factor, factor)

    def const_size(self, p: syntax.Parameter) -> None:
        given: int | str | Size | None = self.consts.get(p.name.name)
        if given is None and p.default is not None:
            given = self.table.size(p.default)
        if isinstance(given, (str, bool)):
            raise self.report.error(f"const {p.name.name} is a size; it was given {given!r}", p.span)
        self.table.consts[p.name.name] = size_symbol(p.name.name) if given is None else sympy.sympify(given)

    def declare(self, statement: syntax.Declare) -> None:
        name = statement.name
        if name.name in self.table.declared or name.name in self.table.consts:
            raise self.report.error(f"axis '{name.name}' is declared twice", name.span)
        self.table.declared[name.name] = statement

    def static_factor(self, factor: syntax.Factor) -> None:
        name, size = factor.name.name, factor.size
        if size is None:
            return
        if size < 1:
            raise self.report.error(f"the size of axis '{name}' must be at least 1", factor.span)
        if name in self.table.declared or self.table.factors.get(name, size) != size:
            raise self.report.error(f"axis '{name}' gets a second size", factor.span, "one axis name has one size")
        self.table.factors[name] = size

    # Parameters.

    def parameter(self, p: syntax.Parameter) -> None:
        name = p.name.name
        if any(q.name.name == name for q in self.definition.parameters if q.span < p.span):
            raise self.report.error(f"parameter '{name}' is declared twice", p.name.span)
        if p.axes is not None:
            raise self.report.error("a parameter of a program has a type", p.span, f"write {name}: bf16[...]")
        if p.choices is not None:
            self.choice(p)
        elif p.type is not None:
            try:
                self.tensor_parameter(p, p.type)
            except Failed:
                self.scope.variables.setdefault(name, UNKNOWN)
        elif p.qualifier != "const":
            self.scope.variables[name] = UNKNOWN
            raise self.report.error(f"parameter '{name}' has no type", p.span, f"write {name}: bf16[M, D]")

    def choice(self, p: syntax.Parameter) -> None:
        """const act: {gelu_tanh, gelu_erf}: the name stands for one of several functions."""
        names = [c.name for c in p.choices or ()]
        if p.qualifier != "const":
            hint = f"write const {p.name.name}: ..."
            raise self.report.error("a choice is known when the program is lowered", p.span, hint)
        if p.default is not None and not isinstance(p.default, syntax.Name):
            raise self.report.error("the default of a choice is one of its names", p.default.span)
        default = names[0] if p.default is None else p.default.name
        chosen = self.consts.get(p.name.name, default)
        if chosen not in names:
            hint = did_you_mean(str(chosen), names) or f"one of {', '.join(names)}"
            raise self.report.error(f"{chosen!r} is not a choice of const {p.name.name}", p.span, hint)
        self.scope.check_new_name(p.name)
        self.context.choices[p.name.name] = str(chosen)

    def tensor_parameter(self, p: syntax.Parameter, written: syntax.TypeSyntax) -> None:
        type_ = self.parameter_type(written)
        name, is_inout = p.name.name, p.qualifier == "inout"
        default = self.default_value(p, type_)
        if is_inout and (p.optional or default is not None):
            raise self.report.error("an inout parameter is always given", p.span)
        if type_.partial and (p.optional or p.qualifier):
            hint = f"write {name}: {type_}"
            raise self.report.error("partial results are always given, and only read", p.span, hint)
        self.params.append(Param(name, type_, p.optional, default, is_inout, p.qualifier == "const", p.span))
        if p.optional:
            self.context.optional.add(name)
        if is_inout:
            self.context.inout.add(name)
        self.scope.bind(p.name, written_at(build("input", name=name, type=type_), p.name.span))

    def parameter_type(self, written: syntax.TypeSyntax) -> Type:
        dtype = dtype_of(self.scope, written.dtype)
        written_dims = written.axes.dims if written.axes is not None else ()
        dims = tuple(tuple(self.table.mention(f.name.name) for f in dim) for dim in written_dims)
        names = [a.name for d in dims for a in d]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice:
            hint = "declare a second axis of equal size, as in dim A = D"
            raise self.report.error(f"axis '{twice}' stands twice in one type", written.span, hint)
        return Type(dtype, dims, self.partial(written, dtype, names))

    def partial(self, written: syntax.TypeSyntax, dtype: DType, kept: Sequence[str]) -> Partial | None:
        """What ``partial[sum, D]`` in front of a dtype says: the values are partial results."""
        if written.parts_of is None:
            return None
        kind, over = written.parts_of.kind, [f.name for f in written.parts_of.dim]
        if kind.name not in PARTIALS:
            hint = did_you_mean(kind.name, set(PARTIALS)) or f"one of {', '.join(PARTIALS)}"
            if kind.name == "mean":
                hint = "a mean is a sum, divided when it is finished: finish(stats) / size(D)"
            raise self.report.error(f"there are no partial results of '{kind.name}'", kind.span, hint)
        if dtype != F32 or not kept:
            what = f"are f32, not {dtype}" if dtype != F32 else "are of the values of some axis"
            raise self.report.error(f"partial results {what}", written.dtype.span, "write partial[sum, D] f32[M]")
        for name in over:
            if name.name in kept:
                raise self.report.error(f"axis '{name.name}' is reduced over and kept", name.span)
            if not self.table.mentions(name.name):
                hint = did_you_mean(name.name, self.table.names) or "their number is checked where an operand has it"
                self.report.warn(f"no operand has axis '{name.name}'", name.span, hint)
        return Partial(kind.name, tuple(self.table.mention(name.name) for name in over))

    def default_value(self, p: syntax.Parameter, type_: Type) -> float | int | None:
        if p.default is None:
            return None
        if type_.dims:
            raise self.report.error("only a scalar can have a default", p.default.span, "an optional tensor ends in ?")
        if not isinstance(p.default, syntax.Number):
            raise self.report.error("a default is a number", p.default.span)
        number = p.default.value
        if type_.dtype.kind == "int" and not isinstance(number, int):
            raise self.report.error(f"the default {number} is not an {type_.dtype}", p.default.span)
        return float(number) if type_.dtype.kind == "float" else number

    # Statements and results.

    def statement(self, statement: syntax.Statement) -> None:
        is_last = statement is self.definition.body[-1]
        match statement:
            case syntax.Assign():
                assign(self.scope, statement)
            case syntax.Accumulate():
                self.accumulate(statement)
            case syntax.Return():
                self.results(statement)
                if not is_last:
                    raise self.report.error("a return is the last statement", statement.span)

    def accumulate(self, statement: syntax.Accumulate) -> None:
        name = statement.target.name
        if name not in self.context.inout:
            hint = f"declare it as inout {name}: f32[...]"
            raise self.report.error(f"'{name}' is not an inout parameter", statement.target.span, hint)
        if any(o.into == name for o in self.outputs):
            raise self.report.error(f"'{name}' is accumulated into twice", statement.span, "add the values first")
        self.scope.unread.pop(name, None)
        node = value(self.scope, statement.value)
        target = next(p.type for p in self.params if p.name == name)
        if node.type.names != target.names:
            raise self.report.error(f"a value of axes {node.type} cannot be added into {target}", statement.span)
        self.outputs.append(Output(name, round_to(node, target.dtype), target, into=name))

    def results(self, statement: syntax.Return) -> None:
        for i, result in enumerate(statement.results):
            self.attempt(self.result, result, f"out{i}" if len(statement.results) > 1 else "out")

    def result(self, result: syntax.Result, fallback: str) -> None:
        if result.type:
            self.attempt(dtype_of, self.scope, result.type.dtype)  # told even where the value is unknown
        node = value(self.scope, result.value)
        declared = declared_type(self.scope, node, result.type) if result.type else node.type
        if node.type.partial:
            raise self.report.error("partial results are not returned again", result.span, "return finish(...) of them")
        if node.op == "partial":
            if declared.dtype != F32:
                hint = "write partial(...): f32"
                raise self.report.error("an unfinished reduction is stored as f32", result.span, hint)
            declared = replace(declared, partial=partial_of(node.args[0]))
        name = self.output_name(result, fallback)
        self.outputs.append(Output(name, round_to(node, declared.dtype), declared))

    def output_name(self, result: syntax.Result, fallback: str) -> str:
        """The name given, else that of the returned variable, else out, out0, out1 ..."""
        taken = {o.name for o in self.outputs} | {p.name for p in self.params}
        if result.name is not None:
            if result.name.name in taken:
                raise self.report.error(f"the result '{result.name.name}' has the name of another", result.name.span)
            self.scope.check_new_name(result.name)
            return result.name.name
        name = result.value.name if isinstance(result.value, syntax.Name) else fallback
        return fallback if name in taken else name

    def finish(self) -> None:
        for name in list(self.scope.unread):
            self.scope.warn_unread(name)
        written = {s.target.name for s in self.definition.body if isinstance(s, syntax.Accumulate)}
        for p in self.params:
            if p.inout and p.name not in written:
                hint = f"write {p.name} += ..., or drop the inout"
                self.report.error(f"inout '{p.name}' is never accumulated into", p.span, hint)
        if not self.outputs and not self.report.of("error"):
            raise self.report.error(f"program '{self.definition.name.name}' returns nothing", self.definition.name.span)
