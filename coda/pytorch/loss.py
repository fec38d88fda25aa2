"""Option ``fuse_loss``: a cross entropy and the product that makes its logits become ``linear_cross_entropy``.

Only where nothing else reads the logits, so that they need not be stored: a model that returns them keeps them. What
stands between (casts to f32, views, a shift by one token, Gemma's softcap) goes to the rows, or into the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from coda.pytorch.aliases import drop_unused
from coda.pytorch.aten import operation
from coda.pytorch.graph import with_gradient
from coda.pytorch.refusal import Refusal
from coda.pytorch.rewrite import name_of

ATEN = torch.ops.aten
REDUCTIONS = ("none", "mean", "sum")  # as ATen counts them
SAME = {"alias", "clone", "contiguous", "detach_"}
CASTS = {"to", "_to_copy", "type_as", "float"}
SHAPES = {"view", "reshape", "_unsafe_view"}
ROWS = {*SHAPES, "slice", "flatten"}  # they are done to the rows in place of the logits
ARGUMENTS = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")


def fuse_losses(gm: fx.GraphModule, memory: str) -> list[str]:
    """Replace the losses of a captured graph, in place. Returns the names of the products that they took in."""
    names = []
    differentiable = with_gradient(gm.graph) if torch.is_grad_enabled() else set()
    for node in gm.graph.find_nodes(op="call_function", target=ATEN.cross_entropy_loss.default):
        try:
            head = _Head.of(node)
        except Refusal:
            continue
        names.append(name_of(head.product))
        _replace(gm.graph, node, head, memory, differentiable)
    if names:
        drop_unused(gm.graph)
        gm.recompile()
    return names


@dataclass(frozen=True)
class _Head:
    """The product of a loss, what is done to its rows, and the factor of a softcap."""

    product: fx.Node
    rows: tuple[fx.Node, ...]
    softcap: float | None

    @classmethod
    def of(cls, loss: fx.Node) -> _Head:
        """Raises Refusal where the logits are not those of a product alone."""
        logits, target = loss.args[0], loss.args[1]
        if logits.meta["val"].dim() != 2 or target.meta["val"].dtype not in (torch.int64, torch.int32):
            raise Refusal("classes are not the columns of a matrix of logits")
        rows, softcap, node = [], None, logits
        while _called(node) != "linear":
            if len(node.users) != 1:
                raise Refusal("the logits are read elsewhere")
            if (cap := _softcap(node)) is not None and softcap is None:
                node, softcap = cap
                continue
            if not _keeps_columns(node):
                raise Refusal(f"'{node.name}' stands between the product and the loss")
            rows += [node] if _called(node) in ROWS else []
            node = node.args[0]
        if len(node.users) != 1 or not _has_kernels(node):
            raise Refusal("the logits are read elsewhere, or have no kernel")
        return cls(node, tuple(reversed(rows)), softcap)


def _called(node: Any) -> str:
    """The ATen operation of a node; empty where it is something else."""
    return operation(node) if isinstance(node, fx.Node) and isinstance(node.target, OpOverload) else ""


def _keeps_columns(node: fx.Node) -> bool:
    """Whether an operation leaves the logits of each row as they are, but for a widening."""
    name = _called(node)
    if name not in SAME | CASTS | ROWS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    if name in CASTS:
        return after.dtype in (torch.float32, before.dtype)
    if name == "slice":
        return (node.args[1] if len(node.args) > 1 else 0) % before.dim() != before.dim() - 1
    return bool(before.shape[-1] == after.shape[-1])


def _softcap(node: fx.Node) -> tuple[fx.Node, float] | None:
    """z and c of ``tanh(z / c) * c``."""
    chain: list[Any] = [node]
    while _called(chain[-1]) in ("mul", "tanh"):
        chain.append(chain[-1].args[0])
    if [_called(n) for n in chain] != ["mul", "tanh", "div"] or any(len(n.users) != 1 for n in chain[1:]):
        return None
    cap, divisor = chain[0].args[1], chain[2].args[1]
    if not isinstance(cap, (int, float)) or cap != divisor or cap <= 0:
        return None
    return chain[2].args[0], float(cap)


def _has_kernels(product: fx.Node) -> bool:
    """Whether the interpreter runs it anyway, as on a CPU, or a kernel takes it."""
    value = product.meta["val"]
    if value.device.type != "cuda":
        return bool(value.device.type == "cpu" and value.numel() != 0)
    return value.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(value.device) == (9, 0)


def _replace(graph: fx.Graph, loss: fx.Node, head: _Head, memory: str, differentiable: set[fx.Node]) -> None:
    given: dict[str, Any] = dict(zip(ARGUMENTS, loss.args, strict=False)) | loss.kwargs
    x, weight, *bias = head.product.args
    options = {
        "ignore_index": given.get("ignore_index", -100),
        "reduction": REDUCTIONS[given.get("reduction", 1)],
        "label_smoothing": given.get("label_smoothing", 0.0),
        "softcap": head.softcap,
        "memory": memory,
    }
    with graph.inserting_before(loss):
        for node in head.rows:
            made = _done_to_rows(graph, node, x)
            if x in differentiable:
                differentiable.add(made)
            x = made
        operands = {"x": x, "weight": weight, "target": given["target"], "bias": bias[0] if bias else None}
        operands["class_weight"] = given.get("weight")
        found = _traced(graph, {n: v for n, v in operands.items() if v is not None}, options, differentiable)
        value = loss.meta["val"]
        if value.dtype is not torch.float32:
            found = graph.call_function(ATEN.to.dtype, (found, value.dtype))
            found.meta["val"] = value
    loss.replace_all_uses_with(found)
    graph.erase_node(loss)


def _traced(
    graph: fx.Graph, operands: Mapping[str, fx.Node], options: Mapping[str, Any], differentiable: set[fx.Node]
) -> fx.Node:
    """``linear_cross_entropy`` of nodes of a graph, in the operations that it is made of."""
    from coda.nn.functional import linear_cross_entropy  # which is made of the op of this package

    def call(*values: Tensor) -> Tensor:
        return linear_cross_entropy(**dict(zip(operands, values, strict=True)), **options)

    nodes = list(operands.values())
    with nodes[0].meta["val"].fake_mode:
        values = [n.meta["val"].detach().requires_grad_(n in differentiable) for n in nodes]
        traced = make_fx(call, pre_dispatch=True)(*values).graph
    inputs = dict(zip(traced.find_nodes(op="placeholder"), nodes, strict=True))
    found = graph.graph_copy(traced, inputs)
    assert isinstance(found, fx.Node)
    return found


def _done_to_rows(graph: fx.Graph, node: fx.Node, x: fx.Node) -> fx.Node:
    """An operation on logits, on the rows that they are made of: a shape ends in their width."""
    target, rest, value = node.target, node.args[1:], x.meta["val"]
    if _called(node) in SHAPES:
        target, rest = ATEN.reshape.default, ([*node.args[1][:-1], value.shape[-1]],)
    made = graph.call_function(target, (x, *rest), dict(node.kwargs))
    with value.fake_mode:
        made.meta["val"] = target(value, *fx.map_arg(rest, lambda n: n.meta["val"]), **node.kwargs)
    return made
