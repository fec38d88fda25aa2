"""What a CUDA device gets: every region of every model lowered for sm_90a, forward and backward, one artifact each.

On tensors without data, so that layers have the sizes of real models. Nothing is built and nothing runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coda.pytorch.block import Options, block
from coda.pytorch.execute import steps
from tests.pytorch.handwritten import Sizes
from tests.pytorch.models import inputs, zoo
from tests.pytorch.test_models import PRODUCTS, SLOW

LARGE = Sizes(vocabulary=128256, width=4096, inner=14336, heads=32, kv_heads=8)
NARROW = Sizes(vocabulary=512, width=256, inner=512, heads=4, kv_heads=2)  # a tile is as wide as a row
ROUTERS = {"deepseek_v3": 1}  # products in f32
DYNAMIC = ("llama", "qwen2", "gemma2", "gpt2", "bert", "titan")  # that many are compiled for all numbers of tokens
SLICED = ("gpt2",)  # dynamic=True makes the number of logits to keep a symbol: the head reads a slice of rows
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PRODUCTS]


def compile_for_gpu(name: str, sizes: Sizes, dtype: torch.dtype, dynamic: bool, **options: Any) -> None:
    """Compile a model, two layers with no data, as for a device that has kernels; ``options`` are the model's."""
    with torch.device("meta"):
        model = zoo(sizes)[name]().to(dtype)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # whose first tensors are no fake ones
    given = {n: x.to("meta") for n, x in inputs(name, dtype, 2, 40).items()}
    call = torch.compile(model, backend="coda", options={"inductor": False, "kernels": True}, dynamic=dynamic)
    call(**given | options)


def check(name: str, reports, sliced: int = 0) -> None:
    """All products but those of routers, and of a slice, are fused; each program is one artifact, and so is its
    backward."""
    fused, total = (sum(len(getattr(r, what)) for r in reports) for what in ("fused", "lines"))
    graphs = total // PRODUCTS[name][1]
    left = [str(x) for r in reports for x in r.unfused]
    want = PRODUCTS[name][0] - ROUTERS.get(name, 0) - sliced
    assert (fused, total) == (want * graphs, PRODUCTS[name][1] * graphs), left
    for text, options in dict.fromkeys(pair for r in reports for pair in zip(r.texts, r.options, strict=True)):
        it = block(text, options)
        backward, _, how = it.backward(tuple(it.gradients.gradients))
        for program, chunk in ((it.forward, None), (backward, Options.of(how).chunk)):
            assert [s.reason for s in steps(program, "copy", chunk)] == [None], program


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_real_sizes(name, reports):
    compile_for_gpu(name, LARGE, torch.bfloat16, dynamic=False)
    check(name, reports)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_layers_as_wide_as_a_tile(name, reports):
    """Where a tile holds whole rows, in f16."""
    compile_for_gpu(name, NARROW, torch.float16, dynamic=name in DYNAMIC)
    check(name, reports, 1 if name in SLICED else 0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prefill_runs_no_interpreter(name, reports):
    """Only the last token of each sequence has logits: the norm before the head reads one row of many."""
    with torch.no_grad():
        compile_for_gpu(name, LARGE, torch.bfloat16, dynamic=False, labels=None, logits_to_keep=1)
    programs = [block(text, how).forward for r in reports for text, how in zip(r.texts, r.options, strict=True)]
    assert sum(n.op == "part" and n.attr("start") == 39 for p in programs for n in p.nodes()) == 1
    assert [s.reason for p in programs for s in steps(p, "copy")] == [None] * len(programs)
