"""Operands of products: dtypes, layouts, accumulation into memory, sums of products. What is lowered, what is refused."""

from __future__ import annotations

import pytest

from coda.errors import CodaError
from coda.target import lower
from coda.target.emit import device_source
from tests.support import program


def refusal(text: str) -> str:
    with pytest.raises(CodaError) as caught:
        lower(program(text))
    return caught.value.diagnostics[0].message


def test_f16_operands() -> None:
    plan = lower(program("program p(x: f16[M, K], w: f16[N, K]) { return x @ w.T: f16 }"))
    assert "using Element = cutlass::half_t;" in device_source(plan, [])


def test_f32_operands_are_refused() -> None:
    text = "program p(x: f32[M, K], w: f32[N, K]) { return x @ w.T: f32 }"
    assert "is f32" in refusal(text)
