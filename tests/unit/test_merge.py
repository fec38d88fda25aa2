"""Products that share a kernel, vectors in frozen weights, joined reductions: each found, refused, proved."""

from __future__ import annotations

import pytest

from coda.ir import Program
from coda.passes.fold import fold
from coda.passes.join_sums import join_sums
from coda.passes.merge import merge, together
from coda.passes.prove import prove
from coda.verify import verify
from tests.support import program

HEAD = "x: bf16[M, K], y: bf16[M, J], a: bf16[N, K], b: bf16[N, K], c: bf16[N, J], d: bf16[P, K]"


def block(body: str) -> Program:
    return program(f"program p({HEAD}) {{ {body} }}")


def groups(body: str) -> list[tuple[str, int]]:
    return [(g.kind, len(g.dots)) for g in merge(block(body))[0]]


MERGED = {
    "return z = silu(x @ a.T) * (x @ b.T): bf16": [("N", 2)],
    "return z = x @ a.T: bf16, v = x @ d.T: bf16": [("N", 2)],
    "return z = x @ a.T + y @ c.T: bf16": [("K", 2)],
    "return z = x @ a.T + x @ b.T + y @ c.T: bf16": [("K", 3)],
    "return z = d @ x.T: bf16, v = a @ x.T: bf16": [("M", 2)],
    "q = x @ a.T; return z = q + y @ c.T: bf16, q: bf16": [("single", 1), ("single", 1)],
    "return z = x @ a.T + exp(y @ c.T): bf16": [("single", 1), ("single", 1)],
    "q = cast(x @ a.T, bf16); return z = q @ c: bf16, v = q @ b: bf16": [("single", 1), ("N", 2)],
}


@pytest.mark.parametrize("body", MERGED)
def test_groups(body):
    assert groups(body) == MERGED[body]


def test_products_that_wait_for_each_other_are_not_merged():
    """Two products read x on the left, but the right operand of the second is made from the first."""
    p = program("program p(x: bf16[M, K], a: bf16[N, K], b: bf16[M, K]) {"
                " z = cast(x @ a.T, bf16); return v = x @ (b.T @ z): bf16 }")  # fmt: skip
    assert [g.kind for g in merge(p)[0]] == ["single"] * 3


def test_kernels_may_take_fewer():
    p = block("return z = (x @ a.T) * (x @ b.T): bf16, v = x @ d.T: bf16")
    assert [len(g.dots) for g in merge(p)[0]] == [3]
    assert sorted(len(g.dots) for g in merge(p, {"N": 2})[0]) == [1, 2]
    assert [len(g.dots) for g in merge(p, {})[0]] == [1, 1, 1]


def test_products_of_a_sum_stand_together():
    p = block("return z = y @ c.T + exp(x @ a.T) + x @ b.T: bf16")
    moved = together(p)
    assert any(n.op == "add" and all(a.op == "dot" for a in n.args) for n in moved.nodes())
    assert [g.kind for g in merge(moved)[0]] == [g.kind for g in merge(p)[0]]
    verify(moved)
    assert prove(p, moved)
    assert together(moved) is moved


def test_labels():
    _, notes = merge(block("return z = x @ a.T + y @ c.T: bf16"))
    assert [str(n.label) for n in notes] == ["algebraic (one accumulation instead of two sums added in f32)"]
    _, notes = merge(block("return z = (x @ a.T) * (x @ b.T): bf16"))
    assert [str(n.label) for n in notes] == ["bitwise"]


# Folding.

WEIGHTS = "x: bf16[M, D], {g}g: bf16[D], {w}w: bf16[N, D], v: bf16[F, D]"
FOLDED = "return y = (x * g) @ w.T: bf16"


def folding(g: str, w: str, body: str = FOLDED) -> tuple[Program, Program]:
    p = program(f"program p({WEIGHTS.format(g=g, w=w)}) {{ {body} }}")
    after, notes = fold(p)
    verify(after)
    assert bool(notes) == (after != p)
    assert prove(p, after)
    return p, after


def test_a_vector_goes_into_a_frozen_weight():
    p, after = folding("const ", "const ")
    want = program(
        f"program p({WEIGHTS.format(g='const ', w='const ')}) {{ return y = x @ cast(w * g, bf16).T: bf16 }}"
    )
    assert after.outputs == want.outputs != p.outputs


@pytest.mark.parametrize(("g", "w"), [("", "const "), ("const ", ""), ("", "")])
def test_nothing_folds_unless_all_is_frozen(g, w):
    p, after = folding(g, w)
    assert after == p


def test_nothing_folds_where_the_matrix_is_needed_anyway():
    body = "n = cast(x * g, bf16); return y = n @ w.T: bf16, z = n @ v.T: bf16"
    p, after = folding("const ", "const ", body)
    assert after == p


# Reductions.


def joined(body: str) -> tuple[Program, Program]:
    p = program(f"program p(x: f32[M, N], y: f32[M, N], r: f32[M]) {{ {body} }}")
    after, _ = join_sums(p)
    verify(after)
    assert prove(p, after)
    return p, after


def test_sums_are_joined():
    _, after = joined("return z = sum(x, N) + sum(y, N) + sum(x * y, N): f32")
    assert sum(n.op == "reduce_sum" for n in after.nodes()) == 1


@pytest.mark.parametrize(
    "body",
    [
        "return z = sum(x, N) + sum(y * y, M): f32",
        "s = sum(x, N); return z = s + sum(y, N): f32, s: f32",
        "return z = max(x, N) + max(y, N): f32",
        "return z = sum(x, N) + r: f32",
    ],
)
def test_sums_that_stay(body):
    p, after = joined(body)
    assert after == p
