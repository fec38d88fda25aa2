"""Which values of a graph share memory, and which operations write to it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

# Higher-order operations that write to none of their operands, other than a call of a Triton kernel.
FUNCTIONAL = {
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
    "autograd_function_apply",
    "triton_kernel_wrapper_functional",
    "flex_attention",
    "cond",
    "while_loop",
    "scan",
    "associative_scan",
    "map_impl",
}

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


def drop_unused(graph: fx.Graph) -> None:
    """Take out what nobody reads, but for what writes: torch.fx takes a call of a Triton kernel for pure."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or any(writes for _, writes in _aliased(node)))


def _aliased(node: fx.Node) -> Iterable[tuple[fx.Node, bool]]:
    """The operands that a node's result may share memory with, and whether the node writes them."""
    if node.op != "call_function":
        return
    if not isinstance(node.target, OpOverload):
        writes = isinstance(node.target, HigherOrderOperator) and node.target.name() not in FUNCTIONAL
        for operand in node.all_input_nodes:  # or getitem, say
            yield operand, writes
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
