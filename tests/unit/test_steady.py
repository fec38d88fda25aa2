"""Logits that are kept rounded are rounded before their log-sum-exp, and nothing else is."""

from __future__ import annotations

import pytest

from coda.frontend import load
from coda.ir import Program
from coda.passes import derive

LOSS = "program p(x: bf16[M, D], w: bf16[V, D], label: i64[M]) { %s }"
NLL = "nll = logsumexp(z, V) - pick(z, V, label)"


def program(body: str) -> Program:
    return next(iter(load(LOSS % body).programs.values()))


def casts(p: Program) -> list[str]:
    """What is rounded to bf16 before it is read again."""
    called = dict(p.names)
    read = {a for n in p.nodes() for a in n.args}
    return [called.get(n, n.op) for n in p.nodes() if n.op == "cast" and n in read]


@pytest.mark.parametrize(
    ("body", "memory", "rounded"),
    [
        (f"z = x @ w.T; {NLL}; return nll: f32", "fast", ["z"]),
        (f"z = x @ w.T; {NLL}; return nll: f32", "low", []),
        (f"z = x @ w.T; {NLL}; return nll: f32, z: bf16", "low", ["z"]),  # the backward reads what is returned
        (f"z = cast(x @ w.T, bf16); {NLL}; return nll: f32", "fast", ["z"]),
        (f"y = x @ w.T; z = softcap(y, 30); {NLL}; return nll: f32", "fast", ["y"]),
        ("z = x @ w.T; return y = z * rsqrt(mean(z * z, V)): bf16", "fast", []),
        ("z = x @ w.T; c = z - mean(z, V); return y = c * c: bf16", "fast", []),
    ],
)
def test_what_the_forward_rounds(body: str, memory: str, rounded: list[str]) -> None:
    derived, notes = derive(program(body), ("x", "w"), memory=memory)
    assert casts(derived.forward) == rounded
    told = [n for n in notes if n.rule == "steady"]
    assert len(told) == (1 if rounded and "cast" not in body else 0)
    assert all(str(n.label) == f"algebraic ({rounded[0]} is rounded)" for n in told)
