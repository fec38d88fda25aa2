"""What writes memory: schemas say it of operations; of higher-order ones only a few are known to write nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

from coda.pytorch.aliases import FUNCTIONAL, Aliases, chains, drop_unused
from coda.pytorch.config import Config
from coda.pytorch.rewrite import rewrite

ATEN = torch.ops.aten
LAUNCH = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}


def with_triton_kernel() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """``y = empty_like(x); kernel[grid](x, y); return gelu(linear(y, w, b))``, as the backend gets it."""
    graph = fx.Graph()
    examples = {"x": torch.empty(4, 16), "w": torch.empty(32, 16), "b": torch.empty(32)}
    nodes = {name: graph.placeholder(name) for name in examples}

    def call(name: str, example: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        nodes[name] = graph.call_function(target, args, kwargs)
        examples[name] = example

    call("y", torch.empty(4, 16), ATEN.empty_like.default, nodes["x"])
    call("launch", None, triton_kernel_wrapper_mutation, **LAUNCH, kwargs={"x": nodes["x"], "y": nodes["y"]})
    call("z", torch.empty(4, 32), ATEN.linear.default, nodes["y"], nodes["w"], nodes["b"])
    call("out", torch.empty(4, 32), ATEN.gelu.default, nodes["z"])
    graph.output((nodes["out"],))
    for name, node in nodes.items():
        node.meta["val"] = examples[name]
    return fx.GraphModule({}, graph), nodes


def test_a_triton_kernel_writes_to_its_operands_and_stays_before_what_reads_them() -> None:
    gm, nodes = with_triton_kernel()
    aliases = Aliases(gm.graph)
    assert aliases.is_written(nodes["x"]) and aliases.is_written(nodes["y"])
    assert not aliases.is_written(nodes["w"])
    assert chains(gm.graph, aliases)[nodes["z"]] is nodes["launch"]
    drop_unused(gm.graph)
    assert nodes["launch"] in set(gm.graph.nodes)


def test_a_product_of_what_a_triton_kernel_writes_is_left_where_it_is() -> None:
    gm, nodes = with_triton_kernel()
    rewrite(gm, Config(), training=False)
    order = list(gm.graph.nodes)
    assert order.index(nodes["y"]) < order.index(nodes["launch"]) < order.index(nodes["z"])


@pytest.mark.parametrize("name", sorted(FUNCTIONAL))
def test_functional_operations_are_those_of_torch(name: str) -> None:
    assert getattr(torch.ops.higher_order, name).name() == name
