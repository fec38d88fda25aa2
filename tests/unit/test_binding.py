"""Axis sizes from shapes, and the messages when they do not fit."""

import pytest
import torch

from coda.errors import CodaError
from coda.runtime.binding import bind, check_operands
from tests.support import BIAS_GELU, ROW_SCALE, program

QKV = """
program qkv(h: bf16[(B T), D], w: bf16[(G d=8), D], const HQ, const HK) {
    dim G = HQ + 2*HK
    q, k, v = split(h @ w.T, G = HQ | HK | HK)
    return q: bf16[B, HQ, T, d], k: bf16[B, HK, T, d], v: bf16[B, HK, T, d]
}
"""
SWIGLU = """
program swiglu(n: bf16[M, D], w: bf16[(s=2 F), D]) {
    z = n @ w.T
    return silu(z.s[0]) * z.s[1]: bf16
}
"""


def message(call) -> str:
    with pytest.raises(CodaError) as caught:
        call()
    return str(caught.value)


def test_free_axes():
    assert bind(program(BIAS_GELU), {"x": (4, 7), "w": (3, 7), "bias": (3,)}) == {"M": 4, "N": 3, "K": 7}


def test_an_absent_operand_tells_nothing():
    assert bind(program(BIAS_GELU), {"x": (4, 7), "w": (3, 7), "bias": None})["N"] == 3


def test_empty_axes():
    assert bind(program(BIAS_GELU), {"x": (0, 7), "w": (0, 7), "bias": (0,)}) == {"M": 0, "N": 0, "K": 7}


def test_sizes_are_not_limited_to_32_bits():
    sizes = bind(program(BIAS_GELU), {"x": (2**33, 7), "w": (2**35, 7), "bias": None})
    assert sizes["M"] * sizes["N"] == 2**68


def test_a_static_factor_divides():
    assert bind(program(SWIGLU), {"n": (4, 6), "w": (10, 6)})["F"] == 5


def test_an_odd_size_for_an_even_group():
    text = message(lambda: bind(program(SWIGLU), {"n": (4, 6), "w": (11, 6)}))
    assert "operand 'w' has shape [11, 6], expected bf16[(s F), D] = [2*F, 6]" in text
    assert "dim 0 is 11, which does not fit 2*F" in text


def test_a_group_opened_tells_its_axes():
    sizes = bind(program(QKV, HQ=4, HK=2), {"h": (3, 5, 6), "w": (64, 6)})
    assert (sizes["B"], sizes["T"], sizes["D"], sizes["G"]) == (3, 5, 6, 8)


def test_a_group_alone_needs_help():
    qkv = program(QKV, HQ=4, HK=2)
    text = message(lambda: bind(qkv, {"h": (15, 6), "w": (64, 6)}))
    assert "do not tell the sizes of B and T apart (operand 'h')" in text
    assert bind(qkv, {"h": (15, 6), "w": (64, 6)}, {"B": 3})["T"] == 5


def test_a_mismatch_names_operand_expected_and_who_fixed_it():
    text = message(lambda: bind(program(BIAS_GELU), {"x": (4, 7), "w": (3, 5), "bias": None}))
    assert "operand 'w' has shape [3, 5], expected bf16[N, K] = [N, 7]: dim 1 is 5, not 7" in text or (
        "operand 'w' has shape [3, 5], expected bf16[N, K] = [3, 7]: dim 1 is 5, not 7" in text
    )
    assert "K = 7 was fixed by operand 'x' (dim 1, size 7)" in text


def test_a_wrong_rank():
    text = message(lambda: bind(program(BIAS_GELU), {"x": (7,), "w": (3, 7), "bias": None}))
    assert "operand 'x' has 1 dims (shape [7]); bf16[M, K] has 2" in text


def test_a_dim_that_contradicts():
    text = message(lambda: bind(program(BIAS_GELU), {"x": (4, 7), "w": (3, 7), "bias": None}, {"N": 8}))
    assert "N = 8 was fixed by N=8" in text


SQUARE = """
program square(o: bf16[M, A], w: bf16[D, A], x: bf16[M, D]) {
    dim A = D
    return x + o @ w.T: bf16
}
"""


def test_the_given_size_of_a_computed_axis():
    square = program(SQUARE)
    assert bind(square, {}, {"M": 3, "A": 4}) == {"M": 3, "A": 4, "D": 4}
    assert bind(square, {"o": (3, 4), "w": (4, 4), "x": (3, 4)}, {"A": 4})["D"] == 4
    assert "A=5 was given, but A = D is 4" in message(lambda: bind(square, {}, {"M": 3, "D": 4, "A": 5}))


def test_an_unknown_dim():
    text = message(lambda: bind(program(BIAS_GELU), {"x": (4, 7), "w": (3, 7), "bias": None}, {"Q": 8}))
    assert "has no axis 'Q'" in text


def test_one_element_broadcasts_and_fixes_a_size_only_if_nobody_else_does():
    assert bind(program(ROW_SCALE), {"x": (4, 7), "w": (3, 7), "r": (1,)})["M"] == 4
    assert bind(program(ROW_SCALE), {"x": (1, 7), "w": (3, 7), "r": (1,)})["M"] == 1


X, W = torch.ones(4, 7, dtype=torch.bfloat16), torch.ones(3, 7, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"x": X}, "operand 'w': bf16[N, K] is missing"),
        ({"x": X, "w": W.float()}, "operand 'w' is torch.float32, the program declares bf16[N, K]"),
        ({"x": X, "w": 3.0}, "operand 'w' is the number 3.0, but bf16[N, K] is a tensor"),
        ({"x": X, "w": W, "b": W}, "has no parameter 'b'"),
        ({"x": X, "w": [1, 2]}, "operand 'w' is a list, not a tensor or number"),
        ({"x": X, "w": W.to("meta")}, "operand 'w' is on meta, operand 'x' on cpu"),
    ],
)
def test_operands_are_checked_by_name(inputs, text):
    assert text in message(lambda: check_operands(program(BIAS_GELU), inputs))
