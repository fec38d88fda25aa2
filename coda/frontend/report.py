"""How the checker tells mistakes: all of a file's, each once."""

from __future__ import annotations

from dataclasses import dataclass, field

from coda.errors import Diagnostic, Source, Span


class Failed(Exception):
    """Something could not be checked; its error is already reported."""


@dataclass
class Report:
    """The diagnostics of one source text; the same mistake at the same place is told once."""

    source: Source
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def error(self, message: str, span: Span | None, hint: str | None = None) -> Failed:
        """Report an error; the caller raises the result to leave what cannot be checked further."""
        self._add(Diagnostic(message, span, hint))
        return Failed(message)

    def warn(self, message: str, span: Span | None, hint: str | None = None) -> None:
        self._add(Diagnostic(message, span, hint, "warning"))

    def _add(self, diagnostic: Diagnostic) -> None:
        if diagnostic not in self.diagnostics:
            self.diagnostics.append(diagnostic)

    def of(self, severity: str) -> list[Diagnostic]:
        found = [d for d in self.diagnostics if d.severity == severity]
        return sorted(found, key=lambda d: (d.span.line, d.span.column) if d.span else (0, 0))
