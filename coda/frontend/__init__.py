"""Text to IR: ``load`` a source, ``load_path`` a file, or one ``expression`` over given nodes.

parse.py        text -> syntax tree (grammar/coda.lark); syntax_errors.py and the table mistakes.py explain errors
check.py        syntax tree -> ir.Program: parameters, statements, results
statements.py   assignments and declared types
expressions.py  names, literals, operators, slices
calls.py        a built-in function (builtins.py, cutting.py; readers.py reads their arguments), or a fn, whose body
                is inlined (arguments.py), or an extern, which stays a call (externs.py)
rounding.py     the casts that the checker inserts
scope.py        what names mean; axes.py the axes and their sizes
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from coda.errors import CodaError, Diagnostic, Source, Span, did_you_mean
from coda.frontend import syntax
from coda.frontend.axes import AxisTable
from coda.frontend.builtins import BUILTINS
from coda.frontend.check import Consts, ProgramChecker
from coda.frontend.expressions import value
from coda.frontend.externs import externs
from coda.frontend.parse import parse_expression, parse_module
from coda.frontend.report import Failed, Report
from coda.frontend.scope import Context, Scope
from coda.ir import Node, Program
from coda.resources import library_dir

__all__ = ["Module", "expression", "library", "load", "load_path"]


@dataclass(frozen=True)
class Module:
    """The programs of a source text, in its order, and what is doubtful about them."""

    programs: dict[str, Program]
    warnings: list[Diagnostic]
    source: Source


def load(source: Source | str, consts: Consts | None = None) -> Module:
    """Parse and check a source text. ``consts`` gives values to const parameters; a const size without one stays
    symbolic. Raises CodaError with all errors of the text."""
    source = Source(source) if isinstance(source, str) else source
    try:
        return _load(source, consts or {})
    except RecursionError:
        hint = "give the parts of long expressions names"
        raise CodaError([Diagnostic("an expression is nested too deeply", hint=hint)], source) from None


def _load(source: Source, consts: Consts) -> Module:
    definitions = parse_module(source)
    report, inlined = Report(source), set[str]()
    _check_definitions(definitions, report)
    _check_consts(definitions, consts)
    own = {d.name.name: d for d in definitions if d.kind == "fn"}
    opaque = externs(definitions, report)
    programs = {
        d.name.name: ProgramChecker(d, report, library() | own, opaque, inlined, consts).check()
        for d in definitions
        if d.kind == "program"
    }
    for name, function in own.items():
        if name not in inlined:
            hint = "a fn is generic: it is checked with the arguments of each call"
            report.warn(f"fn '{name}' is never called, so it is not checked", function.name.span, hint)
    if errors := report.of("error"):
        raise CodaError(errors, source)
    return Module(programs, report.of("warning"), source)


def load_path(path: str | Path, consts: Consts | None = None) -> Module:
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CodaError.of(f"cannot read {path}: {error.strerror}") from None
    return load(Source(text, str(path)), consts)


@lru_cache(maxsize=1)
def library() -> dict[str, syntax.Definition]:
    """The functions that ship with coda, by name."""
    files = sorted(library_dir().glob("*.coda"))
    sources = [Source(f.read_text(encoding="utf-8"), f"coda/library/{f.name}") for f in files]
    return {d.name.name: d for source in sources for d in parse_module(source)}


def expression(text: str, at: Span | None = None, **nodes: Node) -> Node:
    """The IR of one expression over given nodes, as in ``expression("dy * sigmoid(a)", dy=dy, a=a)``. Its nodes are
    said to be written ``at`` a place of the source that they serve."""
    source = Source(text, "<expression>")
    parsed = parse_expression(source)
    report = Report(source)
    table = AxisTable(report)
    for node in nodes.values():
        for axis in node.type.axes:
            table.add(axis)
    scope = Scope(Context(report, table, library(), place=at), variables=dict(nodes))
    try:
        return value(scope, parsed)
    except Failed:
        raise CodaError(report.of("error"), source) from None


def _check_definitions(definitions: list[syntax.Definition], report: Report) -> None:
    seen: set[str] = set()
    for definition in definitions:
        name = definition.name
        if name.name in seen:
            report.error(f"'{name.name}' is defined twice", name.span)
        if definition.kind != "program" and name.name in BUILTINS:
            report.error(f"'{name.name}' is a built-in function", name.span, "choose another name")
        seen.add(name.name)


def _check_consts(definitions: list[syntax.Definition], consts: Consts) -> None:
    """A value for a const that no program has is a mistake, not something to ignore."""
    known = {p.name.name for d in definitions for p in d.parameters if p.qualifier == "const" and p.type is None}
    for name in consts:
        if name not in known:
            hint = did_you_mean(name, known) or (f"the consts are {', '.join(sorted(known))}" if known else None)
            raise CodaError.of(f"there is no const '{name}' in this source", hint)
