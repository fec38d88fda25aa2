"""``coda.explain(model, *inputs)``: what ``torch.compile(model, backend="coda")`` would fuse, and what not, and why.
``coda.optimize(model, *inputs)``: the same, and then it is done."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx, nn

from coda.errors import CodaError
from coda.pytorch.backend import coda
from coda.pytorch.config import Config
from coda.pytorch.report import Line, Report, about_masks, listening


@dataclass(frozen=True)
class ModelReport:
    """The products of a model in all its graphs, and the programs they are in."""

    graphs: tuple[Report, ...]

    @property
    def lines(self) -> list[Line]:
        return [line for graph in self.graphs for line in graph.lines]

    @property
    def fused(self) -> int:
        return sum(not line.reason for line in self.lines)

    @property
    def total(self) -> int:
        return len(self.lines)

    @property
    def masks(self) -> list[str]:
        """What the mask of each attention that has one says."""
        return [mask for graph in self.graphs for mask in graph.masks]

    @property
    def programs(self) -> list[str]:
        """The texts of the different programs."""
        return list(dict.fromkeys(text for graph in self.graphs for text in graph.texts))

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        lines = [{"product": x.name, "fused_with": list(x.fused_with), "reason": x.reason} for x in self.lines]
        counts = {"fused": self.fused, "total": self.total, "masks": dict(Counter(self.masks))}
        return {**counts, "products": lines, "programs": self.programs}

    def __str__(self) -> str:
        from coda.cli.common import table

        rows = [(x.name, "-" if x.reason else "fused", x.reason or ", ".join(x.fused_with)) for x in self.lines]
        products = table([("product", "", "with, or why not"), *rows])
        return "\n".join([products, *about_masks(self.masks), f"{self.fused} of {self.total} products fused"])


def explain(model: Callable[..., Any], *inputs: Any, **named: Any) -> ModelReport:
    """Compile a model for these inputs, run it once, and report. The options of the backend are its defaults."""
    return _report(model, inputs, named, {})


def optimize(
    model: nn.Module, *inputs: Any, dry: bool = False, options: Mapping[str, Any] | None = None, **named: Any
) -> ModelReport:
    """Compile a module in place: calls of it, and of what contains it, run its programs from now on.

    ``inputs`` are those of a call; the report says what becomes of each product for them, before any kernel is built.
    With ``dry`` nothing but the report is made. ``options`` are those of the backend (``coda.pytorch.config``).
    """
    if not isinstance(model, nn.Module):
        raise CodaError.of(
            f"coda.optimize takes a module, not a {type(model).__name__}", "torch.compile(function, backend='coda')"
        )
    chosen = asdict(Config.of(options))
    report = _report(model, inputs, named, chosen)
    if not dry:
        model.compile(backend="coda", options=chosen)
    return report


def _report(
    model: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any], options: Mapping[str, Any]
) -> ModelReport:
    """What one call compiles."""

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Another one each time: what was compiled before is compiled again, and is not used later."""
        return coda(gm, examples, options={**options, "inductor": False})

    with listening() as graphs:
        torch.compile(model, backend=backend)(*inputs, **named)
    return ModelReport(tuple(graphs))


def explain_named(name: str) -> ModelReport:
    """The report of ``module:factory``, a function that returns a model and its inputs: a tuple, or a dict by name."""
    module, _, factory = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), factory)()
    except (ImportError, AttributeError) as error:
        raise CodaError.of(f"there is no model '{name}': {error}", "name a function as module:factory") from None
    if not (isinstance(made, Sequence) and len(made) == 2):
        raise CodaError.of(f"'{name}' returns a {type(made).__name__}", "return a model and its inputs: (model, (x,))")
    model, inputs = made
    return explain(model, **inputs) if isinstance(inputs, dict) else explain(model, *inputs)
