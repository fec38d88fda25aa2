"""Kernels of a block program, one after the other, in the reference interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from coda.passes.kernels import Partition
from coda.runtime.binding import bind, check_operands, shapes_of
from coda.runtime.reference import Value, evaluate_sized


def evaluate_partition(
    partition: Partition, inputs: Mapping[str, Value], *, dims: Mapping[str, int] | None = None, **mode: Any
) -> dict[str, Tensor]:
    """What ``evaluate`` gives for the program, computed kernel by kernel; tensors between kernels have their dtype."""
    program = partition.program
    check_operands(program, inputs)
    sizes = bind(program, shapes_of(inputs), dims)
    tensors: dict[str, Any] = dict(inputs)
    for kernel in partition.kernels:
        operands = {p.name: tensors.get(p.name) for p in kernel.program.params}
        tensors |= evaluate_sized(kernel.program, operands, sizes, **mode)
    return {o.name: tensors[o.name] for o in program.outputs}
