"""How benchmarks are timed: as the tuner does it (coda/runtime/timing.py)."""

from coda.runtime.timing import CudaTimer, interleave, one_round, rotating, rotation, summarize

__all__ = ["CudaTimer", "interleave", "one_round", "rotating", "rotation", "summarize"]
