"""What a call needs of a GPU's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that torch's allocator hands out during a call, beyond what lies there before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
