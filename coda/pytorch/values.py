"""Values of a graph: tensors of torch as values of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from coda.dtypes import F32, DType, from_torch
from coda.ir import Node
from coda.pytorch.cells import Dims


@dataclass(frozen=True)
class Value:
    """A torch tensor as a value of the program: the cells of each torch dim (none for a dim of size 1, or one along
    which it is constant) and, in the walk that builds, its node."""

    dims: Dims
    node: Node | None = None


def shape_of(node: fx.Node) -> tuple[sympy.Expr, ...]:
    """The shape of a graph value as numbers and symbols."""
    value = node.meta["val"]
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in sizes)


def dtype_of(node: fx.Node) -> DType | None:
    """The dtype of a graph value; f32 for a number."""
    value = node.meta.get("val")
    return from_torch(value.dtype) if isinstance(value, torch.Tensor) else F32


def memory_order(value: torch.Tensor) -> list[int]:
    """The dims of a tensor, slowest first."""
    return sorted(range(value.dim()), key=lambda i: (-int_hint(value.stride(i)), i))


def int_hint(size: Any) -> int:
    """A size as a number, to order dims by."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr.subs({s: 64 for s in expr.free_symbols}))
    return int(size)
