"""Text to syntax tree: where statements end, what binds how, and that errors know their place."""

from __future__ import annotations

import math

import pytest

from coda.errors import CodaError, Source, Span
from coda.frontend import syntax
from coda.frontend.mistakes import MISTAKES
from coda.frontend.parse import parse_expression, parse_module, parser
from coda.frontend.syntax_errors import known_mistakes
from tests.programs import tour


def expr(text: str) -> syntax.Expr:
    return parse_expression(Source(text))


def shape(e: syntax.Expr) -> str:
    """The tree with all parentheses written."""
    match e:
        case syntax.Binary(symbol, left, right):
            return f"({shape(left)} {symbol} {shape(right)})"
        case syntax.Negation(operand):
            return f"(-{shape(operand)})"
        case syntax.Attribute(value, name):
            return f"{shape(value)}.{name.name}"
        case syntax.Subscript(value, index):
            return f"{shape(value)}[{shape(index.value)}]"
        case syntax.Call(callee, arguments):
            return f"{callee.name}({', '.join(shape(a.value) for a in arguments)})"
        case syntax.Name(name):
            return name
        case syntax.Number(value):
            return repr(value)
    return type(e).__name__


def body(*lines: str) -> tuple[syntax.Statement, ...]:
    text = "program p(x: f32[M]) {\n" + "\n".join(lines) + "\n}"
    return parse_module(Source(text))[0].body


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a + b * c", "(a + (b * c))"),
        ("a - b - c", "((a - b) - c)"),
        ("a / b * c", "((a / b) * c)"),
        ("r * n @ w.T", "((r * n) @ w.T)"),
        ("-a * b", "((-a) * b)"),
        ("-a.T", "(-a.T)"),
        ("a + b == c * d", "((a + b) == (c * d))"),
        ("z.s[0].T", "z.s[0].T"),
        ("f(a)[pos]", "f(a)[pos]"),
        ("a - -1", "(a - -1)"),
        ("--a", "(-(-a))"),
        ("max(c, (s F))", "max(c, Group)"),
        ("rand(a, b, [M, (s F)])", "rand(a, b, Axes)"),
        ("split(x, d = f | f | *)", "split(x, Parts)"),
    ],
)
def test_precedence(text, tree):
    assert shape(expr(text)) == tree


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("-100", -100), ("1e-5", 1e-5), ("1.", 1.0), ("2.5E+3", 2500.0), ("true", True), ("-inf", -math.inf)],
)
def test_literals(text, value):
    number = expr(text)
    assert isinstance(number, syntax.Number)
    assert number.value == value
    assert type(number.value) is type(value)


def test_minus_zero_keeps_its_sign():
    assert math.copysign(1, expr("-0.0").value) == -1


def test_newlines_and_semicolons_separate_statements():
    assert len(body("a = x; b = a", "", "# a comment", "c = b  # and one here;", "", "return c;")) == 4


@pytest.mark.parametrize("text", ["a = f(x,\n  x)", "a = x +\n  x", "a = x\n  + x", "a = x\n  @ x.T", "return a,\n  b"])
def test_a_line_goes_on_inside_brackets_and_beside_operators(text):
    assert len(body(text)) == 1


def test_return_items():
    (statement,) = body("return h, z: bf16, y = silu(z): bf16[M, (s=2 F)],")
    names = [r.name and r.name.name for r in statement.results]
    types = [r.type and r.type.dtype.name for r in statement.results]
    assert names == [None, None, "y"]
    assert types == [None, "bf16", "bf16"]
    assert [f.size for f in statement.results[2].type.axes.dims[1]] == [2, None]


def test_parameters():
    text = "x: bf16[(B T), D], b: f32[D]?, inout g: f32[D], const HQ, const act: {a, b} = b, eps: f32 = 1e-5,"
    x, b, g, hq, act, eps = parse_module(Source(f"program p({text}) {{}}"))[0].parameters
    assert [f.name.name for f in x.type.axes.dims[0]] == ["B", "T"]
    assert b.optional
    assert g.qualifier == "inout"
    assert (hq.qualifier, hq.type) == ("const", None)
    assert [c.name for c in act.choices] == ["a", "b"]
    assert act.default.name == "b"
    assert eps.default.value == 1e-5


def test_spans_count_from_one():
    (statement,) = body("y = silu(x)")
    assert statement.value.span == Span(2, 5, 2, 12)


@pytest.mark.parametrize("name", tour())
def test_the_tour_parses(name):
    assert parse_module(Source(tour()[name].read_text()))


def test_empty_text_has_no_definitions():
    assert parse_module(Source("")) == parse_module(Source("\n# nothing\n\n")) == []


def test_each_example_of_a_mistake_finds_it():
    """Two rows of the table never claim the same parser state, and each example is a mistake."""
    for mistake in MISTAKES:
        for example in mistake.examples:
            with pytest.raises(CodaError):
                parse_module(Source(example))
    states = known_mistakes(parser())
    assert set(states.values()) == set(MISTAKES)
