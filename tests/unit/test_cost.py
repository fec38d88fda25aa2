"""The cost formulas on programs small enough to count by hand."""

from __future__ import annotations

import pytest
import sympy

from coda.cost import GPUS, PARTIAL_COLUMNS, Cost, cost
from coda.frontend import load

H200 = GPUS["h200"]
SIZES = {"M": 16, "N": 128, "K": 8}


def numbers(body: str, parameters: str = "") -> Cost:
    text = f"program p(x: bf16[M, K], w: bf16[N, K]{parameters}) {{ {body} }}"
    return cost(load(text).programs["p"]).at(SIZES)


OPERANDS = 2 * (16 * 8 + 128 * 8)
TILE = 2 * 16 * 128  # bytes of a bf16 [M, N]


def test_a_bare_product_costs_the_same_fused_or_not():
    got = numbers("return x @ w.T: bf16")
    assert got.flops == 2 * 16 * 128 * 8
    assert got.fused == got.two_kernels == got.one_by_one == OPERANDS + TILE


def test_an_intermediate_is_written_and_read_again():
    got = numbers("return relu(x @ w.T + c): bf16", ", c: bf16[M, N]")
    assert got.fused == OPERANDS + 2 * TILE
    assert got.two_kernels == got.fused + 2 * TILE
    assert got.one_by_one == OPERANDS + TILE + 3 * TILE + 2 * TILE  # product; add reads two; relu reads one


def test_partials_are_counted_for_each_tile():
    got = numbers("h = x @ w.T\n return h: bf16, partial(sum(h, N)): f32")
    assert got.fused == OPERANDS + TILE + 16 * 4 * 128 // PARTIAL_COLUMNS


def test_formulas_stay_symbolic_until_all_sizes_are_known():
    formulas = cost(load("program p(x: bf16[M, K], w: bf16[N, K]) { return x @ w.T: bf16 }").programs["p"])
    assert not formulas.at({"M": 1}).is_number
    assert formulas.at(SIZES).is_number


def test_the_floor_is_the_slower_of_product_and_memory():
    many, few = sympy.Integer(10**12), sympy.Integer(1)
    assert Cost(many, few, few, few).seconds("fused", H200) == pytest.approx(10**12 / H200.bf16_flops)
    assert Cost(few, many, many, many).seconds("fused", H200) == pytest.approx(10**12 / H200.bytes_per_second)
