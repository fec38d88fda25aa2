"""The result files: one JSON for each run on a device, written once and never edited."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Row:
    """One measured candidate. ``ratio`` is the median of per-round ratios to the bare cuBLAS product; ``error`` the
    largest relative error of an output against float64. ``tile`` is None where the implementation chooses it. Of a
    whole block, ``host_us`` is the host's time of a call and ``peak_bytes`` its memory beyond its operands."""

    workload: str
    phase: str  # forward, backward, forward+backward
    model: str | None
    M: int
    N: int
    K: int
    dtype: str
    impl: str
    tile: str | None
    median_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    rounds: int
    error: float | None
    host_us: float | None = None
    peak_bytes: int | None = None


def write(rows: Sequence[Any], device: str, versions: dict[str, str], command: str, folder: Path = RESULTS) -> Path:
    """Write a run's rows, dataclasses; the name tells date and device."""
    now = datetime.now(timezone.utc)
    document = {
        "device": device,
        "versions": versions,
        "date": now.isoformat(timespec="seconds"),
        "command": command,
        "rows": [asdict(row) for row in rows],
    }
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = folder / f"{now:%Y-%m-%d-%H%M%S}-{slug}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def read_all(folder: Path = RESULTS) -> list[dict]:
    """Every result document, oldest first."""
    documents = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(documents, key=lambda d: d["date"])
