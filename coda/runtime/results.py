"""The outputs of a call: what the caller preallocated, what comes back, and in which shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.errors import CodaError, did_you_mean
from coda.ir import Output, Program
from coda.runtime.binding import type_shape
from coda.runtime.operands import Operands, Shape


def returned(program: Program) -> list[Output]:
    """The outputs a call returns: all but those that accumulate into an inout parameter."""
    return [o for o in program.outputs if o.into is None]


def shape_of(output: Output, operands: Operands) -> Shape:
    """The shape in which the caller sees an output: leading dims as the operands had them."""
    shape = type_shape(output.type, operands.sizes)
    dims = output.type.dims
    return (*operands.lead[dims[0]], *shape[1:]) if dims and dims[0] in operands.lead else shape


def preallocated(program: Program, out: Any, operands: Operands) -> dict[str, Tensor]:
    """The caller's output tensors by name, checked. Raises CodaError naming the output."""
    outputs = returned(program)
    tensors = _by_name([o.name for o in outputs], out)
    for output in outputs:
        if (x := tensors.get(output.name)) is not None:
            _check(output, x, operands)
    return tensors


def _by_name(names: list[str], out: Any) -> dict[str, Tensor]:
    if out is None:
        return {}
    if isinstance(out, Mapping):
        for name in out:
            if name not in names:
                raise CodaError.of(f"out= names '{name}', which is no output", did_you_mean(name, set(names)))
        return dict(out)
    tensors = [out] if isinstance(out, Tensor) else list(out)
    if len(tensors) != len(names):
        raise CodaError.of(f"out= has {len(tensors)} tensors, the program returns {len(names)} ({', '.join(names)})")
    return dict(zip(names, tensors, strict=True))


def _check(output: Output, x: Tensor, operands: Operands) -> None:
    dtype, shape = torch_dtype(output.type.dtype), shape_of(output, operands)
    if x.dtype != dtype:
        raise CodaError.of(f"out= for '{output.name}' is {x.dtype}, the program declares {output.type}")
    if not output.is_partial and tuple(x.shape) != shape:
        raise CodaError.of(f"out= for '{output.name}' has shape {list(x.shape)}, expected {list(shape)}")
    for name, operand in operands.tensors.items():
        if operand.dim() and operand.device != x.device:
            raise CodaError.of(f"out= for '{output.name}' is on {x.device}, operand '{name}' on {operand.device}")
        if _overlap(x, operand):
            raise CodaError.of(f"out= for '{output.name}' shares memory with operand '{name}'",
                               "operands are never modified; give the output memory of its own")  # fmt: skip


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors intersect."""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    (a_first, a_last), (b_first, b_last) = _extent(a), _extent(b)
    return a_first <= b_last and b_first <= a_last


def _extent(x: Tensor) -> tuple[int, int]:
    """First and last byte address."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (span + 1) * x.element_size() - 1


def allocate(
    program: Program, shapes: Mapping[str, Sequence[int]], given: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """A tensor of the kernel's shape for each output: the caller's where given, else uninitialised."""
    return {
        o.name: _flat(o.name, given[o.name], shapes[o.name])
        if o.name in given
        else torch.empty(tuple(shapes[o.name]), dtype=torch_dtype(o.type.dtype), device=device)
        for o in returned(program)
    }


def _flat(name: str, x: Tensor, shape: Sequence[int]) -> Tensor:
    """The caller's output as a view of the kernel's shape."""
    try:
        return x.view(tuple(shape))
    except RuntimeError:
        raise CodaError.of(
            f"out= for '{name}' with shape {list(x.shape)} and strides {list(x.stride())} is no view of {list(shape)}"
        ) from None


def guard_gradient(program: Program, operands: Operands, x: Tensor) -> Tensor:
    """An output whose gradient raises, rather than being silently absent, where an operand wants one."""
    wanting = [t for t in operands.tensors.values() if t.requires_grad]
    if not wanting or not torch.is_grad_enabled() or not x.is_floating_point():
        return x
    return _NoBackward.apply(program.name, x, *wanting)


class _NoBackward(torch.autograd.Function):
    """The identity of its first tensor; ties the others into the graph so that backward reaches the error."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, *wanting: Tensor) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise CodaError.of(f"program '{ctx.name}' was called as a function without derivative",
                           "call it under torch.no_grad(), or differentiate it with coda.pytorch")  # fmt: skip
