"""J4: which tensor is quantised is part of the types: one for the other is a mistake that is told."""

from __future__ import annotations

import pytest
import torch

import coda
from coda.errors import CodaError

TEXT = """
program two_norms(x: bf16[M, D], g: bf16[D], scale: f32) {
    n = rms_norm(x, g, 1e-6)
    return plain = n: bf16, narrow = cast(n / scale, f8e4m3, saturate): f8e4m3
}
program next(a: f8e4m3[M, D], scale: f32) { return y = a * scale: bf16 }
"""


def test_the_wrong_one_of_two_results_is_refused_by_name():
    norms, after = (coda.compile(TEXT, program=name) for name in ("two_norms", "next"))
    plain, narrow = norms(torch.randn(4, 16).bfloat16(), torch.ones(16).bfloat16(), 0.5)
    assert after(narrow, 0.5).shape == (4, 16)
    with pytest.raises(CodaError, match=r"'a'.*f8e4m3"):
        after(plain, 0.5)


def test_the_scale_is_an_operand_that_cannot_be_forgotten():
    with pytest.raises(CodaError, match="scale"):
        coda.compile(TEXT, program="next")(torch.zeros(4, 16).to(torch.float8_e4m3fn))


def test_a_result_has_the_type_that_is_declared():
    with pytest.raises(CodaError, match="bf16"):
        coda.parse("program p(x: bf16[M, D]) { q: f8e4m3 = x; return y = q: bf16[M, D] + x }")
