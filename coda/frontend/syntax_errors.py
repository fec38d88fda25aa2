"""Syntax errors in plain words: what stood there, what was expected, and for a common mistake how to mend it."""

from __future__ import annotations

from functools import lru_cache

from lark import Lark, Token, UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from coda.errors import Diagnostic, Source, Span
from coda.frontend.mistakes import CHARACTERS, MISTAKES, Mistake
from coda.frontend.syntax import KEYWORDS

WORDS = {"NAME": "a name", "NUMBER": "a number", "_SEP": "the end of the line", "$END": "the end of the file"}
BRACKETS = {"LPAR": "RPAR", "LSQB": "RSQB"}
STARTS_STATEMENT = {"RETURN", "DIM"}
# The many ways to begin or to continue an expression are summed up: where all of the first set could stand, those of
# the second go without saying.
SUMMARIES = (
    ({"NAME", "NUMBER", "LPAR", "MINUS"}, {"TRUE", "FALSE", "INF", "NAN", "PARTIAL"}, "an expression"),
    (
        {"PLUS", "MINUS", "STAR", "SLASH", "AT"},
        {"EQ", "NE", "LE", "GE", "LT", "GT", "LSQB", "LPAR", "DOT"},
        "an operator",
    ),
)


def explain(error: UnexpectedInput, source: Source, parser: Lark) -> Diagnostic:
    """The diagnostic for a syntax error."""
    if isinstance(error, UnexpectedCharacters):
        span = Span(error.line, error.column, error.line, error.column + 1)
        character = source.text[error.pos_in_stream]
        return Diagnostic(f"the character {character!r} has no meaning here", span, CHARACTERS.get(character))
    if not isinstance(error, UnexpectedToken):
        return Diagnostic(str(error))
    token, span = error.token, place(error.token, source)
    described = WORDS[token.type] if token.type in ("_SEP", "$END") else f"'{token}'"
    bracket = unclosed_bracket(source, parser, token)
    if bracket is not None:
        hint = f"the text goes on to {described} on line {span.line} before the bracket is closed"
        return Diagnostic(f"'{bracket}' is never closed", place(bracket, source), hint)
    mistake = known_mistakes(parser).get((error.state.position, token.type))
    if mistake is not None:
        return Diagnostic(mistake.message.format(token=described), span, mistake.hint)
    wanted = expected(error, parser)
    if wanted == "an expression" and token.type in STARTS_STATEMENT:
        return Diagnostic(f"the expression before {described} is not finished", span, "the line before ends too early")
    if str(token) in KEYWORDS and "NAME" in error.expected:
        return Diagnostic(f"'{token}' is a reserved word; expected {wanted}", span, "choose another name")
    return Diagnostic(f"unexpected {described}; expected {wanted}", span)


@lru_cache(maxsize=1)
def known_mistakes(parser: Lark) -> dict[tuple[int, str], Mistake]:
    """The parser state and token at which each example stops."""
    known: dict[tuple[int, str], Mistake] = {}
    for mistake in MISTAKES:
        for example in mistake.examples:
            try:
                parser.parse(example, start="module")
            except UnexpectedToken as error:
                known.setdefault((error.state.position, error.token.type), mistake)
    return known


def place(token: Token, source: Source) -> Span:
    """Where a token stands. The end of a file is behind its last word, the end of a line one character wide."""
    if token.type == "$END":
        lines = source.text.rstrip().splitlines() or [""]
        return Span(len(lines), len(lines[-1]) + 1, len(lines), len(lines[-1]) + 2)
    line, column = token.line or 1, token.column or 1
    if token.type == "_SEP":
        return Span(line, column, line, column + 1)
    return Span(line, column, token.end_line or line, token.end_column or column + 1)


def unclosed_bracket(source: Source, parser: Lark, stop: Token) -> Token | None:
    """The innermost bracket still open where the parser stopped, if what stands there can only be outside of it."""
    limit = len(source.text) if stop.type == "$END" else stop.start_pos or 0
    begins_line = not source.text[:limit].rpartition("\n")[2].strip()
    is_assignment = source.text[limit + len(stop) :].lstrip().startswith("=")
    starts_statement = stop.type in STARTS_STATEMENT or (stop.type == "NAME" and is_assignment)
    opened: list[Token] = []
    for token in parser.lex(source.text):
        if (token.start_pos or 0) >= limit:
            break
        if token.type in BRACKETS:
            opened.append(token)
        elif token.type in BRACKETS.values() and opened:
            opened.pop()
    if opened and stop.type in ("RPAR", "RSQB"):
        return opened[-1] if BRACKETS[opened[-1].type] != stop.type else None
    outside = stop.type in ("RBRACE", "$END", "PROGRAM", "FN", "EXTERN") or (begins_line and starts_statement)
    return opened[-1] if opened and outside else None


def expected(error: UnexpectedToken, parser: Lark) -> str:
    """What could have stood there, in words."""
    terminals = set(error.accepts or error.expected)
    words = []
    for members, implied, word in SUMMARIES:
        if members <= terminals:
            words.append(word)
            terminals -= members | implied
    words += sorted(WORDS.get(t) or f"'{parser.get_terminal(t).pattern.value}'".replace("\\", "") for t in terminals)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
