"""Calls like an earlier one: the same layouts need no second look.

What a call's shapes, strides, dtypes and alignment led to is kept under ``layout_key`` and replayed: views of the
operands, new outputs, launch; or, where kernels of ours lose, the separate ones. Only numbers are kept, never a tensor.
Addresses still matter (an output may not overlap an operand, two weights must lie within reach of one tensor map), so
the artifact checks every launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
View = tuple[Shape, Shape] | None  # shape and strides of a tensor; None: no tensor
Launch = Callable[[list[Any], int, torch.device], None]
Compute = Callable[[Mapping[str, Any], Mapping[str, int]], Mapping[str, Tensor]]

REMEMBERED = 256  # layouts kept for one program
ALIGN = 16  # bytes; the alignment of base addresses that kernels distinguish


def layout_key(values: Mapping[str, Any]) -> tuple:
    """Everything about operands that decides how a call runs, except addresses beyond their alignment."""
    return tuple(
        (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % ALIGN) if isinstance(x, Tensor) else type(x)
        for x in values.values()
    )


def wants_gradient(values: Mapping[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values.values())


def views_of(given: Sequence[Any], used: Sequence[Any]) -> tuple[View, ...] | None:
    """The operands of a call as it used them; None where one had to be copied to be flattened."""
    for before, after in zip(given, used, strict=True):
        if isinstance(before, Tensor) and before.data_ptr() != after.data_ptr():
            return None
    return tuple((tuple(x.shape), x.stride()) if isinstance(x, Tensor) else None for x in used)


def viewed(values: Sequence[Any], views: Sequence[View]) -> list[Any]:
    return [
        x if view is None or x.shape == view[0] else x.as_strided(*view)
        for x, view in zip(values, views, strict=True)
    ]  # fmt: skip


@dataclass(frozen=True)
class Separate:
    """How to compute a call again that ran as separate kernels, for the ``reason`` given: views of the operands, sizes,
    and the shape in which the caller sees each output."""

    reason: str
    views: tuple[View, ...]
    sizes: Mapping[str, int]
    outputs: Mapping[str, Shape]

    def run(self, values: Mapping[str, Any], compute: Compute) -> list[Tensor]:
        operands = dict(zip(values, viewed(list(values.values()), self.views), strict=True))
        results = compute(operands, self.sizes)
        return [results[name].reshape(shape) for name, shape in self.outputs.items()]


@dataclass(frozen=True)
class Repeat:
    """How to run a call again.

    ``views``: shape and strides the kernel sees of each operand (None: no tensor). ``outputs``: for each the kernel's
    shape, the dtype and the shape the caller sees. ``inout``: positions that are written.
    """

    views: tuple[View, ...]
    outputs: tuple[tuple[Shape, torch.dtype, Shape], ...]
    inout: tuple[int, ...]
    workspace: int
    device: torch.device

    @classmethod
    def of(
        cls,
        given: Sequence[Any],
        used: Sequence[Any],
        outputs: Sequence[tuple[Tensor, Shape]],
        inout: Sequence[int],
        workspace: int,
        device: torch.device,
    ) -> Repeat | None:
        """Of a call that ran on its operands as they were; None where an operand had to be copied to be flattened."""
        views = views_of(given, used)
        if views is None:
            return None
        results = tuple((tuple(x.shape), x.dtype, seen) for x, seen in outputs)
        return cls(views, results, tuple(inout), workspace, device)

    def run(self, values: Sequence[Any], launch: Launch) -> list[Tensor]:
        """Launch on these operands (with defaults filled in). Returns the outputs as the caller sees them."""
        args = viewed(values, self.views)
        results = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in self.outputs]
        launch([*args, *results], self.workspace, self.device)
        for position in self.inout:
            torch.autograd.graph.increment_version(values[position])
        return [x if x.shape == seen else x.view(seen) for x, (_, _, seen) in zip(results, self.outputs, strict=True)]
