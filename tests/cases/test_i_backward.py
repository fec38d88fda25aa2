"""I1 to I5: derived backwards write only their results, answer what is asked, and refuse what they do not know."""

import itertools

import pytest
import torch

from coda.errors import CodaError
from coda.passes import fuse
from coda.passes.differentiate import differentiate
from coda.runtime.blocks import evaluate_partition
from coda.runtime.inputs import random_inputs
from tests.gradients import check_gradients
from tests.support import program

RESIDUAL = """
program p(x: bf16[M, D], g: bf16[D], w: bf16[N, D]) {
    n = rms_norm(x, g, 1e-5)
    return h = n + x: bf16, y = silu(n @ w.T): bf16
}"""
SIZES = {"M": 4, "D": 8, "N": 6}


def run_backward(block, inputs, seeds):
    kept = evaluate_partition(block.forward, inputs)
    operands = {**inputs, **kept, **seeds}
    names = {p.name for p in block.backward.program.params}
    return evaluate_partition(block.backward, {n: x for n, x in operands.items() if n in names}), kept


def test_i1_i2_nothing_is_overwritten_and_a_second_backward_is_the_same():
    block = fuse(program(RESIDUAL), None)
    inputs = random_inputs(block.program, SIZES)
    seeds = {"d_h": torch.randn(4, 8).bfloat16(), "d_y": torch.randn(4, 6).bfloat16()}
    before = {n: x.clone() for n, x in {**inputs, **seeds}.items()}
    first, kept = run_backward(block, inputs, seeds)
    copies = {n: x.clone() for n, x in kept.items()}
    second, _ = run_backward(block, inputs, seeds)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(torch.equal(x, {**inputs, **seeds}[n]) for n, x in before.items())
    assert all(torch.equal(x, kept[n]) for n, x in copies.items())


def test_i2_the_residual_branch_gets_its_gradient_whole():
    check_gradients(program(RESIDUAL), SIZES)


@pytest.mark.parametrize("wrt", [c for n in (1, 2, 3) for c in itertools.combinations("xgw", n)])
@pytest.mark.parametrize("of", [("h",), ("y",), ("h", "y")])
def test_i4_every_choice_of_wanted_gradients_and_used_outputs(wrt, of):
    p = program(RESIDUAL)
    if wrt == ("w",) and of == ("h",):
        with pytest.raises(CodaError, match="no output of 'p' depends on w"):
            differentiate(p, wrt, of=of)
        return
    backward = check_gradients(p, SIZES, wrt, of=of)
    assert set(backward.gradients) == {n for n in wrt if n != "w" or "y" in of}
    products = sum(n.op == "dot" for n in backward.backward.nodes())
    assert products == ("y" in of) * (("w" in wrt) + bool({"x", "g"} & set(wrt)))


def test_i5_a_missing_derivative_is_an_error_when_it_is_built():
    """Here a parameter lies before a gather, as before a RoPE kernel that has no backward."""
    p = program("program p(t: bf16[P, D], w: bf16[D2, D], pos: i32[M]) {"
                " dim D2 = D; q = cast(t @ w.T, bf16); return y = q[pos]: bf16 }")  # fmt: skip
    with pytest.raises(CodaError, match=r"'gather' has no derivative .* depends on t, w"):
        differentiate(p)
