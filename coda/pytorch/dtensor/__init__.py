"""Graphs on DTensors, as tensor parallelism makes them: their regions are found on the local parts."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from coda.pytorch.dtensor.local import localize
from coda.pytorch.dtensor.restore import restore
from coda.pytorch.dtensor.spread import hoist_spreads
from coda.pytorch.graph import capture
from coda.pytorch.report import Line, Report


def on_local_parts(gm: fx.GraphModule, rewritten: Callable[[fx.GraphModule], Report]) -> tuple[fx.GraphModule, Report]:
    """Dynamo's graph, captured with its regions ``rewritten`` on the local parts of its DTensors. Raises Refusal where
    it has to stay on DTensors as a whole."""
    local = localize(gm)
    try:
        captured = capture(local.gm)
        hoist_spreads(captured, local)
        report = rewritten(captured)
        restore(captured, local)
    finally:
        local.forget()
    report.lines += [Line(name, reason=reason) for name, reason in local.refused.items()]
    return captured, report
