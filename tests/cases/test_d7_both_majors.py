"""D7: reductions beside outputs of either memory order, through lowering and the generated math."""

from __future__ import annotations

import itertools

import pytest
import torch

from coda.runtime.reference import evaluate
from coda.target import lower
from tests.hostmath import compile_plans, exact_operand, same_bits
from tests.support import program

MAJORS = ("[M, N]", "[N, M]")
DTYPES = ("bf16", "f32")
REDUCTIONS = ("sum(y, N)", "max(y, N)", "mean(y, M)", "min(y, M)", "partial(sum(y, N))", "partial(max(y, M))")


def text(major: str, dtype: str, reduction: str) -> str:
    """One output, one reduction of it as it is stored, and the raw product in the other order."""
    other = MAJORS[1 - MAJORS.index(major)]
    return f"""
    program d7(x: bf16[M, K], w: bf16[N, K], r: f32[M], c: f32[N]) {{
        y = cast(r * (x @ w.T) + c, {dtype})
        return y: {dtype}{major}, s = {reduction}: f32, raw = x @ w.T: f32{other}
    }}
    """


@pytest.mark.parametrize(("major", "dtype"), list(itertools.product(MAJORS, DTYPES)))
def test_d7_reductions_with_either_output_major(major, dtype):
    programs = [program(text(major, dtype, reduction)) for reduction in REDUCTIONS]
    generator = torch.Generator().manual_seed(7)
    x, w = exact_operand(generator, 9, 6), exact_operand(generator, 7, 6)
    inputs = {"x": x, "w": w, "r": torch.randn(9, generator=generator), "c": torch.randn(7, generator=generator)}
    for p, host in zip(programs, compile_plans([lower(p) for p in programs]), strict=True):
        got, want = host(inputs), evaluate(p, inputs)
        assert got["y"].shape == ((9, 7) if major == "[M, N]" else (7, 9))
        assert same_bits(got["y"], want["y"])
        assert same_bits(got["raw"], want["raw"])
        torch.testing.assert_close(got["s"], want["s"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("major", MAJORS)
def test_d7_the_plan_knows_which_dim_carries_rows(major):
    plan = lower(program(text(major, "bf16", "sum(y, N)")))
    dims = {s.arg: (s.row_dim, s.column_dim) for s in plan.stores if s.kind == "tile"}
    here, there = ((0, 1), (1, 0)) if major == "[M, N]" else ((1, 0), (0, 1))
    assert dims == {"y": here, "raw": there}
