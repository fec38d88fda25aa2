"""The graph that a backend gets, made ready: ATen operations before autograd, pure but for the writes it says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

GRAD_MODE = torch._C._set_grad_enabled


def capture(gm: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph in ATen operations, traced on Dynamo's own fake tensors. Placeholders keep name and meta."""
    before = [n for n in gm.graph.nodes if n.op == "placeholder"]
    examples = [n.meta["example_value"] if "example_value" in n.meta else n.meta["val"] for n in before]
    mode = next((x.fake_mode for x in examples if isinstance(x, torch._subclasses.FakeTensor)), None)
    if mode is None:
        raise ValueError("the graph has no fake tensors: it was not captured by torch.compile")
    with mode:
        captured = make_fx(gm, pre_dispatch=True)(*examples)
    for old, new in zip(before, (n for n in captured.graph.nodes if n.op == "placeholder"), strict=True):
        new.meta |= {k: v for k, v in old.meta.items() if k != "val"}
    captured.meta |= gm.meta
    _detach_instead_of_no_grad(captured.graph)
    _without_empty_parts(captured.graph)
    captured.recompile()
    return captured


def _detach_instead_of_no_grad(graph: fx.Graph) -> None:
    """Take the switches of grad mode out: what ran without gradients gets its operands detached. Then the order of
    operations is that of the data."""
    enabled, without = True, set[fx.Node]()
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is GRAD_MODE:
            enabled = bool(node.args[0])
            graph.erase_node(node)
        elif not enabled and node.op == "call_function":
            without.add(node)
    for node in without:
        for operand in node.all_input_nodes:
            if operand not in without and wants_gradient_at_all(operand):
                with graph.inserting_before(node):
                    detached = graph.call_function(torch.ops.aten.detach.default, (operand,))
                detached.meta["val"] = operand.meta["val"]
                node.replace_input_with(operand, detached)


def _without_empty_parts(graph: fx.Graph) -> None:
    """Join only what has elements: the first step of a cache, and partial RoPE of whole heads, join nothing."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        parts = [x for x in node.args[0] if x.meta["val"].numel() != 0]
        if len(parts) == 1 and len(node.args[0]) > 1:
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (parts[0],))
            copy.meta |= node.meta
            node.replace_all_uses_with(copy)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def wants_gradient_at_all(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and not (
        node.op == "placeholder" and not _example(node).requires_grad
    )  # fmt: skip


def _example(node: fx.Node) -> Tensor:
    return node.meta.get("example_value", node.meta["val"])


def is_weight(node: fx.Node) -> bool:
    """Whether a graph input is a parameter or buffer of the module."""
    if node.op == "get_attr":
        return True
    example = node.meta.get("example_value")
    static = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
    return node.op == "placeholder" and (isinstance(example, torch.nn.Parameter) or static)


def with_gradient(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that a gradient may flow through."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            example = _example(node)
            wants = isinstance(example, Tensor) and example.requires_grad
        elif node.op == "get_attr":
            wants = isinstance(node.meta.get("val"), Tensor) and node.meta["val"].requires_grad
        else:
            stops = node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
            wants = not stops and any(a in found for a in node.all_input_nodes)
        if wants:
            found.add(node)
    return found


class Aliases:
    """Which graph values may share memory, and which of those are written.

    Conservative: a result of an operation that can alias an operand is taken to do so, and a write to one of a class
    is a write to all.
    """

    def __init__(self, graph: fx.Graph):
        self.root: dict[fx.Node, fx.Node] = {}
        written: list[fx.Node] = []
        for node in graph.nodes:
            self.root[node] = node
            for operand, writes in _aliased(node):
                self._join(node, operand)
                written += [operand] if writes else []
        self.writes = {self.of(n) for n in written}

    def of(self, node: fx.Node) -> fx.Node:
        while self.root[node] is not node:
            node = self.root[node]
        return node

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        self.root[self.of(a)] = self.of(b)

    def is_written(self, node: fx.Node) -> bool:
        """Whether any value that may share memory with this one is ever written."""
        return self.of(node) in self.writes

    def touches_written(self, node: fx.Node) -> bool:
        return any(self.is_written(n) for n in (node, *node.all_input_nodes))


def _aliased(node: fx.Node) -> Iterable[tuple[fx.Node, bool]]:
    """The operands that a node's result may share memory with, and whether the node writes them."""
    if node.op != "call_function":
        return
    if not isinstance(node.target, OpOverload):
        for operand in node.all_input_nodes:  # getitem, a higher-order operation
            yield operand, False
        return
    schema = node.target._schema
    names = {a.name: a for a in schema.arguments}
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    for name, value in given.items():
        info = names[name].alias_info
        if info is None:
            if schema.name in MAY_ALIAS and isinstance(value, fx.Node):
                yield value, False
            continue
        for operand in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(operand, fx.Node):
                yield operand, info.is_write


# Composite operations that give back their operand or a view of it at times, which their schema does not say.
MAY_ALIAS = {
    f"aten::{n}"
    for n in (
        "reshape",
        "contiguous",
        "to",
        "type_as",
        "flatten",
        "dropout",
        "clone",
        "matmul",
        "_to_copy",
        "expand_as",
    )
}


def chains(graph: fx.Graph, aliases: Aliases) -> dict[fx.Node, fx.Node]:
    """For each node that touches written memory the one before it that touches the same: their order matters."""
    last: dict[fx.Node, fx.Node] = {}
    before: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for root in {aliases.of(n) for n in (node, *node.all_input_nodes) if aliases.is_written(n)}:
            if root in last:
                before[node] = last[root]
            last[root] = node
    return before


def sort(graph: fx.Graph, before: dict[fx.Node, fx.Node]) -> None:
    """Put the nodes in an order in which each comes after its operands, and otherwise as they are."""
    extra: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, earlier in before.items():
        extra[node].append(earlier)
    nodes, placed = list(graph.nodes), dict[fx.Node, None]()
    alive = set(nodes)
    for root in nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            pending = [a for a in (*node.all_input_nodes, *extra[node]) if a in alive and a not in placed]
            if pending and len(stack) <= len(nodes):
                stack.extend(reversed(pending))
            else:
                placed.setdefault(stack.pop())
    cursor = next(iter(graph.nodes))
    for node in placed:
        if node is not cursor:
            cursor.append(node)
        cursor = node
    graph.lint()
