"""Products over heads that share their left operand become one, whose weight is never made."""

from __future__ import annotations

import pytest
import torch

import coda
from coda.errors import CodaError
from coda.passes.join import join_products
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target import TILES, lower
from coda.target.legality import legal_tile
from coda.verify import verify
from tests.support import program

TEXT = """
program qkv(h: bf16[M, D], wq: bf16[(HQ d=64), D], wk: bf16[(HK d), D], wv: bf16[(HK d), D], const HQ, const HK) {
    return q = h @ wq.T: bf16[HQ, M, d], k = relu(h @ wk.T): bf16[HK, M, d], v = h @ wv.T: bf16[M, (HK d)]
}
"""


def test_the_joined_program_has_the_same_bits() -> None:
    before = program(TEXT, HQ=3, HK=2)
    after = join_products(before)
    verify(after)
    assert sum(n.op == "dot" for n in after.nodes()) == 1
    sizes = {"M": 5, "D": 16}
    inputs = random_inputs(before, sizes)
    want, got = evaluate(before, inputs), evaluate(after, inputs)
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_each_weight_keeps_its_place() -> None:
    plan = lower(program(TEXT, HQ=4, HK=2))
    assert [term.b for term in plan.terms] == [("wq",), ("wk",), ("wv",)]
    assert plan.joined == (0, 256, 384)
    assert plan.heads is not None
    assert [(s.start, s.count) for s in plan.heads.segments] == [(0, 4), (4, 2), (6, 2)]


def test_a_tile_that_would_cross_weights_is_refused_where_heads_stay_whole() -> None:
    plan = lower(program(TEXT, HQ=3, HK=2))  # 192 columns of q
    assert {t.name for t in TILES if legal_tile(t, plan)} == {t.name for t in TILES if t.n % 64 == 0}
    plan = lower(program(TEXT.replace("relu(h @ wk.T)", "(h @ wk.T) * rsqrt(1 + max(h @ wk.T, d))"), HQ=3, HK=2))
    assert not any(legal_tile(tile, plan) for tile in TILES)
    assert "crosses from one weight to the next (wq, wk, wv)" in str(legal_tile(TILES[0], plan))


def test_gate_and_up_are_lanes_not_neighbours() -> None:
    text = """
    program p(x: bf16[M, K], g: bf16[F, K], u: bf16[F, K]) { return silu(x @ g.T) * (x @ u.T): bf16 }
    """
    assert join_products(program(text)) is program(text) or not lower(program(text)).joined


def test_sizes_must_be_numbers() -> None:
    with pytest.raises(CodaError, match="where weights lie side by side their sizes are numbers"):
        lower(coda.parse(TEXT).programs["qkv"])
