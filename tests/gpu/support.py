"""What tests of kernels on the device share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import coda
from coda.build.compile import SpillError
from coda.runtime.binding import bind, shapes_of
from coda.runtime.inputs import poisoned_outputs, random_inputs


def warm_or_skip(call: coda.CompiledProgram) -> None:
    """Build the kernel; a variant that the build rejects, for it would spill inside its k-loop, is skipped."""
    try:
        call.warmup("cuda")
    except SpillError as error:
        pytest.skip(str(error))


def run(call: coda.CompiledProgram, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """All results by name: outputs in poisoned memory, inout parameters in copies; the inputs are proven unchanged."""
    before = {n: x.clone() for n, x in inputs.items() if isinstance(x, Tensor)}
    out = poisoned_outputs(call.program, bind(call.program, shapes_of(inputs), sizes), "cuda")
    accumulated = {o.name: inputs[o.into].clone() for o in call.program.outputs if o.into is not None}
    given = {o.name: out[o.name] for o in call.program.outputs if o.into is None}
    call.dims.update(sizes)
    call(**inputs | accumulated, out=given)
    assert call.last_route is not None and call.last_route.kind == "kernel"
    for name, tensor in before.items():
        assert torch.equal(tensor, inputs[name]), f"{name} was modified"
    return given | accumulated


def replays_with_new_data(call: coda.CompiledProgram, sizes: Mapping[str, int]) -> None:
    """Captures a call in a CUDA graph, whose pool the workspace belongs to; a replay gives the bits of a call."""
    inputs, fresh = (random_inputs(call.program, sizes, seed, "cuda") for seed in (1, 2))
    out = run(call, inputs, sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**inputs, out=out)
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            x.copy_(fresh[name])
    graph.replay()
    torch.cuda.synchronize()
    want = run(call, fresh, sizes)
    assert all(torch.equal(out[n], want[n]) for n in want)
