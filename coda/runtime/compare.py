"""The error gate: a fused result may be at most twice as wrong as eager PyTorch.

Both are measured against the oracle (``evaluate(exact=True)``: float64, nothing rounded) as the relative error
``||out - ref|| / ||ref||`` over the whole output. The eager side is ``round_as_eager`` interpreted in f32 on the same
device. Where eager happens to be exact, "twice" is no measure, so the limit never falls below the sum of

* one unit in the last place of the largest element: ``eps(dtype) * max|ref| / ||ref||``, and
* ``F32_FLOOR``, a few units of f32: the order of additions, and device functions such as exp and rsqrt.

NaN and inf must stand where the oracle, rounded to the storage dtype, or eager has them; they are left out of norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.errors import CodaError
from coda.ir import Output, Program
from coda.ops.reduce import combined
from coda.passes.eager import round_as_eager
from coda.runtime.reference import Value, evaluate

FACTOR = 2.0
F32_FLOOR = 2.0**-21


@dataclass(frozen=True)
class OutputError:
    """One output's errors. ``limit`` is what ``error`` may be; ``misplaced`` counts elements where NaN or inf stand
    in the wrong place."""

    name: str
    type: str
    error: float
    eager_error: float
    limit: float
    misplaced: int = 0

    @property
    def ok(self) -> bool:
        return self.misplaced == 0 and self.error <= self.limit  # False where the error is NaN

    def row(self) -> tuple[str, ...]:
        verdict = "ok" if self.ok else "FAIL"
        if self.misplaced:
            verdict += f": {self.misplaced} elements NaN or inf in the wrong place"
        return self.name, self.type, f"{self.error:.3e}", f"{self.eager_error:.3e}", f"{self.limit:.3e}", verdict


@dataclass(frozen=True)
class Comparison:
    """The errors of all outputs of one call."""

    outputs: tuple[OutputError, ...]

    @property
    def ok(self) -> bool:
        return all(o.ok for o in self.outputs)

    def __str__(self) -> str:
        rows = [("output", "type", "error", "eager", "limit", ""), *(o.row() for o in self.outputs)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def to_json(self) -> dict:
        return {"ok": self.ok, "outputs": [{**asdict(o), "ok": o.ok} for o in self.outputs]}


def compare(
    program: Program,
    inputs: Mapping[str, Value],
    outputs: Mapping[str, Tensor],
    *,
    dims: Mapping[str, int] | None = None,
    factor: float = FACTOR,
) -> Comparison:
    """Compare computed outputs (by name, in storage dtypes) with the oracle and with eager PyTorch.

    ``inputs`` are those of the call, inout parameters as they were before it. Raises CodaError where an output is
    missing or has another shape or dtype than the program declares.
    """
    return Oracle.of(program, inputs, dims=dims).compare(outputs, factor)


@dataclass(frozen=True)
class Oracle:
    """What the outputs of one call are compared with; for comparing several implementations on the same inputs."""

    program: Program
    exact: Mapping[str, Tensor]
    eager: Mapping[str, Tensor]

    @classmethod
    def of(cls, program: Program, inputs: Mapping[str, Value], *, dims: Mapping[str, int] | None = None) -> Oracle:
        exact = evaluate(program, inputs, exact=True, dims=dims)
        return cls(program, exact, evaluate(round_as_eager(program), inputs, dims=dims))

    def compare(self, outputs: Mapping[str, Tensor], factor: float = FACTOR) -> Comparison:
        errors = []
        for output in self.program.outputs:
            exact, eager = finished(output, self.exact[output.name]), self.eager[output.name]
            out = _checked(output, outputs.get(output.name), exact)
            errors.append(measure(output, out, exact, eager, factor))
        return Comparison(tuple(errors))


def measure(output: Output, out: Tensor, exact: Tensor, eager: Tensor, factor: float = FACTOR) -> OutputError:
    """The errors of one output. ``exact`` is float64; ``out`` and ``eager`` are in the storage dtype."""
    stored = exact.to(torch_dtype(output.type.dtype)).double()
    out, eager, exact = out.double(), eager.double(), exact.double()
    agree = _same_kind(out, stored) | _same_kind(out, eager)
    finite = out.isfinite() & stored.isfinite() & eager.isfinite()
    reference = torch.where(finite, exact, 0.0)
    error, eager_error = (_relative(torch.where(finite, x, 0.0), reference) for x in (out, eager))
    limit = max(factor * eager_error, _floor(output, reference))
    misplaced = int((~agree).sum())
    return OutputError(output.name, str(output.type), error, eager_error, limit, misplaced)


def finished(output: Output, x: Tensor) -> Tensor:
    """An output as it comes back from a call, partial results combined."""
    return combined(output.type.partial.kind, x) if output.type.partial else x


def _floor(output: Output, reference: Tensor) -> float:
    if output.type.dtype.kind != "float" or not reference.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(reference))
    eps = torch.finfo(torch_dtype(output.type.dtype)).eps
    return F32_FLOOR + (eps * float(reference.abs().max()) / norm if norm else 0.0)


def _relative(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference||; absolute where the reference is all zero."""
    difference, norm = (float(torch.linalg.vector_norm(t)) for t in (x - reference, reference))
    return difference / norm if norm else difference


def _same_kind(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: both finite, both NaN, or the same infinity."""
    return (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan()) | (a.isinf() & (a == b))


def _checked(output: Output, out: Tensor | None, exact: Tensor) -> Tensor:
    if out is None:
        raise CodaError.of(f"output '{output.name}' is missing")
    want = torch_dtype(output.type.dtype)
    if out.dim() == exact.dim() + output.is_partial:
        out = finished(output, out)
    if out.shape != exact.shape or out.dtype != want:
        raise CodaError.of(
            f"output '{output.name}' is {out.dtype}{list(out.shape)}, the program declares {want}{list(exact.shape)}"
        )
    return out.to(exact.device)
