"""The common syntax mistakes, as a table of examples.

A mistake is recognised by the parser's state and the kind of token it stopped at, not by its text, so one example
covers every program with that mistake.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """``message`` may use {token}; ``examples`` are texts whose parse stops exactly at the mistake."""

    message: str
    hint: str
    examples: tuple[str, ...]


def _in_body(*statements: str) -> tuple[str, ...]:
    return tuple(f"program p(x: f32[M]) {{ {statement}" for statement in statements)


def _in_expression(*expressions: str) -> tuple[str, ...]:
    return _in_body(*(f"{start} {e}" for e in expressions for start in ("y =", "return")))


MISTAKES = (
    Mistake(
        "a definition starts with 'program', 'fn' or 'extern', not with {token}",
        "for example: program name(x: bf16[M, K]) { ... }",
        ("def p", "x = 1", "return x", "dim", "program p() { return x } x", "program p() { return x } return"),
    ),
    Mistake(
        "expected ':' between the parameter and its type, got {token}",
        "write it as x: bf16[M, D]",
        ("program p(x bf16", "program p(const x bf16"),
    ),
    Mistake(
        "the type lacks its dtype",
        "put one before the bracket, as in bf16[M, D]",
        ("program p(x: [", *_in_body("y: [", "return x: [", "return f(x): [")),
    ),
    Mistake(
        "expected ',' before {token}",
        "parameters, and the results of a return, are separated by commas",
        tuple(f"program p(x: {t}" for t in ("f32[M] w", "f32 w", "f32[M]? w", "f32[M] const", "f32[M] inout")),
    ),
    Mistake(
        "expected ',' or an operator before {token}",
        "values are separated by commas",
        _in_expression("f(a b", "f(1 b", "f(a, b c", "f((a) b", "f(a.T b", "f(g(a) b", "f(a 1", "x x", "f(x) x", "1 x"),
    ),
    Mistake(
        "expected '{{', got {token}",
        "the statements of a program stand in braces: program name(...) { ... }",
        tuple(f"program p(x: f32) {t}" for t in ("return", "\n return", "x", "dim", ":", "=")),
    ),
    Mistake(
        "'}}' is missing before {token}",
        "close the braces of the definition before this one",
        _in_body(
            *(f"{s}\n {k}" for s in ("return x", "return x: f32[M]", "y = x") for k in ("program", "fn", "extern"))
        ),
    ),
    Mistake(
        "'}}' is missing at the end of the file",
        "close the braces of the last definition",
        _in_body("", "return x", "y = x", "return x: f32", "return x: f32[M]", "return f(x)", "return x.T"),
    ),
    Mistake(
        "'=' gives a value a name; a comparison is '=='",
        "write a == b",
        _in_body("y = a = b", "y = (a = b", "y = f(x) = b", "y = x.T = b", "y = where((a = b"),
    ),
    Mistake("'==' compares; a value is given a name with '='", "write y = ...", _in_body("y == x")),
    Mistake(
        "only '+=' changes a value",
        "accumulate into an inout parameter with +=, or write y = y - x",
        _in_body("y - x", "y * x", "y / x", "y @ x"),
    ),
    Mistake(
        "a statement gives a value a name or returns it",
        "write y = f(x), or return f(x)",
        _in_body("f(x", "x.T", "x[", "1 + 2", "(x", "y x", "y }", "y\n z"),
    ),
    Mistake(
        "this typed value has no '='",
        "a typed assignment is y: bf16[M, N] = ...; the results of a return are separated by commas",
        _in_body("y: f32 }", "y: f32\n z", "y: f32[M] }", "y: f32[M]\n z", "y: f32[M],"),
    ),
    Mistake(
        "there is no power operator",
        "write x * x, or exp(y * log(x))",
        _in_expression("x ** 2", "x.T ** 2", "f(x) ** 2"),
    ),
    Mistake(
        "comparisons do not chain",
        "write where(a < b, b < c, false)",
        _in_expression("a < b < c", "a == b == c", "a < b == c"),
    ),
    Mistake(".T takes no parentheses", "write x.T", _in_expression("x.T()")),
    Mistake(
        "there is no '? :' operator",
        "write where(condition, a, b)",
        _in_expression("a ? b : c", "a > b ? c", "a > 1 ? c", "f(a) ? b", "(a) ? b"),
    ),
    Mistake(
        "axes are grouped with parentheses",
        "write [(B T), D]",
        ("program p(x: f32[[", "program p(x: f32[M, [", *_in_expression("rand(a, b, [[")),
    ),
    Mistake(
        "the static size of an axis is a number",
        "write (s=2 F); a symbolic size is declared with dim s = ...",
        ("program p(x: f32[s=F", "program p(x: f32[(s=F", "program p(x: f32[(B s=F"),
    ),
    Mistake(
        "axes are separated by ',' or grouped as in (B T)",
        "write [B, T] for two dims, [(B T)] for one dim of two axes",
        ("program p(x: f32[B T", "program p(x: f32[M, B T", "program p(x: f32[(B T) D"),
    ),
    Mistake("a group names axes only, separated by spaces", "write (B T)", ("program p(x: f32[(B, T",)),
)

CHARACTERS = {
    "%": "there is no remainder operator",
    "^": "there is no power operator: write x * x",
    '"': "there are no strings in the language",
    "'": "there are no strings in the language",
    "!": "'not equal' is !=",
    "&": "write where(a, b, false)",
}
