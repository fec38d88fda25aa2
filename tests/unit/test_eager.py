"""``round_as_eager`` against eager PyTorch, bit for bit.

Operands of products are small integers, so that every sum is exact and the order of additions cannot matter; what is
compared is then rounding alone. The CPU's bf16 kernels stand for eager.
"""

import pytest
import torch
import torch.nn.functional as F

from coda.passes.eager import round_as_eager
from coda.runtime.reference import evaluate
from tests.support import BIAS_GELU, RESIDUAL_STATS, ROW_SCALE, program

M, N, K = 33, 40, 24


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def integers(*shape: int, dtype=torch.bfloat16, high: int = 4) -> torch.Tensor:
    return torch.randint(-high + 1, high, shape).to(dtype)


def fractions(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def run(text: str, **inputs):
    return tuple(evaluate(round_as_eager(program(text)), inputs).values())


def test_bias_then_gelu():
    x, w, bias = integers(M, K), integers(N, K), fractions(N)
    (got,) = run(BIAS_GELU, x=x, w=w, bias=bias)
    assert torch.equal(got, F.gelu(F.linear(x, w, bias), approximate="tanh"))
    assert torch.equal(got, F.gelu(x @ w.T + bias, approximate="tanh"))  # the product is exact, so one or two roundings


def test_fused_rounding_differs_from_eager():
    x, w, bias = integers(M, K, high=20), integers(N, K, high=20), fractions(N)
    (fused,) = evaluate(program(BIAS_GELU), {"x": x, "w": w, "bias": bias}).values()
    (eager,) = run(BIAS_GELU, x=x, w=w, bias=bias)
    assert not torch.equal(fused, eager)


def test_residual():
    o, w, x = integers(M, K, high=20), integers(N, K, high=20), fractions(M, N)
    h, s = run(RESIDUAL_STATS, o=o, w=w, x=x)
    want = x + o @ w.T
    assert torch.equal(h, want)
    # integers below 2^8 square and add up exactly only in f32; what is checked is where the statistic rounds
    assert torch.equal(s.bfloat16().float(), s)
    torch.testing.assert_close(s, (want * want).sum(1).float(), rtol=2**-7, atol=0)


def test_a_vector_with_dims_promotes():
    x, w, r = integers(M, K, high=20), integers(N, K, high=20), torch.randn(M)
    (got,) = run(ROW_SCALE, x=x, w=w, r=r)
    assert torch.equal(got, (r[:, None] * (x @ w.T)).bfloat16())


CHAINS = {
    "x * y + x": lambda x, y, s: x * y + x,
    "silu(x) * y": lambda x, y, s: F.silu(x) * y,
    "x * s": lambda x, y, s: x * s,
    "x * 0.1": lambda x, y, s: x * 0.1,
    "x / y": lambda x, y, s: x / y,
    "-x * x": lambda x, y, s: -x * x,
    "x * s * y": lambda x, y, s: x * s * y,
    "maximum(x, y) - exp(x)": lambda x, y, s: torch.maximum(x, y) - x.exp(),
    "where(x > y, x * y, y)": lambda x, y, s: torch.where(x > y, x * y, y),
    "cast(x, f32) * y": lambda x, y, s: x.float() * y,
    "cast(cast(x, f32) * y, bf16) + y": lambda x, y, s: (x.float() * y).bfloat16() + y,
    "tanh(relu(x)) * sigmoid(y)": lambda x, y, s: x.relu().tanh() * y.sigmoid(),
}


@pytest.mark.parametrize("text", CHAINS)
@pytest.mark.parametrize("other", ["bf16", "f16", "f32"])
def test_elementwise_chains(text, other):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[other]
    x, y, s = fractions(M, N), fractions(M, N, dtype=dtype), 0.3
    want = CHAINS[text](x, y, s)
    source = f"program p(x: bf16[M, N], y: {other}[M, N], s: f32) {{ return {text}: f32 }}"
    inputs = {"x": x, "y": y, "s": s}
    got = evaluate(round_as_eager(program(source)), inputs)
    (value,) = got.values()
    assert torch.equal(value, want.float())
    if want.dtype == torch.bfloat16 and "*" in text:  # and it does matter
        (fused,) = evaluate(program(source), inputs).values()
        assert not torch.equal(fused, value)


def test_a_scalar_does_not_promote_but_two_do():
    x, s = fractions(M), torch.tensor(0.3)
    (got,) = run("program p(x: bf16[M], s: f32) { return x * (s * s): f32 }", x=x, s=s)
    assert torch.equal(got, (x * (s * s)).float())


def test_the_pass_is_idempotent():
    once = round_as_eager(program(BIAS_GELU))
    assert round_as_eager(once).outputs == once.outputs


def test_f32_programs_are_left_alone():
    p = program("program p(x: f32[M, K], y: f32[M, K]) { return silu(x) * y: f32 }")
    assert round_as_eager(p).outputs == p.outputs
