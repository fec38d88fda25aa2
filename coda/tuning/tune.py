"""Tuning a program: each of its products by itself, then the whole against separate kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coda import build
from coda.build.compile import CORES
from coda.errors import CodaError
from coda.ir import Program
from coda.runtime.binding import bind
from coda.runtime.device import Device, current_device
from coda.target import Tile, candidates
from coda.target.schedule import Assembly, Schedule
from coda.tuning import choice as choices
from coda.tuning.child import Job, Outcome, measure
from coda.tuning.choice import Choice, Timing
from coda.tuning.decide import UNFUSED, decide

ROUNDS = 50  # of timing, at most
SECONDS = 60.0  # of timing, at most, for all kernels of a program
WHOLE = "as chosen"  # the candidate of a program whose kernels' tiles were chosen one by one
Say = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """What is measured at once: a kernel at several tiles, or a program as it is built (no tiles)."""

    schedule: Schedule
    sizes: Mapping[str, int]
    tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True)
class Report:
    """The choices for a program: of each of its products, then of the whole (of one kernel, that is the same). Why some
    kernels were not measured by themselves is ``left_out``."""

    choices: tuple[Choice, ...]
    saved: bool  # on disk
    left_out: Mapping[str, str]

    @property
    def whole(self) -> Choice:
        return self.choices[-1]


def tune(
    schedule: Schedule,
    dims: Mapping[str, int],
    *,
    jobs: int | None = None,
    seconds: float = SECONDS,
    again: bool = False,
    say: Say | None = None,
) -> Report:
    """Measure the kernels of a program at these sizes on the current GPU, and keep the choices. What was measured
    before is not measured again, unless ``again``. ``jobs`` kernels are compiled at a time; ``seconds`` is how long to
    time at most, for all kernels together.

    Raises CodaError where there is no GPU or no compiler, a size is not known, or no candidate works.
    """
    device = this_device()
    say = say or (lambda message: None)
    studies = studies_of(schedule, known_sizes(schedule.program, dims))
    found: list[Choice] = []
    left_out: dict[str, str] = {}
    saved = True
    for study in studies:
        key = choices.key(study.schedule, study.sizes, device)
        with choices.lock(key):
            known = None if again else choices.read(key)
            if known is None:
                try:
                    known = measured(study, device, jobs or CORES, seconds / len(studies), say)
                except CodaError as error:
                    if study is studies[-1]:
                        raise
                    left_out[study.schedule.name] = error.diagnostics[0].message  # the whole is built without a choice
                    continue
                saved = choices.write(key, known) and saved
            found.append(known)
    return Report(tuple(found), saved, left_out)


def this_device() -> Device:
    """The GPU that is tuned for. Raises CodaError where there is none."""
    device = current_device()
    if device is None:
        raise CodaError.of("tuning measures kernels on an sm_90 GPU, and there is none here",
                           "run it where the kernels are to run; `coda doctor` shows what is found")  # fmt: skip
    return device


def known_sizes(program: Program, dims: Mapping[str, int]) -> dict[str, int]:
    """All sizes of a program. Raises CodaError for those that do not follow from ``dims``, which may tell more."""
    sizes = bind(program, {}, choices.dims_of(program, dims))
    missing = [axis.name for axis in program.free_axes if axis.name not in sizes]
    if missing:
        raise CodaError.of(f"the sizes of {', '.join(missing)} are not known", "give them with --dims")
    return sizes


def studies_of(schedule: Schedule, sizes: Mapping[str, int]) -> list[Study]:
    """Each product at its candidates; then, where there is more than that, all kernels together."""
    known = schedule.with_chunk(sizes)
    studies = {
        choices.text(plan.program): Study(
            Schedule.of(plan), choices.dims_of(plan.program, known), tuple(candidates(plan, known))
        )
        for plan in schedule.gemms
    }
    whole = Study(schedule, choices.dims_of(schedule.program, sizes))
    return [*studies.values(), *([whole] if len(schedule.steps) > 1 or not studies else [])]


def built(study: Study, device: Device, jobs: int, say: Say) -> tuple[dict[str, Path], dict[str, str]]:
    """The libraries of the candidates, by name, and why those that are missing cannot be built. Candidates that share
    their device code are built one after the other: it is compiled once."""
    if not study.tiles:
        chosen = tiles_of(study.schedule, study.sizes, device)
        return {WHOLE: build.library(study.schedule, None, study.sizes, build.DEFAULT_ARCH, say, chosen)}, {}
    (plan,) = study.schedule.gemms
    libraries: dict[str, Path] = {}
    dropped: dict[str, str] = {}

    def build_all(tiles: list[Tile]) -> None:
        for tile in tiles:
            assembly = Assembly(study.schedule, tuple(build.variants_of(plan, [tile])))
            try:
                libraries[tile.name] = build.cached(assembly, build.DEFAULT_ARCH, say)
            except CodaError as error:
                dropped[tile.name] = error.diagnostics[0].message

    by_kernel = itertools.groupby(sorted(study.tiles, key=lambda t: t.kernel), key=lambda t: t.kernel)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(build_all, [list(tiles) for _, tiles in by_kernel]))
    return {t.name: libraries[t.name] for t in study.tiles if t.name in libraries}, dropped


def tiles_of(schedule: Schedule, sizes: Mapping[str, int], device: Device) -> dict[str, Tile]:
    """The tiles that were chosen for products of a program, by kernel; what was not measured is missing."""
    known = schedule.with_chunk(sizes)
    found = {plan.name: choices.tile_for(plan, known, device) for plan in schedule.gemms}
    return {name: tile for name, tile in found.items() if tile is not None}


def measured(study: Study, device: Device, jobs: int, seconds: float, say: Say) -> Choice:
    """Build, check and time the candidates of a study, and conclude. Raises CodaError where none works."""
    libraries, dropped = built(study, device, jobs, say)
    if not libraries:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in dropped.items())
        raise CodaError.of(f"'{study.schedule.name}': no candidate can be built: {reasons}")
    job = Job(study.sizes, {name: str(path) for name, path in libraries.items()}, ROUNDS, seconds)
    return concluded(study, measure(job, say), dropped)


def concluded(study: Study, outcome: Outcome, dropped: Mapping[str, str]) -> Choice:
    """What the measurements say."""
    decision = decide(outcome.timings)
    dropped = {**dropped, **outcome.dropped}
    best, other = outcome.timings[decision.candidate], outcome.timings.get(UNFUSED)
    return Choice(
        program=study.schedule.name,
        dims=dict(study.sizes),
        tile=decision.candidate if study.tiles else None,
        declined=decision.declined,
        unfused=outcome.unfused if other else dropped.pop(UNFUSED),
        fused_ms=best.median_ms,
        unfused_ms=other.median_ms if other else None,
        rounds=best.rounds,
        timings={n: Timing(m.median_ms, m.ratio, m.ratio_quartiles) for n, m in outcome.timings.items()},
        dropped=dropped,
    )
