"""From times to a choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coda.runtime.timing import Measurement

UNFUSED = "unfused"  # the name of the unfused way among the candidates
NOISE = 0.005  # of candidates whose ratios differ by less than this the one that was expected to be best is taken


@dataclass(frozen=True)
class Decision:
    """The fastest candidate, and whether the unfused way is no slower: then it is not to be used (case G3)."""

    candidate: str
    declined: bool


def decide(measured: Mapping[str, Measurement]) -> Decision:
    """``measured`` has the candidates in order of preference, and the unfused way where that could be run."""
    fused = {name: m.ratio for name, m in measured.items() if name != UNFUSED}
    if not fused:
        raise ValueError("there is nothing to choose from")
    limit = min(fused.values()) * (1 + NOISE)
    chosen = next(name for name, ratio in fused.items() if ratio <= limit)
    declined = UNFUSED in measured and fused[chosen] >= measured[UNFUSED].ratio
    return Decision(chosen, declined)
