"""The kernels of a program: what each computes, the tensors between them, and the program that they make up.

``partition.py`` cuts a program into kernels; ``assemble`` puts them together to the very program they came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import sympy

from coda.cost import GPUS, Cost, Gpu, cost
from coda.ir import NOMINAL, Node, Output, Param, Program, Size, Type, substitute
from coda.ops import build
from coda.ops.reduce import read_of
from coda.passes.labels import Note
from coda.passes.merge import Group

REASONS = {  # why a kernel without products is there
    "row": "it needs statistics of whole rows, and a kernel with a product makes only tiles of them",
    "map": "no product makes or reads these values tile by tile",
    "call": "an opaque function: it is called between kernels, what it reads and gives is in memory",
    "finish": "the tiles of a kernel reduce a part each; behind it the parts are added up in fixed order",
}


@dataclass(frozen=True)
class Kernel:
    """One launch; ``computes`` are the operations of the block program that it does."""

    name: str
    kind: str  # "gemm", "row", "map", "finish" or "call"
    program: Program
    group: Group | None
    computes: frozenset[Node]

    @property
    def reads(self) -> set[str]:
        return {p.name for p in self.program.params}

    @property
    def cost(self) -> Cost:
        """Its operations and bytes; ``cost.fused`` is what it moves."""
        return cost(self.program)

    @property
    def inouts(self) -> set[str]:
        return {p.name for p in self.program.params if p.inout}

    @property
    def writes(self) -> set[str]:
        return {o.name for o in self.program.outputs}

    @property
    def reason(self) -> str:
        """Why it is a kernel of its own, as a sentence."""
        if self.group is None or self.kind == "call":
            return REASONS[self.kind]
        count = len(self.group.dots)
        how = {"N": "that share their left operand", "M": "that share their right operand", "K": "added up in one sum"}
        return "a product" if count == 1 else f"{count} products {how[self.group.kind]}"


@dataclass(frozen=True)
class Edge:
    """A tensor between kernels. A ``partial`` one holds an unfinished reduction, one value for each tile in front."""

    name: str
    type: Type
    producer: str
    consumers: tuple[str, ...]
    partial: bool = False

    @property
    def bytes(self) -> Size:
        return self.type.elements * self.type.dtype.bytes


@dataclass(frozen=True)
class Partition:
    """The kernels of a block program in the order in which they run. In ``program`` a mean that tiles begin is a sum,
    divided."""

    program: Program
    kernels: tuple[Kernel, ...]
    notes: tuple[Note, ...]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The tensors that one kernel writes and another reads."""
        return tuple(
            Edge(o.name, o.type, kernel.name, consumers, o.is_partial)
            for kernel in self.kernels
            for o in kernel.program.outputs
            if o.into is None and (consumers := tuple(k.name for k in self.kernels if o.name in k.reads))
        )

    @property
    def bytes(self) -> Size:
        """What all kernels together move."""
        return sum((k.cost.fused for k in self.kernels), sympy.Integer(0))

    def seconds(self, sizes: Mapping[str, int], gpu: Gpu = GPUS["h200"]) -> float:
        """An estimate of the time of all kernels: each takes what its operations or its bytes need, whichever is more,
        and a launch. Sizes that are not known count as ``ir.NOMINAL``."""
        total = 0.0
        for kernel in self.kernels:
            flops, moved = (_number(size, sizes) for size in (kernel.cost.flops, kernel.cost.fused))
            total += max(flops / gpu.bf16_flops, moved / gpu.bytes_per_second) + gpu.launch_seconds
        return total

    def places(self, node: Node) -> list[str]:
        """The kernels that compute an operation of ``program``: several where computing it again is cheaper than
        reading it."""
        return [k.name for k in self.kernels if node in k.computes]


def assemble(partition: Partition) -> Program:
    """The kernels put together again to one program: the one they were made from, up to ``partial``."""
    program = partition.program
    made, _ = composed(partition.kernels, program.params)
    return program.with_outputs(replace(made[o.name], type=o.type) for o in program.outputs)


def composed(kernels: Iterable[Kernel], params: Iterable[Param]) -> tuple[dict[str, Output], dict[Node, str]]:
    """What kernels that run one after the other write, in terms of the parameters that the first of them find, and
    what their values are called."""
    values = {p.name: read_of(p.name, p.type) for p in params}
    made: dict[str, Output] = {}
    names: dict[Node, str] = {}
    for kernel in kernels:
        known = {read_of(p.name, p.type): values[p.name] for p in kernel.program.params if not p.inout}
        new = substitute((o.value for o in kernel.program.outputs), known)
        names |= {new[n]: name for n, name in kernel.program.names if n in new}
        for output in kernel.program.outputs:
            made[output.name] = replace(output, value=new[output.value])
            value = made[output.name].value
            value = value.args[0] if output.is_partial else value
            if output.into is None:
                same = value.type.dims == output.type.dims
                values[output.name] = value if same else build("layout", value, dims=output.type.dims)
    return made, names


def _number(size: Size, sizes: Mapping[str, int]) -> float:
    return float(size.subs({s: sizes.get(s.name, NOMINAL) for s in size.free_symbols}))
