"""A program on tensors: its kernels where the operands are on a GPU, else the reference interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch import Tensor

from coda.errors import CodaError
from coda.ir import Program
from coda.passes.partition import Kernel, partition
from coda.runtime.callable import CompiledProgram
from coda.runtime.reference import evaluate_sized
from coda.target import lower


def execute(
    program: Program, inputs: Mapping[str, Tensor], sizes: Mapping[str, int], fallback: str
) -> dict[str, Tensor]:
    """The outputs by name, each with the shape of its type."""
    if not any(x.is_cuda for x in inputs.values()):
        return evaluate_sized(program, inputs, sizes)
    tensors = dict(inputs)
    for kernel in kernels(program, fallback):
        tensors |= kernel.run({p.name: tensors[p.name] for p in kernel.kernel.program.params}, sizes)
    return {o.name: tensors[o.name] for o in program.outputs}


class Launch:
    """One kernel of a partition: an artifact where it is lowered, else the interpreter, with the reason."""

    def __init__(self, kernel: Kernel, fallback: str):
        self.kernel, self.reason = kernel, refusal(kernel)
        self.compiled = None if self.reason else _compiled(kernel.program, fallback)

    def run(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        if self.compiled is None:
            return evaluate_sized(self.kernel.program, inputs, sizes)
        given = {s.name for a in self.kernel.program.axes for s in a.size.free_symbols}
        self.compiled.dims = {n: s for n, s in sizes.items() if n in given}
        result = self.compiled(**inputs)
        results = result if isinstance(result, tuple) else (result,)
        return dict(zip((o.name for o in self.kernel.program.outputs), results, strict=True))


@cache
def kernels(program: Program, fallback: str) -> tuple[Launch, ...]:
    """The kernels of a program in order."""
    return tuple(Launch(k, fallback) for k in partition(program).kernels)


def refusal(kernel: Kernel) -> str | None:
    """Why a kernel is not lowered, as a sentence; None if it is."""
    if any(o.is_partial for o in kernel.program.outputs):
        return "its partial results are finished by another kernel"
    try:
        lower(kernel.program)
    except CodaError as error:
        return error.diagnostics[0].message
    return None


def _compiled(program: Program, fallback: str) -> CompiledProgram:
    from coda.runtime.api import compile

    return compile(program, fallback=fallback)
