"""D1, D2: reductions start from their own identity, whatever memory held before and however ragged the shape."""

import math

import pytest
import torch

from coda.runtime.inputs import poisoned_outputs
from coda.runtime.reference import evaluate
from tests.support import bf16, kernel, program, same

TEXT = """
program reduce(x: bf16[M, K], w: bf16[N, K]) {
    y = x @ w.T
    return y: bf16, row = sum(y, N): f32, column = sum(y, M): f32
}
"""


def test_d1_a_second_call_equals_the_first():
    f = kernel(TEXT)
    x, w = bf16(8, 16), bf16(8, 16)
    out = poisoned_outputs(f.program, {"M": 8, "N": 8, "K": 16})
    first = [t.clone() for t in f(x, w, out=out)]
    again = f(x, w, out=out)  # into what the first call left there
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert all(same(a, b) for a, b in zip(first, evaluate(f.program, {"x": x, "w": w}).values(), strict=True))


@pytest.mark.parametrize("n", [1, 7, 129, 193, 257])
def test_d2_all_negative_on_a_ragged_width(n):
    text = """
    program extreme(x: bf16[M, K], w: bf16[N, K]) {
        y = x @ w.T
        return largest = max(y, N): f32, smallest = min(-y, N): f32, lse = logsumexp(y, N): f32
    }
    """
    x, w = -bf16(5, 16).abs() - 1, bf16(n, 16).abs() + 1
    got = evaluate(program(text), {"x": x, "w": w})
    y = x.float() @ w.float().T
    assert same(got["largest"], y.amax(1))
    assert same(got["smallest"], (-y).amin(1))
    assert same(got["lse"], y.logsumexp(1))
    assert bool((got["largest"] < 0).all())


def test_d2_nothing_reduces_to_the_identity():
    text = """
    program extreme(x: bf16[M, K], w: bf16[N, K]) {
        y = x @ w.T
        return largest = max(y, N): f32, smallest = min(y, N): f32, total = sum(y, N): f32
    }
    """
    got = evaluate(program(text), {"x": bf16(2, 4), "w": bf16(0, 4)})
    assert got["largest"].tolist() == [-math.inf] * 2
    assert got["smallest"].tolist() == [math.inf] * 2
    assert torch.equal(got["total"], torch.zeros(2))
