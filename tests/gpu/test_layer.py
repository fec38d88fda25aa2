"""A whole Llama layer on the device: segments of kernels, and attention called between them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch

import coda
from coda.frontend import load_path
from coda.passes import derive
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs

LAYER = Path(__file__).parents[2] / "examples" / "llama3_layer.coda"
SIZES = {"B": 2, "T": 256, "D": 1024, "F": 2048, "P": 256}
CONSTS = {"HQ": 8, "HK": 4, "f": 64}


@lru_cache
def compiled(backward: bool) -> coda.CompiledProgram:
    """Strict, so that a test cannot pass on a fallback."""
    program = load_path(LAYER, CONSTS).programs["llama3_layer"]
    program = derive(program)[0].backward if backward else program
    return coda.compile(program, fallback="strict", **SIZES)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_layer(backward: bool) -> None:
    f = compiled(backward)
    inputs = random_inputs(f.program, {**SIZES, **CONSTS}, 1, "cuda")
    before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    got = f(**inputs)
    assert f.last_route.kind == "kernel", f.last_route
    assert all(torch.equal(x, inputs[n]) for n, x in before.items())
    outputs = dict(zip((o.name for o in f.program.outputs), got if isinstance(got, tuple) else (got,), strict=True))
    comparison = compare(f.program, inputs, outputs, dims=SIZES)
    assert comparison.ok, comparison


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_layer_in_a_graph(backward: bool) -> None:
    """Kernels and attention are captured together; the replay reads new operands."""
    f = compiled(backward)
    inputs = random_inputs(f.program, {**SIZES, **CONSTS}, 2, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f(**inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = f(**inputs)
    fresh = random_inputs(f.program, {**SIZES, **CONSTS}, 3, "cuda")
    for name, x in fresh.items():
        if isinstance(x, torch.Tensor):
            inputs[name].copy_(x)
    graph.replay()
    want = f(**fresh)
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    assert all(torch.equal(a, b) for a, b in pairs)
