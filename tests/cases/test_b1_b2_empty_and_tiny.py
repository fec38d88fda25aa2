"""B1, B2: empty and tiny shapes."""

import pytest
import torch

from coda.runtime.callable import CompiledProgram
from coda.runtime.reference import evaluate
from tests.support import RESIDUAL_STATS, bf16, kernel, program, same

DBIAS = """
program dbias(x: bf16[M, K], w: bf16[N, K]) {
    y = x @ w.T
    return y: bf16, column = sum(y, M): f32, all = sum(y, (M N)): f32
}
"""


def test_b1_no_rows_no_launch():
    """An expert with no tokens: outputs have their shapes, reductions over the rows are zeros, nothing is built."""

    def build(*args):
        raise AssertionError("a build was started")

    f = CompiledProgram(program(DBIAS), build=build, device_type="cpu")
    y, column, total = f(bf16(0, 2048), bf16(1408, 2048))
    assert (y.shape, y.dtype) == ((0, 1408), torch.bfloat16)
    assert same(column, torch.zeros(1408))
    assert same(total, torch.zeros(()))
    assert str(f.last_route) == "empty"


def test_b1_leading_dims_of_nothing():
    f = kernel(RESIDUAL_STATS)
    h, s = f(bf16(2, 0, 16), bf16(8, 16), bf16(2, 0, 8))
    assert h.shape == (2, 0, 8)
    assert s.shape == (2, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_b2_tiny(size):
    f = kernel(RESIDUAL_STATS)
    operands = dict(zip("owx", (bf16(size, size) for _ in range(3)), strict=True))
    h, s = f(**operands)
    want = evaluate(f.program, operands)
    assert same(h, want["h"])
    assert same(s, want["s"])
