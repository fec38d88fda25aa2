"""Artifacts of several kernels on the device: blocks forward and backward, one call each."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch

import coda
from coda.build import build, load
from coda.frontend import load_path
from coda.ir import Program
from coda.passes import derive
from coda.runtime.compare import compare
from coda.runtime.inputs import poisoned_outputs, random_inputs
from coda.target.blocks import lower_noting
from tests.gpu.support import replays_with_new_data, run

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("mlp_block", "llama3_mlp", "phi3_mlp", "t5_ff", "gemma2_mlp", "gemma2_logits", "gpt2_mlp", "vit_mlp",
         "llama3_qkv", "qwen3_qkv", "phi3_qkv", "gpt2_qkv", "gemma3_qkv", "vit_qkv", "t5_qkv")  # fmt: skip
# Sizes by axis; columns of weights are multiples of eight, the rest is not round.
HEADS = {"HQ": 8, "HK": 2, "H": 8, "d": 64, "f": 32, "P": 4096}  # part of the kernels
SMALL = {"M": 129, "B": 3, "T": 43, "D": 264, "F": 520, "A": 136, "V": 1000} | HEADS
LARGE = {"M": 4096, "B": 2, "T": 2048, "D": 2048, "F": 8192, "A": 2048, "V": 32000} | HEADS


@lru_cache
def programs() -> dict[str, Program]:
    return {n: p for f in sorted(EXAMPLES.glob("*_block.coda")) for n, p in load_path(f).programs.items()}


@lru_cache
def compiled(name: str, backward: bool) -> coda.CompiledProgram:
    """Strict, so that a test cannot pass on a fallback."""
    program = programs()[name]
    if backward:
        program = derive(program)[0].backward
    return coda.compile(program, fallback="strict")


def sizes_of(program: Program, sizes: dict[str, int]) -> dict[str, int]:
    return {a.name: sizes.get(a.name, 8) for a in program.free_axes}


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", NAMES)
def test_block(name: str, backward: bool, sizes: dict[str, int]) -> None:
    call = compiled(name, backward)
    chosen = sizes_of(call.program, sizes)
    inputs = random_inputs(call.program, chosen, 1, "cuda")
    out = run(call, inputs, chosen)
    result = compare(call.program, inputs, out, dims=chosen)
    assert result.ok, f"{name} {chosen}\n{result}"
    for _ in range(5):
        again = run(call, inputs, chosen)
        assert all(torch.equal(out[o], again[o]) for o in out), "two calls differ"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["mlp_block", "gemma2_mlp", "gpt2_mlp"])
def test_a_block_is_one_graph(name: str, backward: bool) -> None:
    call = compiled(name, backward)
    replays_with_new_data(call, sizes_of(call.program, SMALL))


def test_two_streams_have_workspaces_of_their_own() -> None:
    call = compiled("mlp_block", False)
    sizes = sizes_of(call.program, LARGE)
    inputs = [random_inputs(call.program, sizes, seed, "cuda") for seed in (1, 2)]
    want = [call(**x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(10):
        got = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(call(**x))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["llama3_mlp", "gemma2_mlp", "gpt2_mlp"])
def test_kernels_that_begin_early_wait(name: str, backward: bool, sizes: dict[str, int]) -> None:
    """Kernels of a call overlap their launches. Calls in a row, in the same workspace, behind a kernel that is still
    writing their operands: each gives the bits of a call that had the device to itself."""
    call = compiled(name, backward)
    chosen = sizes_of(call.program, sizes)
    fresh = [random_inputs(call.program, chosen, seed, "cuda") for seed in range(4)]
    want = []
    for x in fresh:
        want.append(run(call, x, chosen))
        torch.cuda.synchronize()
    inputs = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in fresh[0].items()}
    outputs = [{n: torch.full_like(x, float("nan")) for n, x in want[0].items()} for _ in range(12)]
    torch.cuda.synchronize()
    for i, out in enumerate(outputs):
        for n, x in inputs.items():
            if isinstance(x, torch.Tensor):
                x.copy_(fresh[i % 4][n])
        call(**inputs, out=out)
    torch.cuda.synchronize()
    for i, out in enumerate(outputs):
        different = [n for n, x in out.items() if not torch.equal(x, want[i % 4][n])]
        assert not different, f"call {i}: {different}"


@pytest.mark.parametrize("name", ["llama3_mlp", "phi3_mlp"])
def test_products_that_finish_sums_give_the_bits_of_a_finish_kernel(name: str) -> None:
    """The order of additions is the same; a launch is not there."""
    program = programs()[name]
    for sizes in (SMALL, LARGE):
        chosen = sizes_of(program, sizes)
        inputs = random_inputs(program, chosen, 1, "cuda")
        results = []
        for early in (True, False):
            schedule = lower_noting(program, early=early).schedule
            artifact = load(build(schedule, dims=chosen))
            out = poisoned_outputs(program, chosen, "cuda")
            artifact.run([inputs[p.name] for p in program.params] + list(out.values()))
            results.append(out)
        assert all(torch.equal(results[0][n], results[1][n]) for n in results[0]), chosen
        reads = [o for step in lower_noting(program).schedule.gemms for o in step.operands if o.partial]
        assert reads


@pytest.mark.parametrize("backward", [False, True], ids=["kept", "backward"])
def test_training_finishes_sums_in_the_product_behind(backward: bool) -> None:
    """The forward also stores the reciprocals of the norm, for the backward."""
    derived = derive(programs()["llama3_mlp"])[0]
    program = derived.backward if backward else derived.forward
    chosen = sizes_of(program, SMALL)
    inputs = random_inputs(program, chosen, 1, "cuda")
    results = []
    for early in (True, False):
        artifact = load(build(lower_noting(program, early=early).schedule, dims=chosen))
        out = poisoned_outputs(program, chosen, "cuda")
        artifact.run([inputs[p.name] for p in program.params] + list(out.values()))
        results.append(out)
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])
