"""Interleaved timing, with a timer that is told the times."""

from __future__ import annotations

import time

import pytest

from coda.runtime.timing import (
    BASELINE_LAPS,
    L2_BYTES,
    MIN_ROUNDS,
    MOST_SETS,
    CudaTimer,
    interleave,
    rotating,
    rotation,
    summarize,
)  # fmt: skip


def test_ratio_is_taken_within_each_round():
    # The device slows down to half speed over the rounds; the ratio does not move.
    baseline = [1.0, 1.5, 2.0]
    measured = summarize([1.1 * t for t in baseline], baseline)
    assert measured.ratio == pytest.approx(1.1)
    assert measured.ratio_quartiles == pytest.approx((1.1, 1.1))
    assert measured.median_ms == pytest.approx(1.65)
    assert measured.rounds == 3


def test_a_time_of_zero_is_refused():
    with pytest.raises(ValueError, match="did not run"):
        summarize([0.0], [1.0])


def test_rounds_time_every_candidate_and_stop_at_the_budget():
    cost = {"base": 1.0, "fused": 1.25}
    calls: list[str] = []

    def timer(queued):
        names = [call() for call in queued]
        calls.extend(names)
        return [cost[name] for name in names]

    candidates = {name: (lambda name=name: name) for name in cost}
    measured = interleave(candidates, "base", timer, rounds=100, seconds=0)
    assert measured["fused"].ratio == 1.25
    assert measured["fused"].rounds == MIN_ROUNDS
    assert calls.count("base") == 1 + MIN_ROUNDS * BASELINE_LAPS  # one to warm up
    assert calls.count("fused") == 1 + MIN_ROUNDS


def test_operands_rotate_through_more_than_the_l2_holds():
    assert rotation(1 << 30) == 2
    assert rotation(10 << 20) * (10 << 20) >= 2 * L2_BYTES
    assert rotation(0) == rotation(8) == MOST_SETS
    seen: list[int] = []
    call = rotating(seen.append, [(1,), (2,), (3,)])
    for _ in range(5):
        call()
    assert seen == [1, 2, 3, 1, 2]


class Cuda:
    """A device on which every call takes ``milliseconds``."""

    def __init__(self, milliseconds: float):
        self.milliseconds, self.slept = milliseconds, []

    def Event(self, enable_timing: bool):
        return self

    def record(self):
        pass

    def elapsed_time(self, other):
        return self.milliseconds

    def synchronize(self):
        pass

    def _sleep(self, cycles):
        self.slept.append(cycles / CudaTimer.CYCLES_A_MILLISECOND)


def test_calls_that_are_too_short_to_stay_ahead_of_are_queued_before_they_run():
    timer = CudaTimer(repeats=3)
    calls: list[float] = []
    slow = [lambda: calls.append(time.sleep(1e-3))] * 2
    timer.cuda = long = Cuda(1e9)  # however slow this host is
    assert timer(slow) == timer(slow) == [1e9, 1e9]
    assert long.slept == [1.0, 1.0]
    assert len(calls) == 2 * 2 * 3
    timer.cuda = short = Cuda(0.01)
    timer(slow)
    timer(slow)
    assert short.slept[0] == 1.0
    assert short.slept[1] >= 1.0 + 6  # what it took the host to queue six calls
