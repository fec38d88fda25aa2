"""What the functions of ``coda.nn`` share: checks of operands, and a program as a differentiable call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coda.dtypes import from_torch
from coda.errors import CodaError
from coda.pytorch.block import Options, one_line
from coda.pytorch.op import BLOCK


def as_rows(x: Tensor, weight: Tensor) -> Tensor:
    """The operand as a matrix, after a check that it fits the weight."""
    if type(weight).__name__ == "DTensor" or weight.dim() != 2:
        raise CodaError.of(
            f"the weight is a {type(weight).__name__} with {weight.dim()} dims, not a matrix",
            "under FSDP call this inside the forward of the module that owns the weight, so that it is gathered",
        )
    if x.shape[-1] != weight.shape[1]:
        raise CodaError.of(
            f"the operand has {x.shape[-1]} columns, the weight {list(weight.shape)} takes {weight.shape[1]}"
        )
    return x.reshape(-1, x.shape[-1])


def check_same_dtype(x: Tensor, **others: Tensor | None) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise CodaError.of(f"the operand is {x.dtype}", "it can be bfloat16, float16 or float32")
    for name, other in others.items():
        if other is not None and other.dtype != x.dtype:
            raise CodaError.of(f"'{name}' is {other.dtype}, the operand {x.dtype}", f"pass {name}.to({x.dtype})")


def run(text: str, operands: dict[str, Tensor], sizes: dict[str, int], memory: str = "fast") -> Tensor:
    """The first result of a program, with derivatives for the operands that want one."""
    wrt = tuple(n for n, x in operands.items() if x.requires_grad and torch.is_grad_enabled())
    return BLOCK(list(operands.values()), list(sizes.values()), text, _options(tuple(sizes), wrt, memory))[0]


# torch.compile takes these two for constants: it cannot look inside.


@torch.compiler.assume_constant_result
def text_of(template: str, **values: Any) -> str:
    """A program with its dtypes and numbers."""
    names = {n: from_torch(v) if isinstance(v, torch.dtype) else v for n, v in values.items()}
    return one_line(template.format(**names))


@torch.compiler.assume_constant_result
def _options(sizes: tuple[str, ...], wrt: tuple[str, ...], memory: str) -> str:
    return Options(sizes=sizes, wrt=wrt, memory=memory).text()
