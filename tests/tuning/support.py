"""Stand-ins for what the tuner needs a GPU for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coda.runtime.timing import Measurement
from coda.tuning.choice import Choice, Timing
from tests.support import PredicateArtifact

LINEAR = "program linear(x: bf16[M, K], w: bf16[N, K]) { return x @ w.T: bf16 }"
SIZES = {"M": 48, "N": 64, "K": 32}


def measurement(ratio: float, ms: float = 1.0) -> Measurement:
    return Measurement(ms * ratio, ratio, (ratio - 0.01, ratio + 0.01), 30)


def choice(**fields: object) -> Choice:
    base = {
        "program": "linear", "dims": {"M": 8192}, "tile": "128x160_s4", "declined": False, "unfused": "torch.compile",
        "fused_ms": 0.9, "unfused_ms": 1.0, "rounds": 30,
        "timings": {"128x160_s4": Timing(0.9, 0.9, (0.89, 0.91)), "unfused": Timing(1.0, 1.0, (1.0, 1.0))},
        "dropped": {"128x192": "kernel 'k' spills registers inside its k-loop"},
    }  # fmt: skip
    return Choice(**{**base, **fields})  # type: ignore[arg-type]


class Broken(PredicateArtifact):
    """An artifact that computes well, but for ``fault``, which is given its arguments after each run."""

    def __init__(self, program, fault: Callable[[list[Tensor], int], None]):
        super().__init__(program)
        self.fault = fault

    def run(self, args, workspace, stream):
        super().run(args, workspace, stream)
        self.fault(args, self.runs)


class Clock:
    """A timer that knows how long each candidate takes: the n-th of those it is first shown takes ``times[n]``."""

    def __init__(self, times: Sequence[float]):
        self.times, self.known = list(times), {}

    def __call__(self, calls):
        for call in calls:
            call()
            self.known.setdefault(id(call), self.times[len(self.known)] if len(self.known) < len(self.times) else 1.0)
        return [self.known[id(call)] for call in calls]


CPU = torch.device("cpu")
