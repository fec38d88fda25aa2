"""Calls of the op like an earlier one: its layouts were checked, its kernels chosen; only addresses are new.

A training step calls each block with the same layouts again and again, and the time that Python takes is time in which
a GPU may wait. Only numbers are kept, never a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.errors import CodaError
from coda.pytorch.block import Block
from coda.pytorch.execute import opened, steps
from coda.runtime.binding import type_shape
from coda.runtime.callable import Prepared
from coda.runtime.repeat import ALIGN, REMEMBERED

Shape = tuple[int, ...]


def call_key(tensors: Sequence[Tensor], sizes: Sequence[int]) -> tuple:
    """Everything about a call that decides how it runs, except addresses beyond their common alignment."""
    address = 0
    for x in tensors:
        address |= x.data_ptr()
    layouts = [(x.shape, x.stride(), x.dtype) for x in tensors]
    return address % ALIGN, tensors[0].device, *sizes, *layouts


@dataclass(frozen=True)
class Bound:
    """One artifact, prepared for these layouts; the outputs as torch sees them. ``copied`` are the operands that are no
    view of the shape that the kernels see: their positions and these shapes."""

    prepared: Prepared
    copied: tuple[tuple[int, Shape], ...]
    outputs: tuple[tuple[Shape, torch.dtype], ...]
    workspace: int
    device: torch.device

    @classmethod
    def of(cls, it: Block, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Bound | None:
        """Of a call that just ran. None where it is not one artifact that took the operands as they were flattened."""
        step, *more = steps(it.forward, it.options.fallback, it.options.chunk, it.options.tune)
        if more or step.compiled is None:
            return None
        params = it.forward.params
        flat = [x.reshape(type_shape(p.type, sizes)) for p, x in zip(params, tensors, strict=True)]
        moved = [v.data_ptr() != x.data_ptr() for v, x in zip(flat, tensors, strict=True)]
        copied = tuple((i, tuple(flat[i].shape)) for i, is_copy in enumerate(moved) if is_copy)
        values = {p.name: opened(v, p.type, sizes) for p, v in zip(params, flat, strict=True)}
        repeat = step.compiled.remembered(values)
        if repeat is None or repeat.inout:
            return None
        used = [
            x if view is None else x.as_strided(*view)
            for x, view in zip(values.values(), repeat.views, strict=True)
        ]  # fmt: skip
        results = [torch.empty(shape, dtype=dtype, device=repeat.device) for shape, dtype, _ in repeat.outputs]
        outputs = tuple((it.shape(o, sizes), torch_dtype(o.type.dtype)) for o in it.forward.outputs)
        prepared = step.compiled.built().prepare([*used, *results])
        return cls(prepared, copied, outputs, repeat.workspace, repeat.device)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        device = self.device
        if self.copied:
            tensors = list(tensors)
            for i, shape in self.copied:
                tensors[i] = tensors[i].reshape(shape)
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.outputs]
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=device) if self.workspace else None
        addresses = [x.data_ptr() for x in tensors]
        addresses += [x.data_ptr() for x in results]
        if device.type != "cuda":  # tests
            self.prepared.run(addresses, workspace, 0)
        elif torch.cuda.current_device() == device.index:
            self.prepared.run(addresses, workspace, torch._C._cuda_getCurrentRawStream(device.index))
        else:
            with torch.cuda.device(device):
                self.prepared.run(addresses, workspace, torch._C._cuda_getCurrentRawStream(device.index))
        return results


class Calls:
    """The bound calls of one block."""

    def __init__(self, it: Block):
        self.block = it
        self.known: dict[tuple, Bound | None] = {}

    def run(self, key: tuple, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """The results of a call like an earlier one; None where there was none, or the addresses differ in kind."""
        bound = self.known.get(key)
        if bound is None:
            return None
        try:
            return bound.run(tensors)
        except CodaError:
            return None

    def remember(self, key: tuple, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> None:
        if key not in self.known:
            if len(self.known) >= REMEMBERED:
                self.known.clear()
            self.known[key] = Bound.of(self.block, tensors, sizes)
