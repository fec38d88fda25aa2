"""Interleaved timing. A GPU under load is power-limited: how fast a kernel runs depends on what ran just before it, by
4-5 % even for cuBLAS. So candidates are never timed one after the other: each round times every candidate once, in a
new random order, and the baseline several times in between. What is reported of a candidate is the median over the
rounds of its ratio to the baseline *of the same round*; absolute times are for orientation.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

BASELINE_LAPS = 4  # how often the baseline is timed in a round
MIN_ROUNDS = 5  # fewer make a median of ratios meaningless
L2_BYTES = 60 << 20  # H100 and H200: 50 to 60 MB
MOST_SETS = 64  # of operands; smaller ones than this many fill are a matter of launches, not of memory


class Timer(Protocol):
    """Runs calls on the device, one after the other without a pause, and gives the time of each in milliseconds."""

    def __call__(self, calls: Sequence[Call]) -> list[float]: ...


@dataclass(frozen=True)
class Measurement:
    """What the rounds say about one candidate. The quartiles tell how much to believe of the ratio."""

    median_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    rounds: int


def interleave(
    candidates: Mapping[Key, Call], baseline: Key, timer: Timer, rounds: int, seconds: float, seed: int = 0
) -> dict[Key, Measurement]:
    """Time all candidates in shuffled rounds, until ``rounds`` are done or ``seconds`` are over (but MIN_ROUNDS at
    least). ``baseline`` names one of the candidates."""
    generator = random.Random(seed)
    timer(list(candidates.values()))  # warm together: the first round must not be special
    times: list[dict[Key, float]] = []
    end = time.monotonic() + seconds
    while len(times) < rounds and (len(times) < MIN_ROUNDS or time.monotonic() < end):
        times.append(one_round(candidates, baseline, timer, generator))
    return {name: summarize([t[name] for t in times], [t[baseline] for t in times]) for name in candidates}


def one_round(
    candidates: Mapping[Key, Call], baseline: Key, timer: Timer, generator: random.Random
) -> dict[Key, float]:
    """The milliseconds of each candidate, all timed once in a new random order; of the baseline a mean of several."""
    order = list(candidates) + [baseline] * (BASELINE_LAPS - 1)
    generator.shuffle(order)
    seen: dict[Key, list[float]] = {name: [] for name in candidates}
    for name, milliseconds in zip(order, timer([candidates[name] for name in order]), strict=True):
        seen[name].append(milliseconds)
    return {name: statistics.mean(laps) for name, laps in seen.items()}


def summarize(times: list[float], baseline: list[float]) -> Measurement:
    """The median time, and the median and quartiles of the per-round ratios. Both lists have one entry a round."""
    if not times or min(times) <= 0 or min(baseline) <= 0:
        raise ValueError("a time that is not positive means that the kernel did not run")
    ratios = [t / b for t, b in zip(times, baseline, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Measurement(statistics.median(times), statistics.median(ratios), (low, high), len(ratios))


def rotation(size: int) -> int:
    """How many operand sets of so many bytes it takes so that a call never finds its operands in the L2."""
    return min(MOST_SETS, max(2, math.ceil(2 * L2_BYTES / max(size, 1))))


def rotating(function: Callable[..., object], sets: Sequence[Sequence[object]]) -> Call:
    """A call that takes the next set of arguments each time."""
    arguments = itertools.cycle(sets)
    return lambda: function(*next(arguments))


class CudaTimer:
    """Times with CUDA events, under the sustained load of training: a whole round is queued ahead of the device, so
    neither host time nor idle moments (in which the clock recovers) show. Of ``repeats`` calls of a candidate the
    first is left out, for it meets the caches and clocks of whatever ran before."""

    CYCLES_A_MILLISECOND = 2_000_000  # at full clock

    def __init__(self, repeats: int = 3):
        import torch

        self.cuda = torch.cuda
        self.repeats = repeats
        self.ahead = 1.0  # milliseconds of head start of the host

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        self.cuda._sleep(int(self.ahead * self.CYCLES_A_MILLISECOND))
        began = time.perf_counter()
        spans = [[self._span(call) for _ in range(self.repeats)] for call in calls]
        host = 1e3 * (time.perf_counter() - began)
        self.cuda.synchronize()
        laps = [[start.elapsed_time(stop) for start, stop in span] for span in spans]
        on_device = sum(map(sum, laps))
        self.ahead = 1.0 + (host if on_device < 2 * host else 0.0)  # calls too short to stay ahead of: from the start
        return [statistics.mean(lap[1:]) for lap in laps]

    def _span(self, call: Call) -> tuple[Any, Any]:
        start, stop = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        return start, stop
