"""What a user sees when the input is wrong: one diagnostic for each mistake, with its place in the source.

A ``Diagnostic`` is data; ``CodaError`` carries one or more of them and renders line, column and caret.
Reasons for which a kernel cannot be lowered or launched are sentences, not exceptions: see ``Reason``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Span:
    """A range of source text; lines and columns count from 1, the end column is exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class Source:
    """Program text with the name shown in messages (a path, or ``<string>``)."""

    text: str
    name: str = "<string>"

    def excerpt(self, span: Span) -> str:
        """The source line under a gutter with carets below the span."""
        lines = self.text.splitlines() or [""]
        index = min(max(span.line, 1), len(lines)) - 1
        text = lines[index].replace("\t", " ")
        end = span.end_column if span.end_line == span.line else len(text) + 1
        width = max(1, min(end, len(text) + 1) - span.column)
        gutter = f"{span.line:>5} | "
        return f"{gutter}{text}\n{' ' * (len(gutter) + span.column - 1)}{'^' * width}"


@dataclass(frozen=True)
class Diagnostic:
    """One mistake (or warning): what was wrong, where, and what to do about it."""

    message: str
    span: Span | None = None
    hint: str | None = None
    severity: str = "error"  # "error" or "warning"

    def render(self, source: Source | None = None) -> str:
        place = ""
        if source is not None:
            place = f"{source.name}:" + (f"{self.span.line}:{self.span.column}:" if self.span else "") + " "
        text = f"{place}{self.severity}: {self.message}"
        if source is not None and self.span is not None:
            text += "\n" + source.excerpt(self.span)
        return text + (f"\n  hint: {self.hint}" if self.hint else "")

    def to_json(self) -> dict:
        span = self.span
        return {
            "severity": self.severity,
            "message": self.message,
            "line": span.line if span else None,
            "column": span.column if span else None,
            "hint": self.hint,
        }


@dataclass
class CodaError(Exception):
    """The input is wrong. ``str()`` shows every diagnostic with its source excerpt."""

    diagnostics: list[Diagnostic] = field(default_factory=list)
    source: Source | None = None

    def __str__(self) -> str:
        return "\n".join(d.render(self.source) for d in self.diagnostics)

    @classmethod
    def of(cls, message: str, hint: str | None = None) -> CodaError:
        """An error with no place in a source text: a bad argument, a missing tool."""
        return cls([Diagnostic(message, hint=hint)])


@dataclass(frozen=True)
class Reason:
    """Why something cannot be lowered or launched, as a sentence a user can act on. Falsy on purpose:
    ``can_lower`` answers ``OK`` or a ``Reason``, and ``if can_lower(...)`` reads as it sounds."""

    text: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Ok:
    """The positive answer of ``can_lower``."""

    def __bool__(self) -> bool:
        return True


OK = Ok()


def did_you_mean(name: str, known: list[str] | set[str]) -> str | None:
    """A hint naming the closest known names, or None when nothing is close."""
    import difflib

    longer = sorted(k for k in known if k.startswith(f"{name}_"))  # gelu: not one that merely looks alike
    close = longer or difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    if not close:
        return None
    return "did you mean " + " or ".join(f"'{c}'" for c in close) + "?"
