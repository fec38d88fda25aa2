"""The graph that a backend gets, made ready: ATen operations before autograd, pure but for the writes it says."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from coda.pytorch import autocast
from coda.pytorch.aliases import drop_unused
from coda.pytorch.aten import kind, operation
from coda.pytorch.complex import write_out_products

GRAD_MODE = torch._C._set_grad_enabled
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
POLICY = "_checkpoint_context_fn"
PLAIN = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)
KEPT = {"example_value", "tensor_dict", "grapharg", "wants_gradient", "tensor_meta"}  # of an input's meta


def capture(gm: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph in ATen operations, traced on Dynamo's own fake tensors. Placeholders keep name and meta."""
    before = [n for n in gm.graph.nodes if n.op == "placeholder"]
    examples = [n.meta["example_value"] if "example_value" in n.meta else n.meta["val"] for n in before]
    mode = next((x.fake_mode for x in examples if isinstance(x, torch._subclasses.FakeTensor)), None)
    if mode is None:
        raise ValueError("the graph has no fake tensors: it was not captured by torch.compile")
    run, ambient = fx.Interpreter(gm).run, autocast.State.current()

    def traced(*args: Any) -> Any:
        with autocast.entering():
            return run(*args)

    with mode, preserve_node_meta(), _checkpoints_with_policy(gm):
        captured = make_fx(traced, pre_dispatch=True)(*examples)
        _without_autocast(captured, ambient)
        _without_complex(captured)
    for body, _ in bodies(captured):
        if body.meta.get(POLICY) is PLAIN:
            del body.meta[POLICY]
    captured.meta |= gm.meta
    _hand_down(captured, [n.meta for n in before])
    return captured


def _without_autocast(gm: fx.GraphModule, ambient: autocast.State) -> None:
    """Write the casts of autocast into a graph and the graphs that it calls."""
    states = autocast.write_casts(gm.graph, ambient)
    for node, state in states.items():
        if node.target is CHECKPOINT:
            _without_autocast(getattr(gm, node.args[0].target), state)


def _without_complex(gm: fx.GraphModule) -> None:
    write_out_products(gm.graph)
    for body, _ in bodies(gm):
        _without_complex(body)


def _hand_down(gm: fx.GraphModule, inputs: Sequence[dict[str, Any]]) -> None:
    """Give the placeholders of a graph the meta of its inputs, and make it ready; then the graphs that it calls."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, meta in zip(placeholders, inputs, strict=True):
        node.meta |= {k: v for k, v in meta.items() if k in KEPT}
    _detach_instead_of_no_grad(gm.graph)
    _detach_out_of_place(gm.graph)
    _without_empty_parts(gm.graph)
    wanting = with_gradient(gm.graph)
    for body, operands in bodies(gm):
        _hand_down(body, [n.meta | {"wants_gradient": n in wanting} for n in operands])
    gm.recompile()


def bodies(gm: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, list[fx.Node]]]:
    """The graphs under activation checkpointing that a graph calls, with their operands."""
    for node in gm.graph.find_nodes(op="call_function", target=CHECKPOINT):
        yield getattr(gm, node.args[0].target), list(node.args[1:])


@contextlib.contextmanager
def _checkpoints_with_policy(gm: fx.GraphModule) -> Iterator[None]:
    """Tracing before autograd wants to see a policy in each checkpointed graph: that of plain checkpointing, which
    recomputes all, where there is none."""
    plain = [body for body, _ in bodies(gm) if POLICY not in body.meta]
    log = logging.getLogger("torch._higher_order_ops.wrap")  # it would warn of policies, which the user does not have
    level = log.level
    if plain:
        log.setLevel(logging.ERROR)
    for body in plain:
        body.meta[POLICY] = PLAIN
    try:
        yield
    finally:
        log.setLevel(level)
        for body in plain:
            del body.meta[POLICY]


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
    wanting = with_gradient(graph)
    for node in without:
        for operand in node.all_input_nodes:
            if operand not in without and operand in wanting:
                with graph.inserting_before(node):
                    detached = graph.call_function(torch.ops.aten.detach.default, (operand,))
                detached.meta["val"] = operand.meta["val"]
                node.replace_input_with(operand, detached)


def _detach_out_of_place(graph: fx.Graph) -> None:
    """What nothing else reads need not be detached in place: numbers that the model has as tensors."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        if len(node.args[0].users) == 1 and node.args[0].op == "call_function":
            node.target = torch.ops.aten.detach.default


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
    drop_unused(graph)


def weights(graph: fx.Graph) -> set[fx.Node]:
    """The graph inputs that are weights: parameters and buffers, and what products read on the right. A conversion of
    a matrix of them is a weight, too: it is made once, not in each kernel that reads it."""
    found = {n for n in graph.nodes if _is_parameter(n)}
    found |= {n for n in graph.nodes if is_converted_weight(n)}
    for node in graph.nodes:
        if kind(node) == "product":
            right = node.args[2 if operation(node) == "addmm" else 1]
            while kind(right) == "view":
                right = right.args[0]
            if right.op == "placeholder":
                found.add(right)
    return found


def is_converted_weight(node: fx.Node) -> bool:
    """Whether a node is a parameter, a matrix or a view of one, in another dtype."""
    if kind(node) not in ("cast", "widening") or node.meta["val"].dim() < 2:
        return False
    operand = node.args[0]
    while kind(operand) == "view":
        operand = operand.args[0]
    return _is_parameter(operand) or is_converted_weight(operand)


def _is_parameter(node: fx.Node) -> bool:
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
            example = node.meta.get("example_value", node.meta["val"])
            wants = node.meta.get("wants_gradient", isinstance(example, Tensor) and example.requires_grad)
        elif node.op == "get_attr":
            wants = isinstance(node.meta.get("val"), Tensor) and node.meta["val"].requires_grad
        else:
            stops = node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
            wants = not stops and any(a in found for a in node.all_input_nodes)
        if wants:
            found.add(node)
    return found


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
