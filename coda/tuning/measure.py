"""Checking and timing candidates on the device. Runs in the measuring process; see ``child.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.errors import CodaError
from coda.ir import Output, Program
from coda.runtime.callable import Artifact, launch
from coda.runtime.compare import Comparison, Oracle
from coda.runtime.inputs import POISON, random_inputs
from coda.runtime.results import returned
from coda.runtime.timing import Call, Measurement, Timer, interleave, rotating, rotation
from coda.runtime.unfused import Unfused
from coda.tuning.decide import UNFUSED

RUNS = 3  # of each check: a race shows as other bits, if it shows
Inputs = dict[str, Any]


@dataclass
class Bench:
    """One program at one set of sizes: operands, and the calls that passed the check, by candidate."""

    program: Program
    sizes: Mapping[str, int]
    device: torch.device
    ready: dict[str, Call] = field(default_factory=dict)
    unfused: Unfused | None = None

    def __post_init__(self) -> None:
        first = random_inputs(self.program, self.sizes, 0, self.device)
        size = sum(x.nbytes for x in first.values() if isinstance(x, Tensor))
        rest = (random_inputs(self.program, self.sizes, seed, self.device) for seed in range(1, rotation(size)))
        self.sets: list[Inputs] = [first, *rest]
        self.oracle = Oracle.of(self.program, first, dims=self.sizes)

    def admit(self, name: str, artifact: Artifact, trusted: bool = False) -> str | None:
        """Make a candidate ready to be timed. Returns the sentence why it is not fit, or None. One that is ``trusted``
        passed the check before."""
        shapes = artifact.output_shapes(self.sizes)

        def arguments(inputs: Inputs, poison: bool = False) -> list[Any]:
            return [*inputs.values(), *(_empty(o, shapes[o.name], self.device, poison) for o in returned(self.program))]

        workspace = artifact.workspace_bytes(arguments(self.sets[0]))

        def checked(inputs: Inputs) -> dict[str, Tensor]:
            args = arguments(inputs, poison=True)
            launch(artifact, args, workspace, self.device)
            results = dict(zip((o.name for o in returned(self.program)), args[len(inputs) :], strict=True))
            return results | {o.name: inputs[o.into] for o in self.program.outputs if o.into is not None}

        try:
            reason = None if trusted else self._check(checked)
        except CodaError as error:
            return error.diagnostics[0].message
        if reason is None:
            timed = [(inputs,) for inputs in self.sets]
            self.ready[name] = rotating(lambda x: launch(artifact, arguments(x), workspace, self.device), timed)
        return reason

    def admit_unfused(self) -> str | None:
        """The same of the unfused way. Whatever keeps it from running is a reason."""
        unfused = Unfused(self.program)
        try:
            for _ in range(2):  # compiled, then run
                result = self.oracle.compare(unfused(self.sets[0], self.sizes))
        except torch.AcceleratorError:  # nothing runs in this process any more
            raise
        except Exception as error:
            return f"it cannot be run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if not result.ok:
            return f"its results are wrong: {_worst(result)}"
        accumulated = {o.name: o.into for o in self.program.outputs if o.into is not None}

        def timed(inputs: Inputs) -> None:
            results = unfused(inputs, self.sizes)
            for name, into in accumulated.items():
                inputs[into].copy_(results[name].view_as(inputs[into]))

        self.unfused = unfused
        self.ready[UNFUSED] = rotating(timed, [(inputs,) for inputs in self.sets])
        return None

    def time(self, timer: Timer, rounds: int, seconds: float) -> dict[str, Measurement]:
        """All that are ready, in interleaved rounds; ratios are to the unfused way, else to the first candidate."""
        baseline = UNFUSED if UNFUSED in self.ready else next(iter(self.ready))
        return interleave(self.ready, baseline, timer, rounds, seconds)

    def _check(self, run: Callable[[Inputs], Mapping[str, Tensor]]) -> str | None:
        """Whole outputs against float64, operands unchanged, and equal bits in every run."""
        inputs = self.sets[0]
        written = {p.name for p in self.program.params if p.inout}
        first: Mapping[str, Tensor] = {}
        for _ in range(RUNS):
            used = {n: x.clone() if isinstance(x, Tensor) and n in written else x for n, x in inputs.items()}
            before = {n: _sum(x) for n, x in used.items() if isinstance(x, Tensor) and n not in written}
            outputs = run(used)
            if not first:
                first = outputs
                result = self.oracle.compare(outputs)
                if not result.ok:
                    return f"its results are wrong: {_worst(result)}"
            if not all(_equal_bits(first[n], x) for n, x in outputs.items()):
                return "it gives other bits in each run"
            if changed := [n for n, total in before.items() if _sum(used[n]) != total]:
                return f"it changes its operand '{changed[0]}'"
        return None


def _empty(output: Output, shape: Sequence[int], device: torch.device, poison: bool) -> Tensor:
    dtype = torch_dtype(output.type.dtype)
    if not poison:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.full(tuple(shape), POISON[output.type.dtype.kind], dtype=dtype, device=device)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _sum(x: Tensor) -> int:
    """A checksum."""
    return int(_bits(x).sum(dtype=torch.int64)) if x.numel() else 0


def _worst(result: Comparison) -> str:
    """The output that is furthest over its limit."""
    wrong = [o for o in result.outputs if not o.ok]
    worst = max(wrong, key=lambda o: o.error / o.limit if o.limit else float("inf"))
    return f"'{worst.name}' has error {worst.error:.2e}, the limit is {worst.limit:.2e}"
