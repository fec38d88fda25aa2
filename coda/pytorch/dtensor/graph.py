"""Opaque calls: what a graph on local parts has for calls on DTensors, while regions are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

NAME = "coda::on_dtensors"
_results: dict[int, Tensor] = {}  # of the opaque calls of graphs that are being compiled

torch.library.define(NAME, "(Tensor(a)[] parts, int call) -> Tensor(a)")


@torch.library.register_fake(NAME)
def _fake(parts: Sequence[Tensor], call: int) -> Tensor:
    like = _results[call]
    return like.new_empty_strided(like.shape, like.stride())


ON_DTENSORS = torch.ops.coda.on_dtensors.default


@dataclass(frozen=True)
class Spread:
    """The identity on replicas, whose gradient is added over some dims of a mesh."""

    mesh: Any
    dims: frozenset[int]


@dataclass(frozen=True)
class OnDTensors:
    """A call on DTensors: a node of Dynamo's graph, with the nodes whose local parts it starts from."""

    node: fx.Node
    operands: tuple[fx.Node, ...]


@dataclass
class Local:
    """A graph on local parts, ``gm``, and what ``restore`` needs: Dynamo's graph, the opaque calls by number, the
    inputs that all read through a spread, and the products in opaque calls, with the reason."""

    gm: fx.GraphModule
    dynamo: fx.GraphModule
    calls: dict[int, Spread | OnDTensors] = field(default_factory=dict)
    hidden: dict[fx.Node, Spread] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def call(self, graph: fx.Graph, what: Spread | OnDTensors, parts: Sequence[fx.Node], result: Tensor) -> fx.Node:
        """A new opaque call, whose result is like a tensor."""
        number = max(_results, default=0) + 1
        self.calls[number], _results[number] = what, result
        return graph.call_function(ON_DTENSORS, (list(parts), number))

    def called(self, node: fx.Node) -> Spread | OnDTensors | None:
        """What a node calls, if that is opaque."""
        return self.calls[node.args[1]] if node.target is ON_DTENSORS else None

    def forget(self) -> None:
        for number in self.calls:
            del _results[number]


def example(node: fx.Node) -> Any:
    """What Dynamo knows of the value of a node."""
    return node.meta.get("example_value", node.meta.get("val"))


def behind(node: fx.Node) -> fx.Node:
    """The node behind which to insert what reads a node: inputs stay together."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def dtensors(*nodes: fx.Node) -> list[fx.Node]:
    """Those of some nodes that are DTensors, or have some among several values."""
    return [n for n in nodes if any(isinstance(x, DTensor) for x in tree_leaves(example(n)))]
