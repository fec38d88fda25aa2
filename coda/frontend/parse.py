"""Source text to syntax tree: lark's LALR parser, and the step between lexer and parser that places separators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from lark import Lark, Token, Transformer, UnexpectedInput, v_args
from lark.tree import Meta

from coda.errors import CodaError, Source, Span
from coda.frontend import syntax
from coda.frontend.syntax_errors import explain
from coda.resources import grammar_file

OPENING, CLOSING = {"LPAR", "LSQB"}, {"RPAR", "RSQB"}
# Next to one of these a newline does not end the statement: the line has to go on.
CONTINUING = {"PLUS", "MINUS", "STAR", "SLASH", "AT", "EQ", "NE", "LE", "GE", "LT", "GT", "VBAR"}
CONTINUES_AFTER = CONTINUING | {"COMMA", "COLON", "EQUAL", "LBRACE", "ARROW"}
CONTINUES_BEFORE = CONTINUING | {"COMMA", "COLON", "EQUAL", "LBRACE", "RBRACE", "DOT", "ARROW"}


class Separators:
    """Lark's postlex hook: newlines and ';' become one _SEP between statements and vanish everywhere else."""

    always_accept = ("NEWLINE", "SEMICOLON")

    def process(self, stream: Iterable[Token]) -> Iterator[Token]:
        depth, previous, separator = 0, None, None
        for token in stream:
            if token.type in self.always_accept:
                if depth == 0 and previous is not None and previous not in CONTINUES_AFTER:
                    separator = separator or Token.new_borrow_pos("_SEP", token.value, token)
                continue
            if separator is not None and token.type not in CONTINUES_BEFORE:
                yield separator
            separator, previous = None, token.type
            depth += (token.type in OPENING) - (token.type in CLOSING)
            yield token


@lru_cache(maxsize=1)
def parser() -> Lark:
    return Lark(
        grammar_file().read_text(encoding="utf-8"),
        parser="lalr",
        lexer="basic",  # keywords are reserved everywhere, and Separators may look one token ahead
        postlex=Separators(),
        start=["module", "expression"],
        propagate_positions=True,
        maybe_placeholders=True,
    )


def parse_module(source: Source) -> list[syntax.Definition]:
    """The programs and functions of a source text, in order. Raises CodaError."""
    return _parse(source, "module")


def parse_expression(source: Source) -> syntax.Expr:
    return _parse(source, "expression")


def _parse(source: Source, start: str) -> Any:
    try:
        tree = parser().parse(source.text, start=start)
    except UnexpectedInput as error:
        raise CodaError([explain(error, source, parser())], source) from None
    return BuildSyntax(source).transform(tree)


def _span(meta: Meta | Token) -> Span:
    return Span(meta.line or 1, meta.column or 1, meta.end_line or 1, meta.end_column or 1)


def _name(token: Token) -> syntax.Name:
    return syntax.Name(str(token), _span(token))


def _number(token: Token) -> syntax.Number:
    is_int = token.isdigit()
    return syntax.Number(int(token) if is_int else float(token), _span(token))


CONSTANTS: dict[str, bool | float] = {"true": True, "false": False, "inf": math.inf, "nan": math.nan}


@v_args(meta=True)
class BuildSyntax(Transformer):
    """One method for each grammar rule; children arrive transformed."""

    def __init__(self, source: Source):
        super().__init__()
        self.source = source

    def module(self, meta, definitions):
        return definitions

    def program(self, meta, children):
        return self._definition("program", meta, *children)

    def function(self, meta, children):
        return self._definition("fn", meta, *children)

    def extern(self, meta, children):
        name, parameters, _, results = children
        return self._definition("extern", meta, name, parameters, (), results)

    def _definition(self, kind, meta, name, parameters, body, results=()):
        return syntax.Definition(kind, _name(name), parameters or (), body, _span(meta), self.source, results)

    def body(self, meta, statements):
        return tuple(s for s in statements if s is not None)

    # Parameters and types.

    def parameters(self, meta, children):
        return tuple(p for p in children if p is not None)

    def parameter(self, meta, children):
        qualifier, name, axes, annotation, optional, default = children
        is_type = isinstance(annotation, syntax.TypeSyntax)
        return syntax.Parameter(
            qualifier, _name(name), axes, annotation if is_type else None, None if is_type else annotation,
            optional is not None, default, _span(meta),
        )  # fmt: skip

    def qualifier(self, meta, children):
        return str(children[0])

    def default(self, meta, children):
        return children[0]

    def choices(self, meta, children):
        return tuple(_name(c) for c in children if c is not None)

    def type(self, meta, children):
        parts_of, dtype, axes = children
        return syntax.TypeSyntax(_name(dtype), axes, _span(meta), parts_of)

    def parts_of(self, meta, children):
        _, kind, dim = children
        return syntax.PartsOf(_name(kind), dim, _span(meta))

    def axes(self, meta, dims):
        return syntax.Axes(tuple(d for d in dims if d is not None), _span(meta))

    def dim(self, meta, factors):
        return tuple(factors)

    def factor(self, meta, children):
        name, size = children
        return syntax.Factor(_name(name), None if size is None else int(float(size)), _span(meta))

    # Statements.

    def assign(self, meta, children):
        targets, type_, value = children
        return syntax.Assign(targets, type_, value, _span(meta))

    def targets(self, meta, names):
        return tuple(_name(n) for n in names)

    def accumulate(self, meta, children):
        target, value = children
        return syntax.Accumulate(_name(target), value, _span(meta))

    def declare(self, meta, children):
        name, size = children
        return syntax.Declare(_name(name), size, _span(meta))

    def returns(self, meta, results):
        return syntax.Return(tuple(r for r in results if r is not None), _span(meta))

    def result(self, meta, children):
        name, value, type_ = children
        return syntax.Result(name and _name(name), value, type_, _span(meta))

    # Expressions.

    def binary(self, meta, children):
        left, symbol, right = children
        return syntax.Binary(str(symbol), left, right, _span(meta))

    comparison = addition = multiplication = binary

    def negation(self, meta, children):
        (operand,) = children
        if isinstance(operand, syntax.Number) and not isinstance(operand.value, bool):
            return syntax.Number(-operand.value, _span(meta))
        return syntax.Negation(operand, _span(meta))

    def attribute(self, meta, children):
        value, name = children
        return syntax.Attribute(value, _name(name), _span(meta))

    def subscript(self, meta, children):
        value, index = children
        return syntax.Subscript(value, index, _span(meta))

    def call(self, meta, children):
        callee, arguments = children
        return syntax.Call(_name(callee), arguments or (), _span(meta))

    def arguments(self, meta, children):
        return tuple(a for a in children if a is not None)

    def argument(self, meta, children):
        keyword, value = children if len(children) == 2 else (None, children[0])
        return syntax.Argument(keyword and _name(keyword), value, _span(meta))

    def parts(self, meta, parts):
        return syntax.Parts(tuple(parts), _span(meta))

    def part(self, meta, children):
        (token,) = children
        return {"NAME": _name, "NUMBER": _number, "STAR": lambda _: None}[token.type](token)

    def group(self, meta, names):
        return syntax.Group(tuple(_name(n) for n in names), _span(meta))

    def name(self, meta, children):
        return _name(children[0])

    def number(self, meta, children):
        return _number(children[0])

    def constant(self, meta, children):
        return syntax.Number(CONSTANTS[children[0]], _span(meta))

    def expression(self, meta, children):
        return children[0]
