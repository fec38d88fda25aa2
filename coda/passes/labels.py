"""What a rewrite did: its label, and where. ``coda explain`` prints these; nothing is rewritten without one."""

from __future__ import annotations

from dataclasses import dataclass

from coda.errors import Span
from coda.ir import Node


@dataclass(frozen=True)
class Label:
    """``bitwise`` (``moved`` is None): the same bits for the same inputs. Else ``algebraic``: equal over the reals, and
    ``moved`` says which rounding or order of operations changed."""

    moved: str | None = None

    def __str__(self) -> str:
        return "bitwise" if self.moved is None else f"algebraic ({self.moved})"


BITWISE = Label()


@dataclass(frozen=True)
class Note:
    """One rewrite, or one that was refused: what happened, as a sentence, and at which place of the source."""

    rule: str
    sentence: str
    label: Label | None = BITWISE  # None: nothing was rewritten, and the sentence says why
    span: Span | None = None

    def __str__(self) -> str:
        place = f" (line {self.span.line})" if self.span else ""
        return f"{self.rule}: {self.sentence}{place} [{self.label or 'refused'}]"


def note(rule: str, sentence: str, label: Label | None, node: Node) -> Note:
    """A note at the place where the node was written."""
    return Note(rule, sentence, label, node.span)
