"""Conversions: a rounding where the model writes one. Widening changes nothing, as arithmetic is f32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from coda.pytorch.aten.table import register
from coda.pytorch.values import Value, dtype_of

if TYPE_CHECKING:
    from coda.pytorch.translate import Translator

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _between_floats(node: fx.Node) -> bool:
    """Whether a conversion keeps device and layout and is one between float dtypes."""
    given, result = node.args[0].meta["val"], node.meta["val"]
    return given.dtype in FLOATS and result.dtype in FLOATS and given.device == result.device


def bits_gained(node: fx.Node) -> int:
    """How much wider the result of a conversion is; a change between two 16-bit types loses a bit."""
    given, result = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    lost = given != result and given.itemsize == result.itemsize
    return 8 * (result.itemsize - given.itemsize) - lost


@register("cast", "to", "type_as", "_to_copy", takes=_between_floats)
def convert(t: Translator, node: fx.Node, a: Any, *args: Any, **kwargs: Any) -> Value:
    value, dtype = t.value(a), dtype_of(node)
    if value.node is None or dtype is None or dtype.bits >= 32 or value.node.dtype == dtype:
        return value
    return Value(value.dims, t.emit("cast", value.node, dtype=dtype, saturate=False))
