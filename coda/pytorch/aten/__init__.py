"""ATen operations as programs, a file for each family: what an operation computes, said once."""

from __future__ import annotations

import operator

from torch import fx
from torch._ops import OpOverload

from coda.pytorch.aten import casts, norms, pointwise, products, views
from coda.pytorch.aten.table import RECORDS, Handler, Record

__all__ = [
    "casts",
    "handler",
    "is_structural",
    "is_view",
    "kind",
    "norms",
    "operation",
    "pointwise",
    "products",
    "views",
]


def record(node: fx.Node) -> Record | None:
    """The record of a graph node's operation; None where it is not translated."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return RECORDS["getitem"] if record(node.args[0]) else None
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    found = RECORDS.get(operation(node))
    return found if found is not None and found.takes(node) else None


def operation(node: fx.Node) -> str:
    """The name of a node's ATen operation."""
    return node.target._schema.name.removeprefix("aten::")


def handler(node: fx.Node) -> Handler | None:
    found = record(node)
    return found.translate if found else None


def kind(node: fx.Node) -> str | None:
    """The kind of a node's operation, "widening" for a cast to more bits and "view" for one that changes nothing;
    None where it is not translated."""
    found = record(node)
    if found is not None and found.kind == "cast":
        bits = casts.bits_gained(node)
        return "widening" if bits > 0 else "cast" if bits < 0 else "view"
    return found.kind if found else None


def is_view(node: fx.Node) -> bool:
    """Whether an operation only renames, cuts or reorders."""
    return kind(node) in ("view", "cut")


def is_structural(node: fx.Node) -> bool:
    """Whether an operation takes a tensor apart, or joins some."""
    return kind(node) in ("cut", "join")
