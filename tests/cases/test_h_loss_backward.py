"""Cases H1, H3, H7, H9 of the backward: the generated code of every kernel behind linear_cross_entropy, run by the host
compiler, gives what the interpreter gives; and which kernels there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coda.frontend import load
from coda.ir import Program
from coda.nn.loss import program_text
from coda.passes.chunk import chunk
from coda.pytorch.block import Block, Options
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate_sized
from coda.target.blocks import lower_kernel, lower_noting
from coda.target.chunks import NARROW, WIDE, lower_in_chunks
from coda.target.plan import Plan
from tests.hostmath import compile_plan
from tests.rowmath import compile_rows

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
PLAIN = (("x", BF16), ("w", BF16), ("target", I64))
WEIGHTED = (*PLAIN, ("bias", BF16), ("class_weight", F32), ("all_classes", F32), ("token_weight", F32))
CASES = {
    "plain": (PLAIN, "mean", 0.0, 0.0, None),
    "int32, none": ((("x", BF16), ("w", BF16), ("target", I32)), "none", 0.0, 0.0, None),
    "all": (WEIGHTED, "mean", 0.1, 0.01, 2.5),
}
SIZES = {"M": 6, "V": 21, "K": 8}


def loss(name: str, memory: str) -> Block:
    dtypes, reduction, *options = CASES[name]
    (program,) = load(program_text(dtypes, -100, reduction, *options)).programs.values()
    wrt = tuple(n for n, _ in dtypes if n in ("x", "w", "bias", "token_weight"))
    return Block(program, Options(sizes=tuple(SIZES), wrt=wrt, memory=memory))


def agrees(program: Program, given: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """The results of the interpreter, after generated code of each kernel has given the same."""
    there = dict(given)
    for part in lower_noting(program).parts:
        inputs = {p.name: there[p.name] for p in part.params}
        want = evaluate_sized(part, inputs, sizes)
        plan = lower_kernel(part)
        if isinstance(plan, Plan):
            got = compile_plan(plan)(inputs)
        else:
            got = compile_rows([plan])[0](inputs, dims={n: s for n, s in sizes.items() if n in _named(part)})
        for output, value in want.items():
            torch.testing.assert_close(got[output], value, rtol=1e-5, atol=1e-5)
        there |= want
    return there


def _named(program: Program) -> set[str]:
    sizes = [n.attr("expr") for n in program.nodes() if n.op == "size"] + [a.size for a in program.axes]
    return {s.name for size in sizes for s in size.free_symbols}


def given(it: Block, name: str) -> dict[str, Any]:
    inputs = random_inputs(it.program, SIZES, 0, "cpu")
    labels = [0, 20, -100, 13, 9, 9]
    inputs["target"] = torch.tensor(labels, dtype=I32 if "int32" in name else I64)
    if "class_weight" in inputs:
        inputs["class_weight"] = inputs["class_weight"].abs() + 0.25
        inputs["all_classes"] = inputs["class_weight"].sum()
    return inputs


def part(x: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """Of a tensor over classes, those of a chunk."""
    return x.narrow(list(x.shape).index(SIZES["V"]), start, width)


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", CASES)
def test_generated_code_of_every_kernel(name: str, memory: str) -> None:
    it = loss(name, memory)
    assert it.gradients is not None
    there = agrees(it.forward, given(it, name), SIZES)
    there["d_loss"] = torch.rand(SIZES["M"]) if name == "int32, none" else torch.tensor(0.75)
    assert it.gradients.chunk == "V"
    cut = chunk(it.gradients.backward, it.gradients.chunk)
    for before in cut.before:
        there |= agrees(before, there, SIZES)
    for start, width in ((0, 16), (16, 5)):  # the second chunk has what is left: labels 0, 9 and 13 are not in it
        parts = {p: part(there[of], start, width) for p, of in cut.parts.items() if of in there}
        there |= agrees(cut.body, there | parts | {cut.start: start}, SIZES | {cut.part.name: width})
    assert cut.after is not None
    agrees(cut.after, there, SIZES)


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str) -> None:
    """Forward one product, backward two a chunk or, with the logits computed again, three; what lies between."""
    fast, low = loss(name, "fast"), loss(name, "low")
    assert fast.gradients is not None and low.gradients is not None
    for it in (fast, low):
        assert [s.kind for s in lower_noting(it.forward).schedule.steps] == ["gemm"]
    for it, makes_d_z, width in ((fast, "map", WIDE), (low, "gemm", NARROW)):
        assert it.gradients is not None
        chunked = lower_in_chunks(it.gradients.backward, "V").schedule
        assert chunked.loop is not None and chunked.loop.width == width
        assert [s.kind for s in chunked.steps] == ["map", "map", makes_d_z, "gemm", "gemm", "map"]
        wide = {t.name: [str(d) for d in t.dims] for t in chunked.temporaries if len(t.dims) == 2}
        assert sorted(wide.values()) == [["M", "K"], ["M", "V_chunk"]]  # nothing is M x V, and d_w has no sum
    logits = [[o.name for o in it.forward.outputs if {"M", "V"} <= o.type.names] for it in (fast, low)]
    assert list(map(len, logits)) == [1, 0]
