"""Factors before products of low rank: found, refused, proved, and then one accumulation."""

from __future__ import annotations

import pytest

from coda.ir import Program
from coda.passes import optimize, partition
from coda.passes.prove import prove
from coda.passes.scale_in import scale_in
from coda.printer import print_program
from coda.verify import verify
from tests.support import program

HEAD = "x: bf16[M, K], w: bf16[N, K], g: bf16[K], a: bf16[R, K], b: bf16[N, R], h: bf16[M, N]"


def block(body: str) -> Program:
    return program(f"program p({HEAD}) {{ {body} }}")


def adapter(n: str, factor: str = "2.0 * ") -> str:
    return f"n = {n}; return y = h + (n @ w.T + {factor}(cast(n @ a.T, bf16) @ b.T)): bf16"


def test_the_factor_of_an_adapter_is_before_its_product():
    p = block(adapter("x"))
    q, (note,) = scale_in(p)
    assert str(note.label) == "bitwise" and "2.0 * acc" in print_program(q)
    assert prove(p, q)
    verify(q)
    assert [(k.kind, len(k.group.dots)) for k in partition(q).kernels] == [("gemm", 1), ("gemm", 2)]


def test_a_factor_that_is_no_power_of_two_moves_a_rounding():
    _, (note,) = scale_in(block(adapter("x", "1.5 * ")))
    assert "rounded" in str(note.label)


def test_behind_a_norm_the_row_factor_is_behind_the_sum():
    p = block(adapter("rms_norm(x, g, 1e-6)"))
    q, _ = optimize(p)
    assert prove(p, q)
    kernels = partition(q).kernels
    assert [(k.kind, k.group and len(k.group.dots)) for k in kernels] == [("row", None), ("gemm", 1), ("gemm", 2)]


REFUSED = [
    adapter("x", ""),  # there is no factor
    "return y = h + 2.0 * (cast(x @ a.T, bf16) @ b.T): bf16",  # no other product to be one accumulation with
    "return y = x @ w.T + 2.0 * (h @ g1.T): bf16".replace("h @ g1", "x @ w"),  # its operand is in memory
    "t = cast(x @ a.T, bf16); return y = x @ w.T + 2.0 * (t @ b.T): bf16, t: bf16",  # which others read
    "q = 2.0 * (cast(x @ a.T, bf16) @ b.T); return y = x @ w.T + q: bf16, z = exp(q): f32",  # as well
]


@pytest.mark.parametrize("body", REFUSED)
def test_refused(body):
    p = block(body)
    assert scale_in(p) == (p, ())


def test_f16_operands_keep_their_factors():
    text = f"program p({HEAD}) {{ {adapter('x')} }}".replace("bf16", "f16")
    assert scale_in(program(text))[1] == ()
