"""What a graph became: each product, what is in its kernel, or why it is not fused."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from coda.pytorch.masks import CAUSAL, NOTHING, TENSOR
from coda.pytorch.rewrite import Rewritten

MASKS = {CAUSAL: "causal, without a tensor", NOTHING: "that mask nothing, without a tensor", TENSOR: "read from memory"}
_listeners: list[list[Report]] = []


@contextlib.contextmanager
def listening() -> Iterator[list[Report]]:
    """The reports of what is compiled meanwhile."""
    found: list[Report] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners.remove(found)


@dataclass(frozen=True)
class Line:
    """One product."""

    name: str
    fused_with: tuple[str, ...] = ()
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or ', '.join(self.fused_with)}"


@dataclass
class Report:
    """The products of one graph, and the programs they are in, as the op gets them: texts and options. ``masks``: what
    the mask of each attention that has one says (``coda.pytorch.masks``)."""

    lines: list[Line] = field(default_factory=list)
    texts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()

    @property
    def unfused(self) -> list[Line]:
        return [x for x in self.lines if x.reason]

    @property
    def fused(self) -> list[Line]:
        return [x for x in self.lines if not x.reason]

    @classmethod
    def refused(cls, gm: fx.GraphModule, reason: str) -> Report:
        found = [n for n in gm.graph.nodes if n.op in ("call_function", "call_module") and "linear" in str(n.target)]
        return cls([Line(n.name, reason=reason) for n in found])

    @classmethod
    def of(cls, gm: fx.GraphModule, done: Rewritten, losses: Sequence[str] = (), masks: Sequence[str] = ()) -> Report:
        """``losses``: the products that became one operation with a loss."""
        lines = [Line(product, fused.others) for fused in done.fused for product in fused.products]
        lines += [Line(product, ("cross_entropy_loss",)) for product in losses]
        lines += [Line(product, reason=reason) for product, reason in done.refused.items()]
        texts, options = tuple(f.text for f in done.fused), tuple(f.options.text() for f in done.fused)
        return cls(lines, texts, options, tuple(masks))

    def publish(self, verbose: bool) -> None:
        for reports in _listeners:
            reports.append(self)
        if verbose:
            print(self)

    def __str__(self) -> str:
        total = len(self.lines)
        counted = f"{len(self.fused)} of {total} products fused"
        return "\n".join([*map(str, self.lines), *about_masks(self.masks), counted])


def about_masks(masks: Sequence[str]) -> list[str]:
    """A line, where attentions have masks."""
    count = Counter(masks)
    return ["attention masks: " + "; ".join(f"{count[m]} {MASKS[m]}" for m in MASKS if m in count)] if count else []
