"""Choices on disk: one small file for each program, sizes, device, driver and version of coda.

A file is written whole under another name and renamed, so that a reader sees an old choice, a new one or none, and the
last of several writers wins. What cannot be read, or was written by another version, is no choice.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path

from coda.build import cache
from coda.errors import CodaError
from coda.ir import Program
from coda.printer import print_program
from coda.resources import templates_dir
from coda.runtime.device import Device
from coda.target import Plan, Tile, parse_tile
from coda.target.legality import legal_tile
from coda.target.schedule import Schedule
from coda.version import __version__

FORMAT = 1  # of the files
EIGHTHS = 8  # sizes are told apart in steps of an eighth to a sixteenth
_UNSAVED: dict[str, Choice] = {}  # where the cache cannot be written


@dataclass(frozen=True)
class Timing:
    """Of one candidate: its median time, and the median of its ratios to the unfused way (to the first candidate,
    where there is no other way) with their quartiles."""

    ms: float
    ratio: float
    quartiles: tuple[float, float]


@dataclass(frozen=True)
class Choice:
    """What measuring a program led to. ``tile`` is the name of the best one, None where there are none to choose from;
    ``dropped`` says of each candidate that was not timed why."""

    program: str
    dims: Mapping[str, int]
    tile: str | None
    declined: bool
    unfused: str  # what ran it unfused: torch.compile or eager torch; else why nothing did
    fused_ms: float
    unfused_ms: float | None
    rounds: int
    timings: Mapping[str, Timing] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str | None:
        """Why not to fuse, as a sentence; None where the fused kernel wins."""
        if not self.declined or self.unfused_ms is None:
            return None
        sizes = ", ".join(f"{name}={size}" for name, size in self.dims.items())
        return (
            f"measured at {sizes}, fused kernels take {self.fused_ms:.4g} ms, {self.unfused} with separate kernels "
            f"{self.unfused_ms:.4g} ms"
        )

    def to_json(self) -> dict:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, document: dict) -> Choice:
        """Raises ValueError, KeyError or TypeError for what ``to_json`` did not write."""
        if document.pop("format") != FORMAT:
            raise ValueError("another format")
        if set(document) != {f.name for f in fields(cls)}:
            raise ValueError("other fields")
        timings = {n: Timing(t["ms"], t["ratio"], (*t["quartiles"],)) for n, t in document["timings"].items()}
        choice = replace(cls(**document), timings=timings)
        if not isinstance(choice.declined, bool) or not isinstance(choice.tile, str | None):
            raise TypeError("tile or declined")
        return choice


def bucket(size: int) -> int:
    """The size that stands for it: rounded up to a multiple of an eighth of the power of two below it, so that N = 6144
    and 28672 stay what they are and M = 8000 counts as 8192."""
    step = max(1, (1 << max(size, 1).bit_length() - 1) // EIGHTHS)
    return -(-size // step) * step


def dims_of(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that a program knows, by name."""
    symbols = dict.fromkeys(s.name for axis in program.axes for s in sorted(axis.size.free_symbols, key=str))
    return {name: sizes[name] for name in symbols if name in sizes}


def key(schedule: Schedule, sizes: Mapping[str, int], device: Device) -> str:
    """Everything a choice depends on. The program's name is no part of it: equal kernels of two blocks are one."""
    dims = {name: bucket(size) for name, size in dims_of(schedule.program, sizes).items()}
    return cache.content_key(
        {
            "program": text(schedule.program),
            "kernels": str(len(schedule.steps)),
            "chunks": f"{schedule.loop.axis}, {schedule.loop.width}" if schedule.loop else "",
            "dims": json.dumps(dims, sort_keys=True),
            "device": device.name,
            "driver": device.driver,
            "coda": __version__,
            "templates": _templates(),
            "format": str(FORMAT),
        }
    )


@lru_cache(maxsize=1024)
def text(program: Program) -> str:
    """A program but for its name."""
    return print_program(replace(program, name="kernel"))


@lru_cache(maxsize=1)
def _templates() -> str:
    folder = templates_dir()
    return cache.content_key({str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.h"))})


def folder(root: Path | None = None) -> Path:
    """Where choices lie: beside the artifacts."""
    return (root or cache.cache_root()) / "tuned"


def any_there(root: Path | None = None) -> bool:
    """Whether anything was ever tuned. To know for which GPU takes seconds: torch is imported for it."""
    return folder(root).is_dir()


def read(name: str, root: Path | None = None) -> Choice | None:
    """The choice under a key, if there is one that can be read."""
    if name in _UNSAVED:
        return _UNSAVED[name]
    try:
        return Choice.from_json(json.loads((folder(root) / f"{name}.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(name: str, choice: Choice, root: Path | None = None) -> bool:
    """Publish a choice. False where the cache cannot be written: then this process alone knows it."""
    place = folder(root)
    try:
        place.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=f".{name[:12]}-", dir=place)
        with os.fdopen(descriptor, "w") as file:
            json.dump(choice.to_json(), file, indent=1)
            file.flush()
            os.fsync(descriptor)
        Path(partial).chmod(0o644)
        Path(partial).rename(place / f"{name}.json")
    except OSError:
        _UNSAVED[name] = choice
        return False
    return True


def tile_for(plan: Plan, sizes: Mapping[str, int], device: Device) -> Tile | None:
    """The tile that was chosen for a kernel, if there is one, and it is still offered and legal (case N4)."""
    found = read(key(Schedule.of(plan), sizes, device))
    if found is None or found.tile is None:
        return None
    try:
        tile = parse_tile(found.tile)
    except CodaError:
        return None
    return tile if legal_tile(tile, plan) else None


def lock(name: str, root: Path | None = None) -> contextlib.AbstractContextManager[None]:
    """One process at a time (case N6: of several ranks one measures, the others wait and then find its choice). Where
    files cannot be locked, each measures for itself."""
    return cache.locked(folder(root) / f".{name}.lock")
