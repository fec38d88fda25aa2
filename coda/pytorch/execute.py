"""A program on tensors: its kernels where the operands are on a GPU, else the reference interpreter.

On a GPU a program that is lowered whole is one artifact. Otherwise its kernels run one by one, and those that cannot be
lowered run in the interpreter, which is torch on the same device; ``steps`` says which, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch import Tensor

from coda.errors import CodaError
from coda.ir import Program
from coda.passes.partition import partition
from coda.runtime.api import compile
from coda.runtime.callable import CompiledProgram
from coda.runtime.reference import evaluate_sized
from coda.target.blocks import joined_finishes, lower_kernel, lower_program
from coda.target.product import MAX_TERMS

MERGED = {"K": MAX_TERMS, "N": 16}  # the products that one kernel takes, by kind (see merge.py)


def execute(program: Program, inputs: Mapping[str, Tensor], sizes: Mapping[str, int], layout: str) -> dict[str, Tensor]:
    """The outputs by name, each with the shape of its type."""
    if not any(x.is_cuda for x in inputs.values()):
        return evaluate_sized(program, inputs, sizes)
    tensors = dict(inputs)
    for step in steps(program, layout):
        tensors |= step.run({p.name: tensors[p.name] for p in step.program.params}, sizes)
    return {o.name: tensors[o.name] for o in program.outputs}


class Step:
    """A program that is an artifact, or runs in the interpreter for a reason."""

    def __init__(self, program: Program, layout: str, reason: str | None):
        self.program, self.reason = program, reason
        self.compiled: CompiledProgram | None = None if reason else compile(program, fallback=layout)
        self.symbols = {s.name for a in program.axes for s in a.size.free_symbols}

    def run(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        if self.compiled is None:
            return evaluate_sized(self.program, inputs, sizes)
        self.compiled.dims = {n: s for n, s in sizes.items() if n in self.symbols}
        result = self.compiled(**inputs)
        results = result if isinstance(result, tuple) else (result,)
        return dict(zip((o.name for o in self.program.outputs), results, strict=True))


@cache
def steps(program: Program, layout: str) -> tuple[Step, ...]:
    """What a program runs as, in order."""
    if (reason := refusal(program, whole=True)) is None:
        return (Step(program, layout, None),)
    try:
        parts = joined_finishes(partition(program, MERGED).kernels)
    except CodaError:
        return (Step(program, layout, reason),)
    return tuple(Step(part, layout, refusal(part)) for part in parts)


def refusal(program: Program, whole: bool = False) -> str | None:
    """Why a program, whole or as one kernel, is not lowered, as a sentence; None if it is."""
    try:
        (lower_program if whole else lower_kernel)(program)
    except CodaError as error:
        return error.diagnostics[0].message
    return None
