"""What a measuring process offers for an item: candidates, each checked before it is timed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import eager
from benchmarks.models import Item, Model

CHECKED_ROWS = 1024  # correctness at full size is a matter of the tests
GATE = 2.0  # largest error allowed, in units of eager torch's error


def _timing() -> ModuleType:
    """coda/runtime/timing.py by its place: where coda-kernels runs, ``coda`` is the name of another package."""
    place = Path(__file__).parent.parent / "coda" / "runtime" / "timing.py"
    spec = importlib.util.spec_from_file_location("coda_timing", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


timing = _timing()


@dataclass(frozen=True)
class Candidate:
    """Something that computes an item. ``run`` takes the operands of ``eager.operands``, prepared by ``prepare`` once
    (weights interleaved, say); ``results`` names what it returned as ``eager.math`` does. ``reference`` replaces that
    math where what is computed differs a little."""

    impl: str
    run: Callable[[Mapping[str, Tensor]], Any]
    results: Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]]
    tile: str | None = None
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda operands: operands
    reference: Callable[..., Mapping[str, Tensor]] | None = None
    one_shape: bool = False  # it compiles for each shape, so it is checked at the one that is timed


@dataclass(frozen=True)
class Ready:
    """A candidate that was checked, as a call that takes the next operand set each time."""

    impl: str
    tile: str | None
    call: Callable[[], object]
    error: float


@dataclass(frozen=True)
class LeftOut:
    """A candidate that is not timed, and why."""

    impl: str
    tile: str | None
    reason: str


class NotTimed(Exception):
    """Why a candidate is left out."""


def ready(candidate: Candidate, item: Item, model: Model, rows: int, operands: list[dict[str, Tensor]]) -> Ready:
    """Check against float64; nothing that is wrong by more than twice the error of eager torch is timed."""
    checked = rows if candidate.one_shape else min(rows, CHECKED_ROWS)
    error = check(candidate, item, model, checked, operands[0]["a"].device.type)
    prepared = [(candidate.prepare(dict(x)),) for x in operands]
    return Ready(candidate.impl, candidate.tile, timing.rotating(candidate.run, prepared), error)


def sets(item: Item, model: Model, rows: int) -> int:
    """How many operand sets it takes so that a call never finds its operands in the L2."""
    m, n, k = item.product(model, rows)
    return timing.rotation(2 * (m * k + n * k))


def check(candidate: Candidate, item: Item, model: Model, rows: int, device: str) -> float:
    """The largest error of a result."""
    operands = eager.operands(item, model, rows, seed=99, device=device)
    prepared = candidate.prepare(dict(operands))
    reference = candidate.reference or eager.math(item, model)
    names = (*("a", "b"), *eager.OPERANDS[item.name]) if candidate.reference is None else tuple(prepared)
    with torch.no_grad():
        got = candidate.results(candidate.run(prepared), prepared)
        want = reference(**{n: eager.wide(prepared[n]) for n in names})
        plain = reference(**{n: prepared[n] for n in names})
    errors, limits = eager.relative_errors(got, want), eager.relative_errors(plain, want)
    wrong = [n for n in got if not errors[n] <= max(GATE * limits[n], 1e-6)]  # NaN too
    if wrong:
        raise NotTimed("; ".join(f"{n}: error {errors[n]:.2e}, eager's {limits[n]:.2e}" for n in wrong))
    return max(errors.values())
