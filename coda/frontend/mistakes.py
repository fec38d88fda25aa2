"""Syntax errors in plain words: what stood there, what was expected, and for a common mistake how to mend it.

The common mistakes are a table of examples. A mistake is recognised by the parser's state and the kind of token it
stopped at, not by its text, so one example covers every program with that mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lark import Lark, Token, UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from coda.errors import Diagnostic, Source, Span

KEYWORDS = {"program", "fn", "dim", "return", "const", "inout", "true", "false", "inf", "nan"}
OPERATORS = {"PLUS", "MINUS", "STAR", "SLASH", "AT"}
COMPARISONS = {"EQ", "NE", "LE", "GE", "LT", "GT"}
STARTS_EXPRESSION = {"NAME", "NUMBER", "LPAR", "MINUS"}


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
        "a definition starts with 'program' or 'fn', not with {token}", "for example: program name(x: bf16[M, K]) { ... }",
        ("def p", "x = 1", "return x", "program p() { return x } x", "program p() { return x } return", "dim"),
    ),
    Mistake(
        "expected ':' between the parameter and its type, got {token}", "write it as x: bf16[M, D]",
        ("program p(x bf16", "program p(const x bf16"),
    ),
    Mistake(
        "the type lacks its dtype", "put one before the bracket, as in bf16[M, D]",
        ("program p(x: [", "program p(x: f32[M]) { y: [", "program p(x: f32[M]) { return x: [", "program p(x: f32[M]) { return f(x): ["),
    ),
    Mistake(
        "expected ',' before {token}", "parameters are separated by commas",
        ("program p(x: f32[M] w", "program p(x: f32 w", "program p(x: f32[M]? w", "program p(x: f32[M] const", "program p(x: f32[M] inout"),
    ),
    Mistake(
        "expected ',' or an operator before {token}", "the values in a list are separated by commas",
        _in_expression("f(a b", "f(1 b", "f(a, b c", "f(a, (b) c", "f(a.T b", "f(g(a) b", "f(a 1", "f(a, b 1"),
    ),
    Mistake(
        "expected '{{' before {token}", "the statements of a program stand in braces: program name(...) { ... }",
        tuple(f"program p(x: f32[M]) {t}" for t in ("return", "x", "dim", ":", "=")) + ("fn f(x) return", "fn f(x) x"),
    ),
    Mistake(
        "'}}' is missing before {token}", "close the braces of the definition before this one",
        _in_body(*(f"return x\n {t}" for t in ("program", "fn")), *(f"y = x\n {t}" for t in ("program", "fn")),
                 *(f"return x: f32[M]\n {t}" for t in ("program", "fn"))),
    ),
    Mistake(
        "'}}' is missing at the end of the file", "close the braces of the last definition",
        _in_body("", "return x", "y = x", "return x: f32", "return x: f32[M]", "return f(x)", "return x.T"),
    ),
    Mistake(
        "'=' gives a value a name; a comparison is '=='", "write a == b",
        _in_body("y = a = b", "y = (a = b", "y = f(x) = b", "y = x.T = b", "y = where((a = b"),
    ),
    Mistake("'==' compares; a value is given a name with '='", "write y = ...", _in_body("y == x")),
    Mistake(
        "only '+=' accumulates", "accumulate into an inout parameter with +=, or write y = y - x",
        _in_body("y - x", "y * x", "y / x", "y @ x"),
    ),
    Mistake(
        "a statement gives a value a name or returns it", "write y = f(x), or return f(x)",
        _in_body("f(x", "x.T", "x[", "1 + 2", "(x"),
    ),
    Mistake(
        "this typed value has no '='", "a typed assignment is y: bf16[M, N] = ...; results of a return are separated by commas",
        _in_body("y: f32 }", "y: f32\n z", "y: f32[M] }", "y: f32[M]\n z", "y: f32[M],"),
    ),
    Mistake(
        "there is no power operator", "write x * x, or exp(y * log(x))", _in_expression("x ** 2", "x.T ** 2", "f(x) ** 2"),
    ),
    Mistake(
        "comparisons do not chain", "write where(a < b, b < c, false)", _in_expression("a < b < c", "a == b == c", "a < b == c"),
    ),
    Mistake(".T takes no parentheses", "write x.T", _in_expression("x.T()")),
    Mistake(
        "there is no '? :' operator", "write where(condition, a, b)", _in_expression("a ? b : c", "a > b ? c", "f(a) ? b", "(a) ? b"),
    ),
    Mistake(
        "axes are grouped with parentheses", "write [(B T), D]",
        ("program p(x: f32[[", "program p(x: f32[M, [", *_in_expression("rand(a, b, [[")),
    ),
    Mistake(
        "the static size of an axis is a number", "write (s=2 F); a symbolic size is declared with dim s = ...",
        ("program p(x: f32[s=F", "program p(x: f32[(s=F", "program p(x: f32[(B s=F"),
    ),
    Mistake(
        "axes are separated by ',' or grouped as in (B T)", "write [B, T] for two dims, [(B T)] for one dim of two axes",
        ("program p(x: f32[B T", "program p(x: f32[M, B T", "program p(x: f32[(B T) D"),
    ),
    Mistake("a group names axes only, separated by spaces", "write (B T)", ("program p(x: f32[(B, T",)),
)  # fmt: skip

CHARACTERS = {
    "%": "there is no remainder operator",
    "^": "there is no power operator: write x * x",
    '"': "there are no strings in the language",
    "'": "there are no strings in the language",
    "!": "'not equal' is !=",
    "&": "write where(a, b, false)",
}


def explain(error: UnexpectedInput, source: Source, parser: Lark) -> Diagnostic:
    """The diagnostic for a syntax error."""
    if isinstance(error, UnexpectedCharacters):
        span = Span(error.line, error.column, error.line, error.column + 1)
        character = source.text[error.pos_in_stream]
        return Diagnostic(f"the character {character!r} has no meaning here", span, CHARACTERS.get(character))
    if not isinstance(error, UnexpectedToken):
        return Diagnostic(str(error))
    token = error.token
    span = _place(token, source)
    unclosed = _unclosed_bracket(source, parser, token)
    if unclosed is not None:
        return Diagnostic(
            f"{str(unclosed)!r} is never closed", _place(unclosed, source),
            f"the text goes on to {_describe(token, parser)} on line {span.line} before the bracket is closed",
        )  # fmt: skip
    mistake = _known_mistakes(parser).get((error.state.position, token.type))
    if mistake is not None:
        return Diagnostic(mistake.message.format(token=_describe(token, parser)), span, mistake.hint)
    expected = _expected(error, parser)
    if str(token) in KEYWORDS and "NAME" in error.expected:
        return Diagnostic(f"'{token}' is a reserved word; expected {expected}", span, "choose another name")
    return Diagnostic(f"unexpected {_describe(token, parser)}; expected {expected}", span)


@lru_cache(maxsize=1)
def _known_mistakes(parser: Lark) -> dict[tuple[object, str], Mistake]:
    """The parser state and token at which each example stops."""
    known: dict[tuple[object, str], Mistake] = {}
    for mistake in MISTAKES:
        for example in mistake.examples:
            try:
                parser.parse(example, start="module")
            except UnexpectedToken as error:
                known.setdefault((error.state.position, error.token.type), mistake)
    return known


def _place(token: Token, source: Source) -> Span:
    if token.type == "$END":
        lines = source.text.rstrip().splitlines() or [""]
        return Span(len(lines), len(lines[-1]) + 1, len(lines), len(lines[-1]) + 2)
    if token.type == "_SEP":
        return Span(token.line, token.column, token.line, token.column + 1)
    return Span(token.line, token.column, token.end_line, token.end_column)


def _unclosed_bracket(source: Source, parser: Lark, stop: Token) -> Token | None:
    """The innermost '(' or '[' still open where the parser stopped, if what stands there can only be outside it."""
    keyword = stop.type in {"PROGRAM", "FN", "RETURN", "DIM", "RBRACE", "$END"}
    if not keyword and stop.type not in {"EQUAL", "LBRACE"}:
        return None
    opened: list[Token] = []
    for token in parser.lex(source.text):
        if token.type != "_SEP" and stop.type != "$END" and token.start_pos >= stop.start_pos:
            break
        if token.type in ("LPAR", "LSQB"):
            opened.append(token)
        elif token.type in ("RPAR", "RSQB") and opened:
            opened.pop()
    if not opened or not keyword and opened[-1].line == stop.line:
        return None
    return opened[-1]


def _word(terminal: str, parser: Lark) -> str:
    """A kind of token as a reader would call it."""
    words = {"NAME": "a name", "NUMBER": "a number", "_SEP": "the end of the line", "$END": "the end of the file"}
    return words.get(terminal) or f"'{parser.get_terminal(terminal).pattern.value.replace(chr(92), '')}'"


def _describe(token: Token, parser: Lark) -> str:
    return _word(token.type, parser) if token.type in ("_SEP", "$END") else f"'{token}'"


def _expected(error: UnexpectedToken, parser: Lark) -> str:
    """What could have stood there, with the many ways to begin or continue an expression summed up."""
    terminals = set(error.accepts or error.expected)
    words = []
    for members, word in ((STARTS_EXPRESSION, "an expression"), (COMPARISONS | OPERATORS, "an operator")):
        if members <= terminals:
            words.append(word)
            terminals -= members | ({"TRUE", "FALSE", "INF", "NAN"} if word == "an expression" else {"LSQB", "DOT"})
    words += sorted(_word(t, parser) for t in terminals)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
