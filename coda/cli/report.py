"""The report of ``coda explain``: programs as launches, with costs, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from coda.cli import planview, rowview
from coda.cli.common import human_bytes, table
from coda.cli.launches import FREE, Launch, call_launch, known, launches
from coda.cost import Cost, Gpu, cost
from coda.errors import CodaError
from coda.ir import Node, Program
from coda.passes import fuse
from coda.passes.labels import Note
from coda.passes.segments import has_calls, segments
from coda.target import TILES, Tile, parse_tile, rank_in
from coda.target.blocks import Lowered
from coda.target.chunks import lower_along
from coda.target.plan import Plan
from coda.target.rowplan import RowPlan
from coda.target.schedule import Kernel, Loop
from coda.tuning.use import declined_here, tiles_here

WAYS = {
    "fused": "one kernel",
    "two_kernels": "product, then one kernel",
    "one_by_one": "one kernel for each operation",
}


@dataclass(frozen=True)
class Side:
    """A program as launches, or why it has none."""

    program: Program
    sizes: Mapping[str, int]
    formulas: Cost
    lowered: tuple[Lowered, ...]  # one, or one for each segment between opaque calls
    tiles: Mapping[str, Tile]  # of GEMMs, by name
    launches: tuple[Launch, ...]
    refusal: str | None = None  # why the kernels would not take these sizes
    reason: CodaError | None = None  # why there is no kernel
    declined: str | None = None  # why `coda.compile` runs separate kernels at these sizes: they were measured here

    @classmethod
    def of(cls, program: Program, sizes: Mapping[str, int], tile: str | None = None, chunk: str | None = None) -> Side:
        """``chunk``: the axis in whose chunks the kernels run, if they do."""
        formulas = cost(program)
        if has_calls(program):
            return cls.joined(program, sizes, formulas, tile)
        try:
            lowered = lower_along(program, chunk, sizes=sizes)
        except CodaError as error:  # what it costs can be told all the same
            return cls(program, sizes, formulas, (), {}, (), reason=error)
        gemms = lowered.schedule.gemms
        measured = {} if tile else tiles_here(lowered.schedule, sizes)
        ranked = {plan.name: parse_tile(tile) if tile else rank_in(lowered.schedule, plan, sizes)[0] for plan in gemms}
        tiles = ranked | measured
        tiles = {plan.name: tiles[lowered.schedule.leader(plan).name] for plan in gemms}
        declined = None if tile else declined_here(lowered.schedule, sizes)
        refusal = None
        if all(known(size, sizes) is not None for arg in lowered.schedule.args for size in arg.dims):
            refusal = planview.refusal(lowered.schedule, sizes, next(iter(tiles.values()), TILES[0]))
        steps = tuple(launches(lowered, tiles))
        return cls(program, sizes, formulas, (lowered,), tiles, steps, refusal, declined=declined)

    @classmethod
    def joined(cls, program: Program, sizes: Mapping[str, int], formulas: Cost, tile: str | None) -> Side:
        """A program with opaque calls: its segments, and the calls between them."""
        found = []
        for part in segments(fuse(program).forward):
            if isinstance(part, Program):
                found.append(cls.of(part, sizes, tile))
            else:
                found.append(cls(part.program, sizes, formulas, (), {}, (call_launch(part.program),)))
        return cls(
            program, sizes, formulas,
            lowered=tuple(x for side in found for x in side.lowered),
            tiles={name: t for side in found for name, t in side.tiles.items()},
            launches=tuple(x for side in found for x in side.launches),
            refusal=next((side.refusal for side in found if side.refusal), None),
            reason=next((side.reason for side in found if side.reason), None),
            declined=next((side.declined for side in found if side.declined), None),
        )  # fmt: skip

    @property
    def notes(self) -> tuple[Note, ...]:
        """What the passes did that cut it into kernels."""
        return tuple(n for lowered in self.lowered for n in lowered.notes if n.rule != "partition")

    @property
    def steps(self) -> tuple[Kernel, ...]:
        return tuple(step for lowered in self.lowered for step in lowered.schedule.steps)

    @property
    def kernels(self) -> list[Launch]:
        """The launches that are kernels of ours: opaque functions move and compute what nobody here knows."""
        return [launch for launch in self.launches if launch.kind != "opaque"]

    def count(self) -> Counter[str]:
        """The launches of each kind."""
        count: Counter[str] = Counter()
        for launch in self.launches:
            here = known(launch.count, self.sizes)  # of the chunks of an axis of no known size, one
            count[launch.kind] += 1 if here is None else here
        return count

    def moved(self) -> int | None:
        """The bytes that all kernels move; None where a size is not known."""
        return _total([known(launch.bytes, self.sizes) for launch in self.kernels])

    def seconds(self, gpu: Gpu) -> float | None:
        """The sum of the floors of the kernels, which run one after the other."""
        return _total([launch.seconds(self.sizes, gpu) for launch in self.kernels])

    def whole(self, measured: Mapping[str, float]) -> float | None:
        """The milliseconds of all kernels together."""
        return _total([measured.get(x.schedule.program.name) for x in self.lowered]) if self.lowered else None

    def plan(self, step: Kernel) -> dict[str, Any]:
        if isinstance(step, RowPlan):
            return rowview.document(step)
        return planview.document(step, self.tiles[step.name])

    def plan_text(self, step: Plan | RowPlan) -> list[str]:
        return rowview.text(step) if isinstance(step, RowPlan) else planview.text(step, self.tiles[step.name])

    def operations(self) -> list[dict[str, Any]]:
        """Each operation: its result, where it was written, the kernel it runs in, and why not in a product's."""
        if self.launches:
            return [_operation(n, x.program, x.name, x.reason) for x in self.launches for n in x.operations]
        reason = self.reason.diagnostics[0].message if self.reason else None
        return [_operation(n, self.program, None, reason) for n in self.program.nodes() if n.op not in FREE]

    def document(self, gpu: Gpu, measured: Mapping[str, float]) -> dict[str, Any]:
        """The side as JSON. Numbers are None where a size is not known. ``measured``: milliseconds, where there are."""
        numbers, moved, seconds = self.formulas.at(self.sizes), self.moved(), self.seconds(gpu)
        plans = {step.name: self.plan(step) for step in self.steps}
        unfused = known(self.formulas.one_by_one, self.sizes)
        return {
            "kernel": next(iter(plans.values())) if len(plans) == 1 else None,
            "kernels": [
                x.document(self.sizes, gpu) | {"measured_ms": measured.get(x.name), "plan": plans.get(x.name)}
                for x in self.launches
            ],
            "launches": self.count().total(),
            "between": {t.name: f"{t.dtype}[{', '.join(t.axes)}]" for t in self.temporaries},
            "totals": {
                "launches": dict(self.count()),
                "flops": known(self.formulas.flops, self.sizes),
                "bytes_fused": moved if self.launches else None,
                "bytes_unfused": unfused,
                "floor_ms": _milliseconds(seconds) if self.launches else None,
                "measured_ms": self.whole(measured),
            },
            "operations": self.operations(),
            "refusal": self.refusal,
            "declined": self.declined,
            "reason": self.reason.diagnostics[0].message if self.reason else None,
            "formulas": {f.name: str(getattr(self.formulas, f.name)) for f in fields(Cost)},
            "values": {f.name: known(getattr(self.formulas, f.name), self.sizes) for f in fields(Cost)},
            "floor_ms": {w: _milliseconds(numbers.seconds(w, gpu)) if numbers.is_number else None for w in WAYS},
        }

    @property
    def temporaries(self) -> tuple[Any, ...]:
        return tuple(t for lowered in self.lowered for t in lowered.schedule.temporaries)

    def text(self, gpu: Gpu, measured: Mapping[str, float]) -> list[str]:
        lines = []
        for schedule, step in [(x.schedule, step) for x in self.lowered for step in x.schedule.steps]:
            leader = schedule.leader(step)
            shared = "" if leader is step else f", in the launch of {leader.name}"
            lines += [f"  {step.name}{shared}"] if len(self.steps) > 1 else []
            lines += self.plan_text(step)
        lines += [_loop_text(x.schedule.loop) for x in self.lowered if x.schedule.loop]
        lines += [f"  refused at these sizes: {self.refusal}"] if self.refusal else []
        lines += [f"  not fused by coda.compile: {self.declined}"] if self.declined else []
        lines += ["not lowered:", str(self.reason)] if self.reason is not None else []
        lines += self._elsewhere()
        costs = self._costs(gpu, measured) if self.formulas.at(self.sizes).is_number else self._formulas()
        return [*lines, "", *costs]

    def _elsewhere(self) -> list[str]:
        """The operations that no kernel with a product hosts, and why."""
        if not any(x.kind == "gemm" for x in self.launches):
            return []
        return [line for x in self.launches if x.reason for line in
                (f"  {x.name} is a kernel of its own: {x.reason}", *(f"    {s}" for s in x.statements))]  # fmt: skip

    def _costs(self, gpu: Gpu, measured: Mapping[str, float]) -> list[str]:
        numbers, moved, seconds = self.formulas.at(self.sizes), self.moved(), self.seconds(gpu)
        several = len(self.launches) > 1
        rows: list[tuple[str, ...]] = [("", "GFLOP", "bytes moved", f"floor on {gpu.name}", "measured here")]
        for x in self.launches if several else ():
            flops, bytes_ = (known(f, self.sizes) or 0 for f in (x.flops, x.bytes))
            rows.append(_row(x.name, flops, bytes_, x.seconds(self.sizes, gpu), measured.get(x.name)))
        if self.launches and moved is not None and seconds is not None:
            title = (
                WAYS["fused"] if not several else "all of them" if self.kernels == [*self.launches] else "our kernels"
            )
            rows.append(_row(title, numbers.flops, moved, seconds, self.whole(measured)))
        products = sum(n.op == "dot" for n in self.program.nodes())
        for way in ("two_kernels", "one_by_one") if products == 1 and len(self.steps) < 2 else ("one_by_one",):
            rows.append(_row(WAYS[way], 0, float(getattr(numbers, way)), numbers.seconds(way, gpu)))
        shown = [i for i in range(5) if (several or i != 1) and (measured or i != 4)]
        rates = f"{gpu.bf16_flops / 1e12:.0f} TFLOP/s and {gpu.bytes_per_second / 1e12:.2f} TB/s"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.count().items())
        text = table([tuple(row[i] for i in shown) for row in rows])
        footer = f"  {float(numbers.flops) / 1e9:.1f} GFLOP; floors at {rates}, as measured"
        return [text, *([f"  launches: {kinds}"] if several else []), footer]

    def _formulas(self) -> list[str]:
        rows = [("operations", str(self.formulas.flops))]
        if len(self.launches) > 1:
            rows += [(f"bytes, {x.name}", str(x.bytes)) for x in self.launches]
            rows.append((f"bytes, {WAYS['one_by_one']}", str(self.formulas.one_by_one)))
        else:
            rows += [(f"bytes, {title}", str(getattr(self.formulas, way))) for way, title in WAYS.items()]
        sizes = ",".join(f"{axis.name}=4096" for axis in self.program.free_axes)
        return [table(rows), f"  give all sizes for numbers, as in --dims {sizes}"]


@dataclass(frozen=True)
class Report:
    """What is known of a program, and of its backward where that is wanted."""

    name: str
    dims: Mapping[str, int]
    gpu: Gpu
    sides: tuple[Side, ...]
    notes: tuple[Note, ...]
    measured: Mapping[str, float] = field(default_factory=dict)  # milliseconds of kernels, and of programs

    @property
    def lowered(self) -> list[Lowered]:
        return [lowered for side in self.sides for lowered in side.lowered]

    def document(self) -> dict[str, Any]:
        forward, *backward = (side.document(self.gpu, self.measured) for side in self.sides)
        notes = [{"rule": n.rule, "sentence": n.sentence, "label": str(n.label) if n.label else None,
                  "line": n.span.line if n.span else None} for n in self.notes]  # fmt: skip
        document = {"program": self.name, "dims": dict(self.dims), "gpu": self.gpu.name, **forward, "rewrites": notes}
        return document | ({"backward": {"program": self.sides[1].program.name, **backward[0]}} if backward else {})

    def text(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.dims.items())
        lines = [self.name + (f" at {sizes}" if sizes else ""), *self.sides[0].text(self.gpu, self.measured)]
        for side in self.sides[1:]:
            lines += ["", side.program.name, *side.text(self.gpu, self.measured)]
        lines += ["", "rewrites", *(f"  {note}" for note in dict.fromkeys(map(str, self.notes)))] if self.notes else []
        return "\n".join(lines)


def _loop_text(loop: Loop) -> str:
    return f"  kernels over {loop.part} run once for each chunk of {loop.width} along {loop.axis}"


def _operation(node: Node, program: Program, kernel: str | None, reason: str | None) -> dict[str, Any]:
    span = node.span
    return {
        "operation": node.op.removeprefix("reduce_"),
        "result": dict(program.names).get(node),
        "type": str(node.type),
        "line": span.line if span else None,
        "column": span.column if span else None,
        "kernel": kernel,
        "reason": reason,
    }


def _total(numbers: list[Any]) -> Any:
    return None if None in numbers else sum(numbers)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _row(
    title: str, flops: float, moved: float, seconds: float | None, measured: float | None = None
) -> tuple[str, ...]:
    times = ("" if ms is None else f"{ms:.3f} ms" for ms in (_milliseconds(seconds), measured))
    return title, f"{float(flops) / 1e9:.1f}" if flops else "", human_bytes(moved), *times
