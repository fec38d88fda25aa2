"""A graph on DTensors as one on their local parts.

Under tensor parallelism Dynamo's graph holds DTensors: parameters, and what stands between the hooks of the parallel
styles. PyTorch's sharding rules do most operations by the same operation on the local parts; a trace of both tells
(``trace.py``). Those are written as operations on local parts here, and ``from_local`` and ``to_local`` vanish, so
that all passes behind this one see tensors. What is left are redistributions, and operations that contain one: each is
one opaque call of local parts while regions are found. ``restore.py`` puts back the calls on DTensors that Dynamo
wrote, with ``from_local`` and ``to_local`` around them, and leaves the collectives to PyTorch.

Between operations the gradient of each local part lies like the part does (``layout.of_gradient``). Where a replica
meets a shard, its gradient on a rank is a part of a sum. Such an operation reads the replica through a *spread*: the
identity, whose gradient is added over the ranks. It is made once for each replica, so that there is one all-reduce for
q, k and v.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from coda.pytorch.dtensor.conversion import conversion
from coda.pytorch.dtensor.graph import Local, OnDTensors, Spread, dtensors, example
from coda.pytorch.dtensor.layout import is_even, is_plain, of_gradient, summed_dims
from coda.pytorch.dtensor.trace import Number, Trace, local_of, traced
from coda.pytorch.graph import CHECKPOINT
from coda.pytorch.refusal import Refusal
from coda.pytorch.rewrite import name_of

PRODUCTS = {f"aten::{n}" for n in ("mm", "addmm", "linear", "matmul")}
KNOWN = {"device_mesh", "placements", "run_check", "shape", "stride", "async_op"}  # arguments that change no local part


def localize(gm: fx.GraphModule) -> Local:
    """Dynamo's graph on local parts. Raises Refusal where there is none."""
    local = Local(gm, gm)
    local.gm = _Localizer(gm, local).run()
    return local


class _Localizer:
    """Writes a graph anew: ``values`` are the local parts of the old one's DTensors, and all else. A DTensor laid in
    another way than ``is_plain`` has none; it lives within opaque calls."""

    def __init__(self, gm: fx.GraphModule, local: Local):
        self.gm, self.local, self.graph = gm, local, fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.bodies: dict[str, fx.GraphModule] = {}
        self.known: dict[tuple[Any, ...], fx.Node] = {}  # spreads and redistributions, each made once

    def run(self) -> fx.GraphModule:
        for node in self.gm.graph.nodes:
            self.place(node)
        made = fx.GraphModule(self.gm, self.graph)
        made.meta |= self.gm.meta
        for name, body in self.bodies.items():
            setattr(made, name, body)
        return made

    def place(self, node: fx.Node) -> None:
        ready = all(a in self.values for a in node.all_input_nodes)
        if node.op == "placeholder":
            self.values[node] = self.copy(node)
            self.values[node].meta["example_value"] = _as_local(example(node))
        elif node.op == "output":
            if not ready:
                raise Refusal("it returns a DTensor that is no replica, shard or part of a sum")
            self.copy(node)
        elif ready and not dtensors(node, *node.all_input_nodes):
            self.values[node] = self.copy(node)
        elif ready and node.target is CHECKPOINT:
            self.values[node] = self.checkpointed(node)
        elif (made := self.on_parts(node) if ready else None) is not None:
            self.values[node] = made
        else:
            self.on_dtensors(node)

    def copy(self, node: fx.Node) -> fx.Node:
        return self.graph.node_copy(node, self.values.__getitem__)

    def checkpointed(self, node: fx.Node) -> fx.Node:
        """A graph under activation checkpointing, which reads local parts, too."""
        name = node.args[0].target
        self.bodies[name] = _Localizer(getattr(self.gm, name), self.local).run()
        return self.copy(node)

    # Operations on local parts.

    def on_parts(self, node: fx.Node) -> fx.Node | None:
        """An operation as what it does to local parts; None where it does more."""
        if (found := conversion(node)) is not None:
            return self.converted(node, *found)
        if node.target is operator.getitem and isinstance(example(node.args[0]), (tuple, list)):
            return self.copy(node)
        if isinstance(example(node), (int, torch.SymInt)):
            return self.size(example(node))
        if (dims := _summed(node)) is None:
            return None
        trace = _traced(node, example)
        if trace is None or trace.writes or not trace.is_local:
            return None
        read = {a: self.spread(a, d) for a, d in dims.items()}
        alone = _traced(node, lambda a: local_of(example(a)))
        if alone is not None and trace.does_the_same(alone):
            return self.graph.node_copy(node, lambda a: read.get(a, self.values[a]))
        return self.replayed(node, trace, lambda a: read.get(a, self.values[a]))

    def converted(self, node: fx.Node, name: str, given: dict[str, Any]) -> fx.Node | None:
        """A conversion that changes no local part, nor its gradient but by a spread."""
        operand = node.args[0]
        was, result = example(operand), example(node)
        if name == "to_local":
            wanted, usual = given.get("grad_placements"), of_gradient(was.placements)
            if wanted is None:
                return self.values[operand]
            dims = frozenset(i for i, p in enumerate(wanted) if p.is_partial() and usual[i].is_replicate())
            return self.spread(operand, dims) if tuple(wanted) == of_gradient(was.placements, dims) else None
        if not is_plain(result.placements) or given.keys() - KNOWN or given.get("run_check"):
            return None
        return self.values[operand] if name == "from_local" or result.placements == was.placements else None

    def replayed(self, node: fx.Node, trace: Trace, value: Callable[[fx.Node], fx.Node]) -> fx.Node | None:
        """The operations that were seen on local parts: views, whose sizes are not those of the DTensor."""
        if not isinstance(trace.result, Number) or any(call.target._schema.is_mutable for call in trace.calls):
            return None
        given = [value(a) for a in tree_leaves((node.args, node.kwargs)) if _is_tensor(a)]
        numbered = dict(enumerate(given))
        for call in trace.calls:
            args, kwargs = tree_map_only(Number, lambda n: numbered[n.index], (call.args, call.kwargs))
            args, kwargs = tree_map_only(torch.SymInt, self.size, (args, kwargs))
            made = self.graph.call_function(call.target, args, kwargs)
            made.meta |= node.meta
            if len(call.results) == 1:
                numbered[call.results[0].index] = made
            for i, number in enumerate(call.results if len(call.results) > 1 else ()):
                numbered[number.index] = self.graph.call_function(operator.getitem, (made, i))
        return numbered[trace.result.index]

    def size(self, size: int | torch.SymInt) -> Any:
        """A size of a DTensor, or of a local part, in the new graph."""
        expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        if expr.is_Integer:
            return int(expr)
        known = {symbol: self.symbol(symbol) for symbol in expr.free_symbols}
        return sympy_interp(PythonReferenceAnalysis, known, expr).node

    def symbol(self, symbol: sympy.Symbol) -> fx.Proxy:
        """A symbol of a size: an input, or the size of one."""
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        for node in self.gm.graph.find_nodes(op="placeholder"):
            x = local_of(example(node))
            if isinstance(x, torch.SymInt) and x.node.expr == symbol:
                return fx.Proxy(self.values[node], tracer)
            for dim, own in enumerate(x.shape if isinstance(x, Tensor) else ()):
                if isinstance(own, torch.SymInt) and own.node.expr == symbol:
                    size = self.graph.call_function(torch.ops.aten.sym_size.int, (self.values[node], dim))
                    return fx.Proxy(size, tracer)
        raise Refusal(f"the size {symbol} of a DTensor is not that of an input")

    def spread(self, node: fx.Node, dims: frozenset[int]) -> fx.Node:
        value, x = self.values[node], example(node)
        if not dims or not x.requires_grad or not torch.is_grad_enabled():
            return value
        key = value, Spread(x.device_mesh, dims)
        if key not in self.known:
            self.known[key] = self.local.call(self.graph, key[1], [value], local_of(x))
        return self.known[key]

    # Opaque calls.

    def on_dtensors(self, node: fx.Node) -> None:
        """A call on DTensors as one from local parts to a local part, where its result has one."""
        x, found = example(node), conversion(node)
        if not isinstance(x, Tensor) or (isinstance(x, DTensor) and not is_plain(x.placements)):
            return
        if found is None and node.op != "get_attr":
            self.look_at(node)
        operands = tuple(self.operands(node))
        parts = [self.values[a] for a in operands]
        again = found and found[0] == "redistribute" and operands == (node.args[0],) and not found[1].keys() - KNOWN
        key = (*parts, x.placements) if again else (node,)
        if key not in self.known:
            self.known[key] = self.local.call(self.graph, OnDTensors(node, operands), parts, local_of(x))
        self.values[node] = self.known[key]

    def look_at(self, node: fx.Node) -> None:
        """Refuse a write, and what autocast changes: this runs without. Note a product."""
        trace = _traced(node, example)
        with torch._C._DisableAutocast():
            later = _traced(node, example)
        if trace is None or later is None:
            raise Refusal(f"'{node.name}' on DTensors could not be traced by itself")
        if not trace.does_the_same(later) or _dtypes(trace.value) != _dtypes(example(node)):
            raise Refusal(f"'{node.name}' communicates, and autocast casts what it reads")
        if trace.writes:
            raise Refusal(f"'{node.name}' writes into a DTensor")
        if any(c.target._schema.name in PRODUCTS for c in trace.calls):
            laid = " and ".join(str(example(a).placements) for a in dtensors(*node.all_input_nodes))
            reason = f"of DTensors laid {laid} it communicates, or its shards differ in size"
            self.local.refused[name_of(node)] = reason

    def operands(self, node: fx.Node) -> Iterator[fx.Node]:
        """The tensors that a call on DTensors starts from."""
        for a in node.all_input_nodes:
            if a in self.values and isinstance(example(a), Tensor):
                yield a
            else:
                yield from self.operands(a)


def _as_local(x: Any) -> Any:
    """The local part of a DTensor as an input of a graph: a parameter where that is one. What is still communicated is
    waited for by what reads it."""
    if not isinstance(x, (DTensor, AsyncCollectiveTensor)):
        return x
    part = local_of(x).detach().requires_grad_(x.requires_grad)
    return torch.nn.Parameter(part, x.requires_grad) if isinstance(x, torch.nn.Parameter) else part


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, fx.Node) and isinstance(example(leaf), Tensor)


def _dtypes(value: Any) -> list[torch.dtype]:
    return [x.dtype for x in tree_leaves(value) if isinstance(x, Tensor)]


def _summed(node: fx.Node) -> dict[fx.Node, frozenset[int]] | None:
    """For each DTensor that an operation reads the mesh dims on which its gradient is a part of a sum. None where some
    tensor is none, or has another mesh or layout, or shards that differ in size. A tensor that wants no gradient may be
    there."""
    results = [x for x in tree_leaves(example(node)) if isinstance(x, Tensor)]
    operands = dtensors(*node.all_input_nodes)
    others = [example(a) for a in node.all_input_nodes if a not in operands]
    laid = [*map(example, operands), *results]
    if not results or not all(isinstance(x, DTensor) and is_plain(x.placements) and is_even(x) for x in laid):
        return None
    if len({x.device_mesh for x in laid}) != 1 or any(isinstance(x, Tensor) and x.requires_grad for x in others):
        return None
    dims = summed_dims([example(a).placements for a in operands], [x.placements for x in results])
    return None if dims is None else dict(zip(operands, dims, strict=True))


def _traced(node: fx.Node, value: Callable[[fx.Node], Any]) -> Trace | None:
    """What the operation of a node does, with values for its operands; None where that is an error."""
    if node.op not in ("call_function", "call_method"):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), value)
    try:
        if node.op == "call_method":
            return traced(lambda x, *rest, **named: getattr(x, node.target)(*rest, **named), args, kwargs)
        return traced(node.target, args, kwargs)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
