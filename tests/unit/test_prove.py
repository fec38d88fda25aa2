"""The prover: equal programs, and what it says of different ones."""

from __future__ import annotations

import pytest

from coda.errors import CodaError
from coda.passes.prove import prove
from tests.support import program

HEAD = "x: f32[M, (s=2 N)], y: f32[M, N], r: f32[M], w: f32[K, N], i: i64[M], t: f32[P, N]"


def prove_texts(a: str, b: str, **options):
    dims = "dim h = 2*N; dim k = N;"
    return prove(*(program(f"program p({HEAD}) {{ {dims} return out = {e}: f32 }}") for e in (a, b)), **options)


EQUAL = {
    "r * (y @ w.T)": "(r * y) @ w.T",
    "sum(r * y, N)": "sum(y, N) * r",
    "mean(y, N)": "sum(y, N) / size(N)",
    "(y - r) * (y + r)": "y * y - r * r",
    "x.s[0] + x.s[1]": "sum(x, s)",
    "stack(y, 2 * y, s).s[1]": "y + y",
    "part(concat(y, exp(y), h = N | N), h, N, N)": "exp(y)",
    "t[i] * r": "r * t[i]",
    "rsqrt((y + 1) * (y + 1))": "rsqrt(y * y + 2 * y + 1)",
    "where(y > 0, y, y * r) / r": "where(y > 0, y, r * y) / r",
    "-(y / r)": "y / -r",
    "pick(y, N, i)": "sum(where(i == index(N), y, 0), N)",
    "logsumexp(y + r, N)": "logsumexp(r + y, N)",
    "cast(y, bf16)": "y",
}


@pytest.mark.parametrize("a", EQUAL)
@pytest.mark.parametrize("symbolic", [True, False])
def test_equal(a, symbolic):
    proof = prove_texts(a, EQUAL[a], symbolic=symbolic)
    assert proof, proof
    assert str(proof).startswith("equal over the reals")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("r * y", "r + y"),
        ("rsqrt(y)", "rsqrt(2 * y)"),
        ("silu(y)", "relu(y)"),
        ("x.s[0]", "x.s[1]"),
        ("max(y, N)", "min(y, N)"),
    ],
)
@pytest.mark.parametrize("symbolic", [True, False])
def test_different(a, b, symbolic):
    proof = prove_texts(a, b, symbolic=symbolic)
    assert not proof
    assert str(proof).startswith("not equal: out[")


def test_programs_without_common_outputs():
    a, b = (program(f"program p(x: f32[M]) {{ return {n} = x: f32 }}") for n in ("y", "z"))
    with pytest.raises(CodaError, match="no output in common"):
        prove(a, b)
