"""Which GPU this is: what measured times depend on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Device:
    """A GPU model and the driver it runs under."""

    name: str
    driver: str


@lru_cache
def driver_version(file: Path = VERSION) -> str:
    """As in 580.159.04; empty where no driver is loaded."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text())
    except OSError:
        return ""
    return found[0] if found else ""


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def current_device() -> Device | None:
    """The current CUDA device, if it can run our kernels."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    return Device(torch.cuda.get_device_name(), driver_version())
