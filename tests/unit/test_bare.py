"""Products whose epilogue cannot be lowered: stored as they are, what follows is a kernel of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coda.errors import CodaError
from coda.frontend import load_path
from coda.passes import fuse, optimize, partition
from coda.passes.bare import products
from coda.passes.kernels import assemble
from coda.passes.segments import segments
from coda.runtime.blocks import evaluate_partition
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target.blocks import lower_noting, lower_program
from tests.gradients import check_text
from tests.support import program

EXAMPLES = Path(__file__).parents[2] / "examples"
LANES = """program lanes(x: bf16[M, K], w: bf16[(s=3 N), K], b: bf16[(s N)]) {
    z = x @ w.T + b
    return q = z.s[0]: bf16, k = gelu_tanh(z.s[1]): bf16, v = z.s[2]: bf16
}"""
SIZES = {"M": 9, "K": 16, "N": 8}


def test_three_lanes_are_a_product_and_a_map():
    lowered = lower_noting(program(LANES))
    assert [step.kind for step in lowered.schedule.steps] == ["gemm", "map"]
    (note,) = (n for n in lowered.notes if n.rule == "bare")
    assert "lanes of 'N', which has no number as its size" in note.sentence
    assert str(note.label) == "algebraic (a product is rounded before what follows)"


def test_what_is_stored_is_the_rounded_product():
    p = program(LANES)
    cut = partition(optimize(p)[0], bare={0})
    gemm, rest = cut.kernels
    assert [n.op for n in gemm.program.nodes() if n.args] == ["transpose", "dot", "cast"]
    assert [str(o.type) for o in gemm.program.outputs] == ["bf16[M, (s N)]"]
    check_text(gemm.program)
    check_text(rest.program)
    inputs = random_inputs(p, SIZES)
    got = evaluate_partition(cut, inputs)
    want = evaluate(cut.program, inputs)
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert compare(p, inputs, got).ok
    assert assemble(cut).outputs == cut.program.outputs


@pytest.mark.parametrize("name", ["gpt2_qkv", "llama3_mlp", "gemma2_mlp"])
def test_all_products_of_a_block_may_be_bare(name):
    """Kernels of products compute nothing else then, and the block still passes the error gate of bf16."""
    p = load_path(EXAMPLES / f"{name.split('_')[0]}_block.coda").programs[name]
    optimized, _ = optimize(p)
    cut = partition(optimized, bare=range(len(products(optimized))))
    for kernel in cut.kernels:
        check_text(kernel.program)
        if kernel.kind == "gemm":
            assert {n.op for n in kernel.program.nodes()} <= {"input", "transpose", "layout", "dot", "cast"}
    known = {"M": 9, "D": 16, "A": 8, "F": 24, "B": 3, "T": 3, "H": 2, "d": 4}
    sizes = {a.name: known[a.name] for a in p.free_axes}
    inputs = random_inputs(p, sizes)
    got = evaluate_partition(cut, inputs, dims=sizes)
    assert all(torch.equal(got[n], x) for n, x in evaluate(cut.program, inputs, dims=sizes).items())
    comparison = compare(p, inputs, got, dims=sizes)
    assert comparison.ok, comparison


HEADS = {"HQ": 32, "HK": 8, "f": 64}


@pytest.mark.parametrize(("file", "name", "kinds"), [
    ("llama3_block", "llama3_mlp", ["gemm", "gemm", "gemm"]),
    ("qwen3_block", "qwen3_qkv", ["row", "gemm", "gemm", "gemm"]),
    ("llama3_layer", "llama3_layer_1", ["row", "gemm"]),  # q, k and v with their rotations
])  # fmt: skip
def test_a_block_that_fits_keeps_its_epilogues(file, name, kinds):
    programs = load_path(EXAMPLES / f"{file}.coda", HEADS if file == "llama3_layer" else None).programs
    parts = segments(fuse(programs["llama3_layer"]).forward) if file == "llama3_layer" else programs.values()
    lowered = lower_noting(next(p for p in parts if p.name == name))
    assert not any(n.rule == "bare" for n in lowered.notes)
    assert [step.kind for step in lowered.schedule.steps] == kinds


def test_what_no_kernel_computes_is_refused_for_its_own_reason():
    with pytest.raises(CodaError, match="f32"):
        lower_program(program("program p(x: f32[M, K], w: f32[N, K]) {\n    return x @ w.T: f32\n}"))
