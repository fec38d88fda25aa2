"""``coda explain --measure``: how long each kernel of a program takes on this GPU, and all of them together.

Each step runs as a program of its own, on random operands that are not in the L2; its time includes its finish
kernels, and sums that it finds unfinished in the whole program are finished here. A step of a loop is timed on one
chunk, and counts once for each. Everything is timed in the same interleaved rounds (``coda.runtime.timing``), the
whole program among it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coda.errors import CodaError
from coda.ir import Program
from coda.runtime.device import current_device
from coda.runtime.timing import Call, CudaTimer, Timer, interleave, rotating, rotation
from coda.target import Tile
from coda.target.blocks import Lowered

ROUNDS, SECONDS = 50, 20.0
DEVICE = "cuda"


def measure(lowered: Sequence[Lowered], sizes: Mapping[str, int], tiles: Mapping[str, Tile]) -> dict[str, float]:
    """The median milliseconds of each step, and of each whole program, by name. Raises CodaError where there is no GPU,
    or a size is not known."""
    if current_device() is None:
        raise CodaError.of(
            "--measure times kernels on an sm_90 GPU, and there is none here",
            "leave it out for the floors alone; `coda doctor` shows what is found",
        )
    found: dict[str, float] = {}
    for part in lowered:
        found |= timed(part, sizes, tiles, CudaTimer())
    return found


def timed(lowered: Lowered, sizes: Mapping[str, int], tiles: Mapping[str, Tile], timer: Timer) -> dict[str, float]:
    """The times of one program and its steps."""
    schedule = lowered.schedule
    whole, loop, in_chunk = schedule.program, schedule.loop, schedule.with_chunk(sizes)
    steps = lowered.parts if len(lowered.parts) > 1 else ()
    calls = {whole.name: _call(whole, sizes, tiles.get(whole.name), loop.axis.name if loop else None)}
    calls |= {part.name: _call(part, in_chunk, tiles.get(part.name)) for part in steps}
    measured = interleave(calls, whole.name, timer, ROUNDS, SECONDS)
    chunks = sizes[loop.axis.name] / in_chunk[loop.part.name] if loop else 1  # a last, shorter one counts as its part
    inside = {p.name for i, p in enumerate(steps) if loop and i in loop}
    return {name: m.median_ms * (chunks if name in inside else 1) for name, m in measured.items()}


def _call(program: Program, sizes: Mapping[str, int], tile: Tile | None, chunk: str | None = None) -> Call:
    """A call of a program that was built and has run once."""
    import coda
    from coda.runtime.inputs import random_inputs

    symbols = {s.name for axis in program.axes for s in axis.size.free_symbols} | {a.name for a in program.axes}
    known: Any = {name: size for name, size in sizes.items() if name in symbols}
    missing = [axis.name for axis in program.free_axes if axis.name not in known]
    if missing:
        raise CodaError.of(f"the sizes of {', '.join(missing)} are not known", "give them with --dims")
    chosen = tile.name if tile else None
    function = coda.compile(program, tile=chosen, device=DEVICE, fallback="strict", tune=False, chunk=chunk, **known)
    first = random_inputs(program, known, 0, DEVICE)
    size = sum(getattr(x, "nbytes", 0) for x in first.values())
    sets = [first, *(random_inputs(program, known, seed, DEVICE) for seed in range(1, rotation(size)))]
    function(**first)
    return rotating(lambda inputs: function(**inputs), [(inputs,) for inputs in sets])
