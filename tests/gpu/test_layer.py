"""A whole Llama layer on the device: segments of kernels, and attention called between them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import coda
from coda.frontend import load_path
from coda.passes import derive
from coda.passes.differentiate import Backward
from coda.runtime.compare import compare
from coda.runtime.gradients import random_seeds
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate

LAYER = Path(__file__).parents[2] / "examples" / "llama3_layer.coda"
SIZES = {"B": 2, "T": 256, "D": 1024, "F": 2048, "P": 256}
CONSTS = {"HQ": 8, "HK": 4, "f": 64}


@lru_cache
def derived() -> Backward:
    return derive(load_path(LAYER, CONSTS).programs["llama3_layer"])[0]


@lru_cache
def compiled(backward: bool) -> coda.CompiledProgram:
    """Strict, so that a test cannot pass on a fallback."""
    program = derived().backward if backward else derived().forward
    return coda.compile(program, fallback="strict", **SIZES)


def operands(backward: bool, seed: int) -> dict[str, Any]:
    """Random ones of the forward; of the backward what the forward keeps for these, and a random gradient."""
    inputs = random_inputs(derived().forward, {**SIZES, **CONSTS}, seed, "cuda")
    if not backward:
        return inputs
    kept = evaluate(derived().forward, inputs, dims=SIZES)
    seeds = random_seeds(derived().forward, derived().backward, {**SIZES, **CONSTS}, seed, "cuda")
    known = {**inputs, **kept, **{f"d_{name}": x for name, x in seeds.items()}}
    return {p.name: known[p.name] for p in derived().backward.params}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_layer(backward: bool) -> None:
    f, inputs = compiled(backward), operands(backward, 1)
    before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    got = f(**inputs)
    assert f.last_route is not None and f.last_route.kind == "kernel", f.last_route
    assert all(torch.equal(x, inputs[n]) for n, x in before.items())
    outputs = dict(zip((o.name for o in f.program.outputs), got, strict=True))
    comparison = compare(f.program, inputs, outputs, dims=SIZES)
    assert comparison.ok, comparison


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_layer_in_a_graph(backward: bool) -> None:
    """Kernels and attention are captured together; the replay reads new operands."""
    f, inputs = compiled(backward), operands(backward, 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f(**inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = f(**inputs)
    fresh = operands(backward, 3)
    for name, x in fresh.items():
        if isinstance(x, torch.Tensor):
            inputs[name].copy_(x)
    graph.replay()
    want = f(**fresh)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
