"""Copies that make tensors acceptable to a kernel: contiguous rows, 16-byte aligned base and row pitch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGN = 16  # bytes; what TMA asks of base addresses and strides


def is_regular(x: Tensor) -> bool:
    """Whether the tensor is row-major with a unit inner stride, an aligned base, aligned pitches and no overlap."""
    if x.numel() == 0:
        return True
    if x.data_ptr() % ALIGN:
        return False
    width = 1
    for axis in reversed(range(x.dim())):
        size, stride = x.shape[axis], x.stride(axis)
        if size == 1:
            continue
        if stride < width or (axis == x.dim() - 1 and stride != 1):
            return False
        if axis < x.dim() - 1 and stride * x.element_size() % ALIGN:
            return False
        width = stride * size
    return True


def regular_like(x: Tensor) -> Tensor:
    """An uninitialised regular tensor of the same shape: the last dim is a view into rows of aligned pitch."""
    if x.dim() < 2:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    step = max(1, ALIGN // x.element_size())
    pitch = -(-x.shape[-1] // step) * step
    return torch.empty((*x.shape[:-1], pitch), dtype=x.dtype, device=x.device)[..., : x.shape[-1]]


def cure(
    arguments: Sequence[Any], names: Sequence[str], check: Callable[[list[Any]], str | None]
) -> tuple[list[Any], list[int], str | None]:
    """Copy tensors until ``check`` accepts them.

    An argument named in the refusal goes first, then irregular ones in order; each is copied at most once. Returns the
    arguments, the positions that were copied and the refusal that is left (None: accepted).
    """
    current, copied = list(arguments), list[int]()
    reason = check(current)
    while reason is not None:
        position = _next_to_copy(current, names, copied, reason)
        if position is None:
            break
        current[position] = regular_like(current[position]).copy_(current[position])
        copied.append(position)
        reason = check(current)
    return current, copied, reason


def _next_to_copy(current: Sequence[Any], names: Sequence[str], copied: list[int], reason: str) -> int | None:
    tensors = {i: x for i, x in enumerate(current) if isinstance(x, Tensor) and x.dim() and i not in copied}
    named = [i for i in tensors if f"'{names[i]}'" in reason]
    irregular = [i for i, x in tensors.items() if not is_regular(x)]
    return next(iter(named + irregular), None)
