"""Regions: the largest sets of operations around products, between the attentions, that become one program each.

Attention, embeddings, losses and whatever is not translated are barriers. Behind a barrier that a product leads to a
new *level* begins; operations of one level that are connected are a region. What comes before any product (a norm, a
scaled embedding) belongs to the first level that reads it. Views and widening casts at the rim stay outside where
they cost nothing. A region is convex, so that it can be one operation of the graph, and it reads no memory that anyone
writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from coda.pytorch.aliases import Aliases
from coda.pytorch.aten import is_view, kind, record
from coda.pytorch.graph import is_converted_weight, weights

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Region:
    """Operations in graph order, and those whose results others read."""

    nodes: list[fx.Node]
    outputs: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        inside = set(self.nodes)
        self.outputs = [n for n in self.nodes if any(u not in inside for u in n.users)]

    @property
    def products(self) -> list[fx.Node]:
        return [n for n in self.nodes if kind(n) == "product"]

    def leads_to_product(self, node: fx.Node) -> bool:
        """Whether a product of the region depends on an operation of it."""
        reached = {node}
        for other in self.nodes:  # in graph order
            if any(a in reached for a in other.all_input_nodes):
                if kind(other) == "product":
                    return True
                reached.add(other)
        return False


def find_regions(graph: fx.Graph, barriers: Iterable[fx.Node] = ()) -> list[Region]:
    """The regions of a graph, in order. ``barriers`` are operations known not to be translated."""
    return _Finder(graph, set(barriers)).regions()


class _Finder:
    def __init__(self, graph: fx.Graph, barriers: set[fx.Node]):
        self.nodes = list(graph.nodes)
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.aliases, self.weights = Aliases(graph), weights(graph)
        taken = {n for n in self.nodes if n not in barriers and self.is_taken(n)}
        several = {n for n in self.nodes if isinstance(n.meta.get("val"), (list, tuple))}
        torn = {n for n in several if n not in taken or not taken.issuperset(n.users)}
        self.taken = taken - torn - {u for n in torn for u in n.users}  # what has several results, with all or none
        self.level: dict[fx.Node, int] = {}
        self.behind: dict[fx.Node, bool] = {}  # whether there is a product before a node, at its level
        for node in self.nodes:
            self._place(node)
        self._place_what_comes_before()

    def is_taken(self, node: fx.Node) -> bool:
        """Whether an operation is translated, here."""
        if record(node) is None or self.aliases.touches_written(node) or is_converted_weight(node):
            return False
        values = node.meta.get("val")
        values = values if isinstance(values, (list, tuple)) else [values]
        return all(isinstance(v, Tensor) and v.dtype in FLOATS and v.numel() != 0 for v in values)

    # Levels.

    def _place(self, node: fx.Node) -> None:
        taken, level, behind = node in self.taken, 0, False
        for operand in node.all_input_nodes:
            at, product = self.level[operand], self.behind[operand]
            if taken and operand not in self.taken and product:
                at, product = at + 1, False
            if at > level:
                level, behind = at, product
            elif at == level:
                behind = behind or product
        self.level[node], self.behind[node] = level, behind or (kind(node) == "product" and taken)

    def _place_what_comes_before(self) -> None:
        """What leads to the left side of a product belongs to the first level with such a product; what only its
        epilogue reads, a table of cosines, is an operand like others."""
        leads: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node not in self.taken or self.behind[node]:
                continue
            there = [u for u in node.users if u in leads or (u in self.taken and kind(u) == "product")]
            self.level[node] = min((self.level[u] for u in there), default=-1)
            if there:
                leads.add(node)

    def is_cheap(self, node: fx.Node) -> bool:
        """Whether an operation on weights alone is done again in each region: on a vector, or a view."""
        if self.behind[node] or node not in self.taken:
            return False
        value = node.meta["val"]
        own = all(a in self.weights or self.is_cheap(a) for a in node.all_input_nodes)
        return own and isinstance(value, Tensor) and (is_view(node) or sum(s != 1 for s in value.shape) <= 1)

    # Components.

    def regions(self) -> list[Region]:
        found = []
        for nodes in self.components():
            nodes = self.convex(self.trimmed(nodes))
            if any(kind(n) == "product" for n in nodes):
                nodes |= self.cheap_operands(nodes)
                found.append(Region(sorted(nodes, key=self.position.__getitem__)))
        return found

    def components(self) -> list[set[fx.Node]]:
        """Connected operations of one level. Products that read the same value are connected, too."""
        members = [n for n in self.nodes if n in self.taken and self.level[n] >= 0 and not self.is_cheap(n)]
        root = {n: n for n in members}

        def of(node: fx.Node) -> fx.Node:
            while root[node] is not node:
                node = root[node]
            return node

        reading: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in members:
            for operand in node.all_input_nodes:
                if operand in root and self.level[operand] == self.level[node]:
                    root[of(node)] = of(operand)
                elif kind(node) == "product" and operand not in self.weights:
                    first = reading.setdefault((operand, self.level[node]), node)
                    root[of(node)] = of(first)
        groups: dict[fx.Node, set[fx.Node]] = {}
        for node in members:
            groups.setdefault(of(node), set()).add(node)
        return list(groups.values())

    def cheap_operands(self, nodes: set[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        pending = [a for n in nodes for a in n.all_input_nodes if a not in nodes]
        while pending:
            node = pending.pop()
            if self.is_cheap(node) and node not in found:
                found.add(node)
                pending += node.all_input_nodes
        return found

    # Rims.

    def trimmed(self, nodes: set[fx.Node]) -> set[fx.Node]:
        """Without views of what is read, and without views and widening casts of what is returned."""
        nodes = set(nodes)
        while True:
            first = {n for n in nodes if is_view(n) and not any(a in nodes for a in n.all_input_nodes)}
            last = {n for n in nodes if not any(u in nodes for u in n.users) and self.is_loose(n, nodes)}
            if not first | last:
                return nodes
            nodes -= first | last

    def is_loose(self, node: fx.Node, nodes: set[fx.Node]) -> bool:
        """Whether a last operation is better left outside: a widening cast, a view of one, or a view of what is
        returned anyway. The only view of a result stays: it may say what the heads are."""
        if kind(node) != "view":
            return kind(node) == "widening"
        (operand, *_) = node.all_input_nodes
        if self.is_loose(operand, nodes):
            return True
        others = [u for u in operand.users if u is not node]
        return any(u not in nodes or not any(v in nodes for v in u.users) for u in others)

    def convex(self, nodes: set[fx.Node]) -> set[fx.Node]:
        """Without the operations from which a path leaves the region and comes back. These come before products."""
        while nodes:
            after = self._reached(nodes, forward=True) - nodes
            before = self._reached(nodes, forward=False) - nodes
            between = after & before
            if not between:
                return nodes
            nodes = nodes - self._reached(between, forward=False)
        return nodes

    def _reached(self, start: set[fx.Node], forward: bool) -> set[fx.Node]:
        found, pending = set(start), list(start)
        while pending:
            node = pending.pop()
            for other in node.users if forward else node.all_input_nodes:
                if other not in found:
                    found.add(other)
                    pending.append(other)
        return found
