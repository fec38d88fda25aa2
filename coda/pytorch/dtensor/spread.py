"""Spreads move before the norm that they follow, so that the norm and the products behind it are one region."""

from __future__ import annotations

from torch import Tensor, fx

from coda.pytorch.aliases import Aliases
from coda.pytorch.aten import kind
from coda.pytorch.dtensor.graph import Local, Spread, behind
from coda.pytorch.graph import bodies, with_gradient
from coda.pytorch.values import int_hint


def hoist_spreads(gm: fx.GraphModule, local: Local) -> None:
    """Move the spreads of a captured graph, and of the graphs that it calls, in place.

    Gradients are linear, and a function of replicas has the same derivative on all ranks: the sum over the ranks may
    come behind it. So may a spread move before the operation whose result it reads alone, to the operands that want a
    gradient, as long as one of them at most is as large: a norm, whose weight is small, but not a residual.
    """
    _Hoister(gm.graph, local).run()
    for body, _ in bodies(gm):
        hoist_spreads(body, local)
    gm.recompile()


class _Hoister:
    def __init__(self, graph: fx.Graph, local: Local):
        self.graph, self.local = graph, local
        self.aliases, self.wanting = Aliases(graph), with_gradient(graph)
        self.spreads: dict[tuple[fx.Node, Spread], fx.Node] = {}

    def run(self) -> None:
        for node in self.graph.nodes:
            if isinstance(what := self.local.called(node), Spread):
                self.spreads[node.args[0][0], what] = node
        pending = list(self.spreads)
        while pending:
            value, what = pending.pop()
            node = self.spreads[value, what]
            if not self.may_pass(value, node):
                continue
            del self.spreads[value, what]
            for operand in self.operands(value):
                if (operand, what) not in self.spreads:
                    self.spreads[operand, what] = self.spread(operand, what)
                pending.append((operand, what))
                value.replace_input_with(operand, self.spreads[operand, what])
            node.replace_all_uses_with(value)
            self.graph.erase_node(node)
        self.hide()

    def hide(self) -> None:
        """Take away those right behind an input, until ``restore``: a weight is to be seen as one."""
        for node in self.graph.find_nodes(op="placeholder"):
            spreads = {user: self.local.called(user) for user in node.users}
            what, *others = set(spreads.values()) or {None}
            if isinstance(what, Spread) and not others:
                self.local.hidden[node] = what
                for spread in spreads:
                    spread.replace_all_uses_with(node)
                    self.graph.erase_node(spread)

    def may_pass(self, value: fx.Node, node: fx.Node) -> bool:
        if kind(value) in (None, "product") or list(value.users) != [node] or self.aliases.touches_written(value):
            return False
        if not all(isinstance(n.meta["val"], Tensor) for n in (value, *value.all_input_nodes)):
            return False
        return sum(_elements(a) >= _elements(value) for a in self.operands(value)) <= 1

    def operands(self, value: fx.Node) -> list[fx.Node]:
        return [a for a in value.all_input_nodes if a in self.wanting]

    def spread(self, value: fx.Node, what: Spread) -> fx.Node:
        with self.graph.inserting_after(behind(value)):
            node = self.local.call(self.graph, what, [value], value.meta["val"])
        node.meta["val"] = value.meta["val"]
        self.wanting.add(node)
        return node


def _elements(node: fx.Node) -> int:
    return int_hint(node.meta["val"].numel())
