"""Divisors of rows leave sums over a row."""

from __future__ import annotations

import pytest

from coda.frontend import load
from coda.ir import Program
from coda.passes import derive
from coda.passes.hoist import hoist
from coda.passes.prove import prove
from coda.verify import verify

PARAMS = "x: f32[M, N], y: f32[M, N], r: f32[M], s: f32[M], c: f32[N], k: f32"


def hoisted(body: str) -> tuple[Program, Program]:
    (p,) = load(f"program p({PARAMS}) {{ {body} }}").programs.values()
    after, notes = hoist(p)
    verify(after)
    assert prove(p, after)
    assert bool(notes) == (after != p)
    return p, after


def divided_elements(p: Program) -> int:
    return sum(n.op == "div" and n.type.names == {"M", "N"} for n in p.nodes())


@pytest.mark.parametrize(
    "body",
    [
        "return z = sum(x / r, N): f32",
        "return z = sum(x * (y / r), N): f32",
        "return z = sum((x / r) * y * c, N): f32",
        "return z = sum(x * (y / r) + c * (x / r), N): f32",
        "return z = sum(x * (y / r) - x / r, N): f32",
        "return z = sum(c * sum(x * (y / r), N), N): f32",
    ],
)
def test_a_divisor_of_rows_leaves(body: str) -> None:
    before, after = hoisted(body)
    assert divided_elements(before)
    assert not divided_elements(after)


@pytest.mark.parametrize(
    "body",
    [
        "return z = sum(x / c, N): f32",  # varies along the sum
        "return z = sum(x / r, M): f32",
        "return z = sum(x / r, (M N)): f32",
        "return z = sum(x / k, N): f32",  # a number: it may keep a sum in range
        "return z = sum(x / r + y / s, N): f32",  # two divisors
        "return z = sum(x / r + y, N): f32",
        "return z = max(x / r, N): f32",
        "return z = sum(exp(x / r), N): f32",
        "return z = sum(r / x, N): f32",
        "q = x / r; return z = sum(q * y, N): f32, q: f32",  # is stored
        "q = x / r; return z = sum(q * y, N): f32, u = sum(exp(q), N): f32",
    ],
)
def test_what_stays(body: str) -> None:
    before, after = hoisted(body)
    assert after == before


def test_the_gradient_of_a_norm_divides_once_for_each_row() -> None:
    """The row kernel behind an attention, which reads all of q, k and v."""
    text = """
    program qkv(x: bf16[M, D], g: bf16[D], w: bf16[N, D]) {
        return q = rms_norm(x, g, 1e-5) @ w.T: bf16
    }
    """
    (p,) = load(text).programs.values()
    backward = derive(p)[0].backward
    assert any(n.op == "div" and n.args[1].type.names == {"M"} for n in backward.nodes())
    assert not any(n.op == "div" and n.type.names == {"M", "N"} for n in backward.nodes())
