"""Device code in units: each is compiled alone, so that a machine compiles as many at once as it has cores and a
kernel that several artifacts hold is compiled once.

A unit is one variant of a GEMM or all variants of a row kernel. The finish kernels of a GEMM ride with its first
variant: they cost almost nothing beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coda.target.emit import device_source
from coda.target.emit_rows import row_source
from coda.target.plan import Finishing
from coda.target.rowplan import RowPlan
from coda.target.schedule import Assembly, Kernel


@dataclass(frozen=True)
class Unit:
    """One translation unit; it is named after its first kernel."""

    symbols: tuple[str, ...]
    text: str

    @property
    def file(self) -> str:
        return f"{self.symbols[0]}.cu"


def units(assemblies: Sequence[Assembly]) -> list[Unit]:
    """The device code of an artifact, in the order of its steps."""
    return [unit for a in assemblies for step in a.schedule.steps for unit in _of_step(a, step)]


def finish_symbol(plan: Kernel, finishing: Finishing) -> str:
    return f"{plan.name}_finish_{finishing.label}"


def _of_step(assembly: Assembly, step: Kernel) -> Iterator[Unit]:
    finishes = tuple(finish_symbol(step, f) for f in step.finishings)
    if isinstance(step, RowPlan):
        yield Unit((*(v.symbol for v in step.variants), *finishes), row_source(step))
        return
    members = assembly.schedule.members[assembly.schedule.steps.index(step)]
    for i, variant in enumerate({v.symbol: v for v in assembly.built_of(step)}.values()):  # whatever the order of tiles
        symbols = (variant.symbol, *finishes) if i == 0 else (variant.symbol,)
        yield Unit(symbols, device_source(step, [variant], finish=i == 0, members=members))
