"""The calls on DTensors go back into a graph on local parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.node import map_arg

from coda.pytorch.aliases import drop_unused
from coda.pytorch.dtensor.graph import Local, OnDTensors, Spread, behind, example
from coda.pytorch.dtensor.layout import Placements, of_gradient
from coda.pytorch.graph import bodies
from coda.pytorch.refusal import Refusal


def restore(gm: fx.GraphModule, local: Local) -> None:
    """Write the opaque calls of a captured graph, and of the graphs that it calls, as Dynamo did, in place. Inputs and
    results are those of Dynamo's graph again."""
    inputs = dict(zip(_placeholders(local.dynamo), _placeholders(gm), strict=True))
    writer = _Writer(gm.graph, local, inputs)
    for was, node in inputs.items():
        if isinstance(x := example(was), Tensor):
            node.meta |= {"example_value": x, "val": x}
        if isinstance(x, DTensor):
            writer.part_of_input(node, x)
    writer.run()
    writer.wrap_results(local.dynamo.graph.output_node())
    _finish(gm)
    for body, _ in bodies(gm):
        _restore_body(body, local)


def _restore_body(gm: fx.GraphModule, local: Local) -> None:
    _Writer(gm.graph, local, {}).run()
    _finish(gm)
    for body, _ in bodies(gm):
        _restore_body(body, local)


def _finish(gm: fx.GraphModule) -> None:
    gm.graph.lint()
    gm.recompile()


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


class _Writer:
    """Writes calls on DTensors into one graph; ``inputs`` are its placeholders by those of Dynamo's graph."""

    def __init__(self, graph: fx.Graph, local: Local, inputs: Mapping[fx.Node, fx.Node]):
        self.graph, self.local, self.inputs = graph, local, inputs
        for node in graph.find_nodes(op="placeholder"):
            if node in local.hidden:
                self.show(node, local.hidden.pop(node))

    def show(self, node: fx.Node, what: Spread) -> None:
        """Put back the spread behind an input."""
        users = list(node.users)
        with self.graph.inserting_after(behind(node)):
            spread = self.local.call(self.graph, what, [node], node.meta["val"])
        for user in users:
            user.replace_input_with(node, spread)

    def part_of_input(self, node: fx.Node, x: DTensor) -> None:
        users = list(node.users)
        with self.graph.inserting_after(behind(node)):
            part = self.graph.call_function(to_local(x.placements), (node,))
        for user in users:
            user.replace_input_with(node, part)
        self.take_spreads(part, x)

    def run(self) -> None:
        drop_unused(self.graph)
        for node in list(self.graph.nodes):
            if (what := self.local.called(node)) is None or not node.users:  # one that was taken has none
                continue
            with self.graph.inserting_before(node):
                made = self.spread(node, what) if isinstance(what, Spread) else self.on_dtensors(node, what)
            node.replace_all_uses_with(made)
            self.graph.erase_node(node)
            if isinstance(what, OnDTensors) and isinstance(x := example(what.node), DTensor):
                self.take_spreads(made, x)

    def spread(self, node: fx.Node, what: Spread) -> fx.Node:
        replicas = (Replicate(),) * what.mesh.ndim
        (part,) = node.args[0]
        laid = self.from_local(part, what.mesh, replicas)
        return self.graph.call_function(to_local(replicas, what.dims), (laid,))

    def take_spreads(self, part: fx.Node, x: DTensor) -> None:
        """Let ``to_local`` of a DTensor do what comes right behind it: its gradient is then added over the ranks by
        what made the DTensor, a gather of rows by a reduce-scatter."""
        spreads = {node: self.local.called(node) for node in part.users}
        found = {what for what in spreads.values() if isinstance(what, Spread) and what.mesh == x.device_mesh}
        if len(found) != 1 or not found.issuperset(spreads.values()):
            return
        (what,) = found
        if all(x.placements[dim].is_replicate() for dim in what.dims):
            part.target = to_local(x.placements, what.dims)
            for node in spreads:
                node.replace_all_uses_with(part)
                self.graph.erase_node(node)

    def on_dtensors(self, node: fx.Node, what: OnDTensors) -> fx.Node:
        """The call of Dynamo's graph on DTensors that are made from local parts, and the local part of its result."""
        written: dict[fx.Node, fx.Node] = dict(self.inputs)
        for operand, part in zip(what.operands, node.args[0], strict=True):
            x = example(operand)
            written[operand] = self.whole(part, x) if isinstance(x, DTensor) else part
        made, x = self.written(what.node, written), example(what.node)
        return self.graph.call_function(to_local(x.placements), (made,)) if isinstance(x, DTensor) else made

    def whole(self, part: fx.Node, x: DTensor) -> fx.Node:
        """A DTensor like another from a local part. Shape and strides are told where they are numbers: shards may
        differ in size."""
        fixed = not any(isinstance(s, torch.SymInt) for s in (*x.shape, *x.stride()))
        geometry = {"shape": torch.Size(x.shape), "stride": tuple(x.stride())} if fixed else {}
        return self.from_local(part, x.device_mesh, x.placements, geometry)

    def from_local(
        self, part: fx.Node, mesh: Any, placements: Placements, geometry: Mapping[str, Any] | None = None
    ) -> fx.Node:
        """AOT autograd of torch 2.13 takes meshes for inputs: the graph's own is used, or that of a DTensor."""
        known = {was: example(was) for was in self.inputs}
        source = [self.inputs[was] for was, x in known.items() if getattr(x, "device_mesh", x) == mesh][:1]
        return self.graph.call_function(from_local(mesh, placements, geometry or {}), (part, *source))

    def written(self, node: fx.Node, there: dict[fx.Node, fx.Node]) -> fx.Node:
        """A node of Dynamo's graph, and what it reads, in this one."""
        if node not in there:
            if node.op == "placeholder":
                raise Refusal(f"'{node.name}' is no input of a checkpointed graph")
            args, kwargs = map_arg((node.args, node.kwargs), lambda a: self.written(a, there))
            there[node] = self.graph.create_node(node.op, node.target, args, kwargs)
        return there[node]

    def wrap_results(self, dynamo: fx.Node) -> None:
        """Give back DTensors where Dynamo's graph does."""
        output = self.graph.output_node()
        results = list(output.args[0])
        with self.graph.inserting_before(output):
            for i, was in enumerate(dynamo.args[0]):
                if isinstance(was, fx.Node) and isinstance(x := example(was), DTensor):
                    results[i] = self.whole(results[i], x)
        output.args = (tuple(results),)


# Functions that a graph can call.


def to_local(placements: Placements, summed: frozenset[int] = frozenset()) -> Callable[[DTensor], Tensor]:
    """``to_local`` of a DTensor whose gradient is a part of a sum on some mesh dims."""
    placements = of_gradient(placements, summed)

    def to_local(x: DTensor) -> Tensor:
        return x.to_local(grad_placements=placements)

    return to_local


def from_local(mesh: Any, placements: Placements, geometry: Mapping[str, Any]) -> Callable[..., DTensor]:
    """``from_local``, of a part and what has the mesh, where the graph has that."""
    mesh = getattr(mesh, "real_obj", mesh)

    def from_local(part: Tensor, source: Any = None) -> DTensor:
        there = mesh if source is None else getattr(source, "device_mesh", source)
        return DTensor.from_local(part, there, placements, run_check=False, **geometry)

    return from_local
