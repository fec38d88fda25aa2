"""Regions of a graph become calls of the custom op."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from coda.printer import print_program
from coda.pytorch.aliases import Aliases, chains, drop_unused
from coda.pytorch.aten import is_structural, kind, operation
from coda.pytorch.block import Options, block, one_line
from coda.pytorch.config import Config
from coda.pytorch.execute import unlowered_product
from coda.pytorch.graph import bodies, sort, weights, with_gradient
from coda.pytorch.normal import Positions
from coda.pytorch.op import BLOCK
from coda.pytorch.refusal import NoKernel, Refusal
from coda.pytorch.regions import Region, find_regions
from coda.pytorch.translate import Translation, translate

ATEN = torch.ops.aten
MOST_RETRIES = 32
SHARED = "memory that it shares is written in place, or its dtype has no place in a program"
SHOWN = ("pointwise", "norm", "reduction", "join")


@dataclass(frozen=True)
class Fused:
    """A region that became one call; ``products`` and ``others`` are the names of what it computes."""

    region: Region
    products: tuple[str, ...]
    others: tuple[str, ...]
    translation: Translation
    options: Options
    text: str


@dataclass
class Rewritten:
    """What happened to the products of a graph."""

    fused: list[Fused] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # products that stay with Inductor, and why


def rewrite(gm: fx.GraphModule, config: Config, training: bool) -> Rewritten:
    """Replace the regions of a captured graph, and of the graphs that it calls, in place."""
    graph = gm.graph
    done = plan(graph, config, with_gradient(graph) if training else set())
    here = list(done.fused)
    for body, _ in bodies(gm):
        below = rewrite(body, config, training)
        done.fused += below.fused
        done.refused |= below.refused
    before = chains(graph, Aliases(graph))
    replaced: dict[fx.Node, fx.Node] = {}
    for fused in here:
        _replace(graph, fused, replaced)
    if here:
        sort(graph, before)
        drop_unused(graph)
        gm.recompile()
    return done


def plan(graph: fx.Graph, config: Config, differentiable: set[fx.Node]) -> Rewritten:
    """Translate the regions. An operation that turns out not to be translated becomes a barrier between regions."""
    done, barriers = Rewritten(), dict[fx.Node, str]()
    known: dict[tuple[fx.Node, ...], Fused | Refusal] = {}
    for _ in range(MOST_RETRIES):
        done, more = Rewritten(), dict[fx.Node, str]()
        for region in find_regions(graph, barriers):
            key = tuple(region.nodes)
            if key not in known:
                known[key] = _attempt(graph, region, config, differentiable)
            found = known[key]
            if isinstance(found, Fused):
                done.fused += [found]
            else:
                more |= dict.fromkeys(_blamed(region, found), str(found))
        if not more:
            break
        barriers |= more
    inside = {n for f in done.fused for n in f.region.nodes}
    left = [n for n in graph.nodes if kind(n) == "product" and n not in inside]
    done.refused = {name_of(n): barriers.get(n, SHARED) for n in left}
    return done


def _attempt(graph: fx.Graph, region: Region, config: Config, differentiable: set[fx.Node]) -> Fused | Refusal:
    try:
        return _translated(graph, region, config, differentiable)
    except Refusal as refusal:
        return refusal


def _blamed(region: Region, refusal: Refusal) -> list[fx.Node]:
    """The operations that become barriers, so that the rest is tried again: the one that is not translated; where there
    is no kernel products in f32, such as those of routers; then what takes results apart and puts them together, behind
    the last products first; else all products."""
    if refusal.node is not None:
        return [refusal.node]
    if isinstance(refusal, NoKernel):
        wide = [n for n in region.products if n.meta["val"].dtype == torch.float32]
        if wide:
            return wide
        parts = [n for n in region.nodes if is_structural(n)]
        last = [n for n in parts if not region.leads_to_product(n)]
        if parts:
            return last or parts
    return region.products


def _translated(graph: fx.Graph, region: Region, config: Config, differentiable: set[fx.Node]) -> Fused:
    if len(region.products) == 1 and all(kind(n) in ("product", "view", "cast") for n in region.nodes):
        raise Refusal("a product by itself: there is nothing to fuse with it")
    made = translate(region.nodes, region.outputs, weights(graph), differentiable, config.numerics)
    for size in made.sizes.values():
        if not size.is_Integer and size_source(graph, made, size) is None:
            raise Refusal(f"the size {size} of a dim is not that of an operand")
    wrt = tuple(p.name for p, n in zip(made.program.params, made.tensors, strict=False) if n in differentiable)
    options = Options(
        sizes=tuple(made.sizes), wrt=wrt, numerics=config.numerics, fallback=config.layout_fallback,
        tune=config.tune,
        shapes={r.name: r.dims for r in made.results},
    )  # fmt: skip
    text = one_line(print_program(made.program))
    if (reason := _no_kernel(region, text, options, config.kernels)) is not None:
        raise NoKernel(reason)
    products = tuple(name_of(n) for n in region.products)
    others = tuple(dict.fromkeys(operation(n) for n in region.nodes if kind(n) in SHOWN))
    return Fused(region, products, others, made, options, text)


def _no_kernel(region: Region, text: str, options: Options, always: bool) -> str | None:
    """Why a region is better left to Inductor: the GPU has no kernels, or a product would be interpreted."""
    device = region.nodes[0].meta["val"].device
    planned = device.type in ("cpu", "meta")  # for a GPU that is not here
    if planned and not always:
        return None
    if not planned and (device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0)):
        return f"there are kernels for sm_90a only, not for {device}"
    it = block(text, options.text())
    programs = [it.forward]
    programs += [it.backward(tuple(it.gradients.gradients))[0]] if it.gradients else []
    reasons = (unlowered_product(p, options.fallback) for p in programs)
    return next((f"no kernel: {r}" for r in reasons if r), None)


def name_of(product: fx.Node) -> str:
    """What the model calls a product: the path of its module."""
    paths = [path for path, _ in product.meta.get("nn_module_stack", {}).values()]
    return re.sub(r"^L\['\w+'\]\.", "", paths[-1]) if paths else product.name


def size_source(graph: fx.Graph, made: Translation, size: sympy.Expr) -> tuple[fx.Node, int | None] | None:
    """Where the graph has a size: a dim of an operand, or an input that is that number."""
    for node in made.tensors:
        value = node.meta["val"]
        for dim, own in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(own, torch.SymInt) and own.node.expr == size:
                return node, dim
    for node in graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        if node.op == "placeholder" and isinstance(value, torch.SymInt) and value.node.expr == size:
            return node, None
    return None


def _replace(graph: fx.Graph, fused: Fused, replaced: dict[fx.Node, fx.Node]) -> None:
    made = fused.translation
    last = fused.region.nodes[-1]
    with graph.inserting_after(last):
        anchor = graph.call_function(operator.getitem, ((), 0))  # a place to insert before
    with graph.inserting_before(anchor):
        sizes = {name: _size(graph, made, s, replaced) for name, s in made.sizes.items()}
        tensors = [replaced.get(n, n) for n in made.tensors]
        tensors += [_positions(graph, p, sizes, tensors[0]) for p in made.positions]
        tensors += [_scalar(graph, n) for n in made.scalars]
        call = graph.call_function(BLOCK, (tensors, list(sizes.values()), fused.text, fused.options.text()))
        for meta in ("recompute", "ac_graph_id", "seq_nr"):
            if meta in last.meta:
                call.meta[meta] = last.meta[meta]
        for i, result in enumerate(made.results):
            value = graph.call_function(operator.getitem, (call, i))
            if result.order != tuple(range(len(result.order))):
                value = graph.call_function(ATEN.permute.default, (value, list(result.order)))
            value.meta["val"] = result.fx.meta["val"]
            replaced[result.fx] = value
    graph.erase_node(anchor)
    inside = set(fused.region.nodes)
    for result in made.results:
        result.fx.replace_all_uses_with(replaced[result.fx], delete_user_cb=lambda user: user not in inside)
    for node in reversed(fused.region.nodes):
        if not node.users:
            graph.erase_node(node)


def _scalar(graph: fx.Graph, number: fx.Node) -> fx.Node:
    """A number of the graph as a tensor of one element: Dynamo reads it from one."""
    (source,) = number.all_input_nodes
    return graph.call_function(ATEN.to.dtype, (source, torch.float32))


def _positions(graph: fx.Graph, positions: Positions, sizes: Mapping[str, int | fx.Node], like: fx.Node) -> fx.Node:
    """For each row the row of the table: counted over the axes that the table has, constant along the others."""
    own = [sizes[a.name] for a in positions.own]
    count = functools.reduce(lambda a, b: graph.call_function(operator.mul, (a, b)), own)
    index = graph.call_function(ATEN.arange.default, (count,), {"device": like.meta["val"].device})
    index = graph.call_function(
        ATEN.view.default, (index, [sizes[a.name] if a in positions.own else 1 for a in positions.rows])
    )
    index = graph.call_function(ATEN.expand.default, (index, [sizes[a.name] for a in positions.rows]))
    return graph.call_function(ATEN.reshape.default, (index, [-1]))


def _size(graph: fx.Graph, made: Translation, size: sympy.Expr, replaced: dict[fx.Node, fx.Node]) -> int | fx.Node:
    if size.is_Integer:
        return int(size)
    source = size_source(graph, made, size)
    assert source is not None
    node, dim = source
    if dim is None:
        return node
    found = graph.call_function(ATEN.sym_size.int, (replaced.get(node, node), dim))
    found.meta["val"] = node.meta["val"].shape[dim]
    return found
