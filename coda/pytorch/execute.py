"""A program on tensors: its kernels where the operands are on a GPU, else the reference interpreter.

On a GPU a program that is lowered whole is one artifact. Otherwise its kernels run one by one, and those that cannot be
lowered run in the interpreter, which is torch on the same device; ``steps`` says which, and why. With ``chunk`` the
kernels of an artifact run in chunks of that axis (``coda/passes/chunk.py``), if they can; what it means is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from coda.errors import CodaError
from coda.ir import Program, Type
from coda.passes.partition import partition
from coda.runtime.api import compile
from coda.runtime.binding import evaluate_size, type_shape
from coda.runtime.callable import CompiledProgram
from coda.runtime.reference import evaluate_sized
from coda.target.blocks import joined_finishes, lower_kernel
from coda.target.chunks import lower_along
from coda.target.legality import checks
from coda.target.product import MAX_TERMS

MERGED = {"K": MAX_TERMS, "N": 16}  # the products that one kernel takes, by kind (see merge.py)


def execute(
    program: Program,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    layout: str,
    chunk: str | None = None,
    tune: bool = False,
) -> dict[str, Tensor]:
    """The outputs by name, each with the shape of its type."""
    if not any(x.is_cuda for x in inputs.values()):
        with torch._C._DisableAutocast():  # the program says its dtypes
            return evaluate_sized(program, inputs, sizes)
    return run_steps(program, inputs, sizes, layout, chunk, tune)


def run_steps(
    program: Program,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    layout: str,
    chunk: str | None = None,
    tune: bool = False,
) -> dict[str, Tensor]:
    """The outputs by name, kernel by kernel."""
    tensors = dict(inputs)
    for step in steps(program, layout, chunk, tune):
        tensors |= step.run({p.name: tensors[p.name] for p in step.program.params}, sizes)
    return {o.name: tensors[o.name] for o in program.outputs}


class Step:
    """A program that is an artifact, or runs in the interpreter for a reason."""

    def __init__(self, program: Program, layout: str, reason: str | None, chunk: str | None = None, tune: bool = False):
        self.program, self.reason = program, reason
        self.compiled: CompiledProgram | None = None
        if not reason:
            self.compiled = compile(program, fallback=layout, chunk=chunk, tune=tune or "cached")
        self.symbols = {s.name for a in program.axes for s in a.size.free_symbols}

    def run(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        if self.compiled is None:
            return evaluate_sized(self.program, inputs, sizes)
        self.compiled.dims = {n: s for n, s in sizes.items() if n in self.symbols}
        result = self.compiled(**{p.name: opened(inputs[p.name], p.type, sizes) for p in self.program.params})
        results = result if isinstance(result, tuple) else (result,)
        named = zip(self.program.outputs, results, strict=True)
        return {o.name: x.reshape(type_shape(o.type, sizes)) for o, x in named}


def opened(x: Tensor, type_: Type, sizes: Mapping[str, int]) -> Tensor:
    """A tensor with a dim for each axis: 2 x 6 rows and 3 x 4 rows are different calls."""
    return x.reshape([evaluate_size(a.size, sizes) for a in type_.axes])


def steps(program: Program, layout: str, chunk: str | None = None, tune: bool = False) -> tuple[Step, ...]:
    """What a program runs as, in order."""
    return _steps(program, layout, chunk, tune)


@cache
def _steps(program: Program, layout: str, chunk: str | None, tune: bool) -> tuple[Step, ...]:
    for axis in dict.fromkeys((chunk, None)):
        if (reason := _refusal(lower_along, program, axis)) is None:
            return (Step(program, layout, None, axis, tune),)
    try:
        parts = joined_finishes(partition(program, MERGED).kernels)
    except CodaError:
        return (Step(program, layout, reason),)
    return tuple(Step(part, layout, _refusal(_as_kernel, part), tune=tune) for part in parts)


def unlowered_product(program: Program, layout: str) -> str | None:
    """Why a product of a program would run in the interpreter; None if none would."""
    for step in steps(program, layout):
        if step.reason is not None and any(n.op == "dot" for n in step.program.nodes()):
            return step.reason
    return None


def _as_kernel(program: Program) -> None:
    checks(lower_kernel(program))


def _refusal(lower: Callable[..., object], *args: object) -> str | None:
    """Why a program is not lowered, as a sentence; None if it is."""
    try:
        lower(*args)
    except CodaError as error:
        return error.diagnostics[0].message
    return None
