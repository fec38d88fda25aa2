"""Products: of a matrix, perhaps with several dims of rows, and a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from coda.pytorch.aten.table import register
from coda.pytorch.cells import Dims
from coda.pytorch.refusal import Refusal
from coda.pytorch.values import Value, dtype_of

if TYPE_CHECKING:
    from coda.pytorch.translate import Translator

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]


def _linear(node: fx.Node) -> bool:
    x, w = _tensors(node)[:2]
    return x.dim() >= 2 and w.dim() == 2 and x.dtype in FLOATS


def _addmm(node: fx.Node) -> bool:
    bias, x, _ = _tensors(node)
    return not node.kwargs and bias.dim() == 1 and x.dtype in FLOATS


@register("product", "linear", takes=_linear)
def linear(t: Translator, node: fx.Node, x: Any, w: Any, bias: Any = None) -> Value:
    weight = t.value(w)
    y = product(t, node, x, Value(weight.dims[::-1], weight.node))
    return y if bias is None else biased(t, y, bias)


@register("product", "addmm", takes=_addmm)
def addmm(t: Translator, node: fx.Node, bias: Any, x: Any, w: Any) -> Value:
    return biased(t, product(t, node, x, t.value(w)), bias)


@register("product", "mm", "matmul", takes=_linear)
def matmul(t: Translator, node: fx.Node, x: Any, w: Any) -> Value:
    return product(t, node, x, t.value(w))


def product(t: Translator, node: fx.Node, x: Any, weight: Value) -> Value:
    """x @ weight: [..., K] @ [K, N]."""
    value, dtype = t.value(x), dtype_of(x)
    inner, columns = weight.dims
    t.cells.unify(inner, value.dims[-1])
    t.columns[x].append(columns)
    dims: Dims = (*value.dims[:-1], columns)
    if not any(dims[:-1]) or not columns or not inner:
        raise Refusal("a product with a dim of size 1 is not translated")
    if not t.building:
        return Value(dims)
    assert dtype is not None
    return Value(dims, t.emit("dot", t.matrix(value, 1, dtype), t.matrix(weight, 1, dtype)))


def biased(t: Translator, y: Value, bias: Any) -> Value:
    dims, (a, b) = t.broadcast([y, t.value(bias)])
    return Value(dims, t.text("a + b", a=a, b=b))
