"""Choices where programs are compiled and called."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coda.errors import CodaError, did_you_mean
from coda.ir import Program
from coda.passes.numbers import with_head_sizes
from coda.runtime.device import capturing, current_device
from coda.target import Tile
from coda.target.schedule import Schedule
from coda.tuning import choice as choices
from coda.tuning.tune import tiles_of, tune

MODES = (True, False, "cached")
Mode = bool | str


@dataclass
class Tuning:
    """How a program uses what was measured. ``mode``: "cached" uses choices that were made before; True makes them, at
    the sizes of the first call; False knows of none. ``lower`` makes the kernels of a program."""

    lower: Callable[[Program], Schedule]
    mode: Mode = "cached"
    _schedules: dict[Program, Schedule | None] = field(default_factory=dict, repr=False)
    _tuned: set[Program] = field(default_factory=set, repr=False)
    _reasons: dict[tuple, str | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            hint = did_you_mean(str(self.mode), {"cached"}) or "one of True, False, 'cached'"
            raise CodaError.of(f"tune is {self.mode!r}", hint)

    def tiles(self, schedule: Schedule, sizes: Mapping[str, int]) -> Mapping[str, Tile]:
        """The tile of each kernel that has been measured; nothing of the others."""
        device = current_device()
        if self.mode is False or device is None:
            return {}
        self._measure(schedule, sizes)
        return tiles_of(schedule, sizes, device)

    def declined(self, program: Program, sizes: Mapping[str, int]) -> str | None:
        """The sentence why the program is not to be fused at these sizes; None where it is, or nobody knows."""
        device = current_device()
        if self.mode is False or device is None:
            return None
        key = (program, device, *sorted(sizes.items()))
        if key not in self._reasons:
            schedule = self._lowered(with_head_sizes(program, sizes))
            if schedule is not None:
                self._measure(schedule, sizes)
            found = choices.read(choices.key(schedule, sizes, device)) if schedule is not None else None
            self._reasons[key] = found.reason if found else None
        return self._reasons[key]

    def _lowered(self, program: Program) -> Schedule | None:
        """Its kernels; None where it has none, which then cannot lose."""
        if program not in self._schedules:
            try:
                self._schedules[program] = self.lower(program)
            except CodaError:
                self._schedules[program] = None
        return self._schedules[program]

    def _measure(self, schedule: Schedule, sizes: Mapping[str, int]) -> None:
        """Once for a program, as soon as all sizes are known: each sequence length would take minutes of its own. What
        cannot be measured runs as if nobody had asked, after a warning."""
        wanted = self.mode is True and schedule.program not in self._tuned
        if not wanted or any(axis.name not in sizes for axis in schedule.program.free_axes) or capturing():
            return
        self._tuned.add(schedule.program)
        try:
            tune(schedule, sizes)
        except CodaError as error:
            warnings.warn(f"'{schedule.name}' is not tuned: {error.diagnostics[0].message}", stacklevel=2)


def tiles_here(schedule: Schedule, sizes: Mapping[str, int]) -> dict[str, Tile]:
    """The tiles that were chosen for kernels at these sizes on this machine's GPU."""
    device = current_device() if choices.any_there() else None
    return {} if device is None else tiles_of(schedule, sizes, device)


def declined_here(schedule: Schedule, sizes: Mapping[str, int]) -> str | None:
    """Why a program is not fused at these sizes on this machine's GPU; None where it is, or nobody knows."""
    device = current_device() if choices.any_there() else None
    found = choices.read(choices.key(schedule, sizes, device)) if device is not None else None
    return found.reason if found else None
