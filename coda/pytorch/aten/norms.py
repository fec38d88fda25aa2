"""Reductions along a dim, and the normalisations that torch has as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from coda.ir import Node
from coda.pytorch.aten.table import register
from coda.pytorch.values import Value

if TYPE_CHECKING:
    from coda.pytorch.translate import Translator

KINDS = {"mean": "reduce_mean", "sum": "reduce_sum", "amax": "reduce_max", "amin": "reduce_min"}


def _along_last(node: fx.Node) -> bool:
    """Whether a reduction is along the last dim."""
    dims = node.args[1] if len(node.args) > 1 else None
    rank = node.args[0].meta["val"].dim()
    return isinstance(dims, Sequence) and [d % rank for d in dims] == [rank - 1]


@register("reduction", *KINDS, takes=_along_last)
def reduce(t: Translator, node: fx.Node, a: Any, dims: Sequence[int], keepdim: bool = False, **kwargs: Any) -> Value:
    value = t.value(a)
    name = node.target._schema.name.removeprefix("aten::")
    kept = (*value.dims[:-1], ()) if keepdim else value.dims[:-1]
    return Value(kept, _over_last(t, KINDS[name], value, value.node))


def _over_last(t: Translator, op: str, value: Value, node: Node | None) -> Node | None:
    """A reduction of a node over the last dim of a value."""
    if node is None:
        return None
    return t.emit(op, node, axes=tuple(a.name for a in t.axes_of(value.dims[-1])))


def _norm_of_last(node: fx.Node) -> bool:
    return len(node.args[1]) == 1


@register("norm", "rms_norm", takes=_norm_of_last)
def rms_norm(t: Translator, node: fx.Node, x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Value:
    eps = torch.finfo(node.meta["val"].dtype).eps if eps is None else eps
    value = t.value(x)
    mean = _over_last(t, "reduce_mean", value, t.text("x * x", x=value.node))
    normed = Value(value.dims, t.text("x * rsqrt(mean + eps)", x=value.node, mean=mean, eps=t.value(eps).node))
    return normed if weight is None else scaled(t, normed, weight)


@register("norm", "layer_norm", takes=_norm_of_last)
def layer_norm(
    t: Translator, node: fx.Node, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value:  # fmt: skip
    value = t.value(x)
    centred = t.text("x - mean", x=value.node, mean=_over_last(t, "reduce_mean", value, value.node))
    variance = _over_last(t, "reduce_mean", value, t.text("c * c", c=centred))
    normed = Value(value.dims, t.text("c * rsqrt(v + eps)", c=centred, v=variance, eps=t.value(eps).node))
    normed = normed if weight is None else scaled(t, normed, weight)
    return normed if bias is None else _combined(t, "a + b", normed, t.value(bias))


def scaled(t: Translator, value: Value, weight: Any) -> Value:
    return _combined(t, "a * b", value, t.value(weight))


def _combined(t: Translator, text: str, a: Value, b: Value) -> Value:
    dims, nodes = t.broadcast([a, b])
    return Value(dims, t.text(text, **dict(zip("ab", nodes, strict=True))))
