"""Complex numbers written out: a rotary embedding as a product of complex numbers becomes arithmetic on its two parts.

``view_as_real(view_as_complex(x) * c)`` is ``stack(xr * cr - xi * ci, xr * ci + xi * cr)``. Programs have real numbers
only; and the other operations around are then fused, too. Complex values that are not made from real ones in the graph,
tables usually, stay as they are, and their parts are read.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from coda.pytorch.aliases import drop_unused

ATEN = torch.ops.aten
Parts = tuple[fx.Node, fx.Node]


def write_out_products(graph: fx.Graph) -> None:
    """Replace products of complex numbers that come from real ones, and go back to real ones, in place."""
    _Writer(graph).run()


class _Writer:
    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.made: dict[fx.Node, Parts] = {}  # of values written out
        self.read: dict[fx.Node, Parts] = {}  # of tables

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.target is ATEN.view_as_complex.default:
                self.made[node] = self.parts_of_pairs(node, node.args[0])
            elif node.target is ATEN.mul.Tensor and _is_complex(node) and self.is_product(node):
                self.made[node] = self.product(node)
            elif node.target is ATEN.view_as_real.default and node.args[0] in self.made:
                self.join(node)
        drop_unused(self.graph)

    def is_product(self, node: fx.Node) -> bool:
        return all(isinstance(a, fx.Node) and _is_complex(a) for a in node.args) and any(
            a in self.made for a in node.args
        )

    def product(self, node: fx.Node) -> Parts:
        (ar, ai), (br, bi) = (self.made.get(a) or self.table(a) for a in node.args)
        with self.graph.inserting_before(node):
            times = lambda a, b: self.call(ATEN.mul.Tensor, a, b)  # noqa: E731
            real = self.call(ATEN.sub.Tensor, times(ar, br), times(ai, bi))
            return real, self.call(ATEN.add.Tensor, times(ar, bi), times(ai, br))

    def table(self, node: fx.Node) -> Parts:
        """The parts of a complex value, each in memory of its own."""
        if node not in self.read:
            with self.graph.inserting_after(node):
                pairs = self.call(ATEN.view_as_real.default, node)
            real, imaginary = self.parts_of_pairs(pairs.next, pairs)
            with self.graph.inserting_after(imaginary):
                copies = [self.call(ATEN.clone.default, x) for x in (imaginary, real)]
            self.read[node] = copies[1], copies[0]
        return self.read[node]

    def parts_of_pairs(self, before: fx.Node, pairs: fx.Node) -> Parts:
        with self.graph.inserting_before(before):
            return self.call(ATEN.select.int, pairs, -1, 0), self.call(ATEN.select.int, pairs, -1, 1)

    def join(self, node: fx.Node) -> None:
        with self.graph.inserting_before(node):
            joined = self.call(ATEN.stack.default, list(self.made[node.args[0]]), -1)
        joined.meta |= {k: v for k, v in node.meta.items() if k != "val"}
        node.replace_all_uses_with(joined)

    def call(self, target: torch._ops.OpOverload, *args: object) -> fx.Node:
        node = self.graph.call_function(target, args)
        fakes = fx.map_arg(args, lambda a: a.meta["val"])
        if target is ATEN.clone.default:
            node.meta["val"] = target(*fakes, memory_format=torch.contiguous_format)
            node.kwargs = {"memory_format": torch.contiguous_format}
        else:
            node.meta["val"] = target(*fakes)
        return node


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()
