"""Attention masks by meaning: one that says "causal", or masks nothing, need not be a tensor.

Models write their masks out when they are traced, also where eager code leaves them out, and attention then takes a
kernel that reads one from memory. Here the element (q, k) of a mask is evaluated on either side of the diagonal
(elements/): what is allowed up to it and masked beyond it is the causal mask that attention has by itself.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from sympy import Dummy, Expr, Integer
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from coda.pytorch.aliases import Aliases, drop_unused
from coda.pytorch.elements import Elements, Region
from coda.pytorch.graph import bodies
from coda.pytorch.values import memory_order, shape_of

ATEN = torch.ops.aten
ATTENTION = ATEN.scaled_dot_product_attention.default
ARGUMENTS = {"query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False}
CAUSAL, NOTHING, TENSOR = "causal", "nothing", "tensor"


def without_masks(gm: fx.GraphModule) -> list[str]:
    """Take the masks that need not be tensors from the attentions of a captured graph, and of the graphs that it calls,
    in place. Returns what each mask says: CAUSAL; that NOTHING is masked; or what only the TENSOR says, which stays."""
    return _without_masks(gm, {}, set())


def _without_masks(gm: fx.GraphModule, operands: dict[fx.Node, fx.Node], written: set[fx.Node]) -> list[str]:
    """``operands`` and ``written``: as in ``Elements``, of the graphs around."""
    graph, aliases = gm.graph, Aliases(gm.graph)
    written |= {n for n in graph.nodes if aliases.is_written(n)}
    known, found = dict[tuple[Any, ...], str](), list[str]()
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        given = ARGUMENTS | dict(zip(ARGUMENTS, node.args, strict=False)) | node.kwargs
        if (mask := given["attn_mask"]) is None:
            continue
        sizes = shape_of(given["query"])[-2], shape_of(given["key"])[-2]
        if (mask, sizes) not in known:
            known[mask, sizes] = meaning(mask, *sizes, operands, written)
        found.append(known[mask, sizes])
        if found[-1] != TENSOR:
            _take_mask(graph, node, given, found[-1] == CAUSAL)
    for body, outer in bodies(gm):
        operands |= zip(body.graph.find_nodes(op="placeholder"), outer, strict=True)
        found += _without_masks(body, operands, written)
    if found:
        drop_unused(graph)
        gm.recompile()
    return found


def meaning(mask: fx.Node, queries: Expr, keys: Expr, operands: dict[fx.Node, fx.Node], written: set[fx.Node]) -> str:
    """What the mask of an attention of ``queries`` to ``keys`` says."""
    value = mask.meta["val"]
    facts = value.fake_mode.shape_env or ShapeEnv()  # what is known of sizes that are symbols
    *batch, q, k = index = tuple(Dummy(integer=True) for _ in range(max(2, value.dim())))
    ends = [((i, Integer(0)), (i, size - 1)) for i, size in zip(batch, shape_of(mask), strict=False)]

    def says(is_allowed: bool, *corners: tuple[Expr, Expr]) -> bool:
        """Whether all (q, k) between corners are allowed, or all masked."""
        hull = [dict([(q, a), (k, b), *others]) for a, b in corners for others in itertools.product(*ends)]
        element = Elements(Region(hull, facts), operands, written).at(mask, index)
        if isinstance(element, float):  # it is added to a score
            # The least number masks as -inf does: each query has a key, and no two scores are that far apart.
            return element == 0 if is_allowed else element <= torch.finfo(value.dtype).min
        return element is is_allowed

    zero, one, last, end = Integer(0), Integer(1), queries - 1, keys - 1
    if says(True, (zero, zero), (zero, end), (last, zero), (last, end)):
        return NOTHING
    if queries != keys and facts.bound_sympy(keys - queries).lower <= 0:
        return TENSOR
    rows = last if queries == keys else queries  # those with keys beyond the diagonal
    is_causal = (
        says(True, (zero, zero), (last, last))
        and says(True, (one, zero), (last, zero), (last, last - 1))
        and says(False, (zero, one), (zero, end), (rows - 1, end), (rows - 1, rows))
    )
    return CAUSAL if is_causal else TENSOR


def _take_mask(graph: fx.Graph, node: fx.Node, given: dict[str, Any], is_causal: bool) -> None:
    old, query = node.meta["val"], given["query"]
    given |= {"attn_mask": None, "is_causal": is_causal}
    if is_causal and shape_of(query)[-2] != shape_of(given["key"])[-2]:  # kernels want as many keys as queries
        with graph.inserting_before(node):
            length = query.meta["val"].shape[-2]
            length = length if isinstance(length, int) else _call(graph, ATEN.sym_size.int, query, -2)
            given |= {name: _call(graph, ATEN.slice.Tensor, given[name], -2, 0, length) for name in ("key", "value")}
    node.args, node.kwargs = tuple(given.pop(name) for name in ARGUMENTS), given
    node.meta["val"] = _result(node)
    order = memory_order(old)
    if memory_order(node.meta["val"]) == order:
        return
    with graph.inserting_before(node.next):  # another kernel, another layout: the views behind it want the old one
        turned = _call(graph, ATEN.permute.default, node, order)
        copy = _call(graph, ATEN.clone.default, turned, memory_format=torch.contiguous_format)
        back = _call(graph, ATEN.permute.default, copy, [order.index(dim) for dim in range(len(order))])
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not turned)


def _call(graph: fx.Graph, target: OpOverload, *args: Any, **options: Any) -> fx.Node:
    made = graph.call_function(target, args, options)
    made.meta["val"] = _result(made)
    return made


def _result(node: fx.Node) -> Any:
    args, options = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with args[0].fake_mode:
        return node.target(*args, **options)
