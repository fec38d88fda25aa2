"""C1, C5, C7, C8, E1 in what the compiler generates: shared nodes, dead code, casts, any two results of one product."""

from __future__ import annotations

import itertools

import pytest
import torch

from coda.runtime.reference import evaluate
from coda.target import lower
from coda.target.emit import body_source
from tests.hostmath import compile_plans, exact_operand, own_functions, same_bits
from tests.support import program

SIZES = {"M": 9, "N": 7, "K": 6}


def agrees(text: str) -> bool:
    """Whether generated math and interpreter give the same bits."""
    return agree([text])


def agree(texts: list[str]) -> bool:
    generator = torch.Generator().manual_seed(1)
    programs = [program(text) for text in texts]
    for p, host in zip(programs, compile_plans([lower(p) for p in programs]), strict=True):
        inputs = {}
        for param in p.params:
            shape = [SIZES[a.name] for a in param.type.axes]
            inputs[param.name] = exact_operand(generator, *shape, dtype=getattr(torch, param.type.dtype.torch))
        got = host(inputs)
        with own_functions():
            want = evaluate(p, inputs)
        if not all(same_bits(got[name], want[name]) for name in want):
            return False
    return True


SHARED = """
program lca(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) {
    e = relu(x @ w.T)
    f = e + bias
    return (e + 2) + e: f32
}
"""


def test_c1_a_shared_node_is_computed_once_and_dead_code_not_at_all():
    source = body_source(lower(program(SHARED)))
    assert source.count("coda::relu") == 1
    assert "load_columns" not in source, "bias feeds dead code only"
    assert agrees(SHARED)


def test_c1_equal_expressions_are_one():
    text = """
    program p(x: bf16[M, K], w: bf16[N, K]) {
        a = tanh(x @ w.T)
        return a * tanh(x @ w.T): f32, b = a + tanh(x @ w.T): bf16
    }
    """
    assert body_source(lower(program(text))).count("coda::tanh") == 1
    assert agrees(text)


def test_c5_a_cast_in_the_middle_is_a_rounding():
    text = "program p(x: bf16[M, K], w: bf16[N, K]) { return cast(cast(x @ w.T, bf16), f32) * 3.1: f32 }"
    assert "coda::pack<coda::bf16>" in body_source(lower(program(text)))
    assert agrees(text)


def test_e1_what_is_stored_is_what_is_used_again():
    """The statistic sees h as it is stored, with one rounding; the sum before the cast is not rounded."""
    text = """
    program p(x: bf16[M, K], w: bf16[N, K], r: bf16[M, N]) {
        h = cast(x @ w.T * 0.37 + r, bf16)
        return h, s = sum(h * h, N): f32
    }
    """
    source = body_source(lower(program(text)))
    assert source.count("coda::pack<coda::bf16>") == 1
    assert agrees(text)


KINDS = {
    "raw": "y: f32",
    "raw_bf16": "y: bf16",
    "scaled": "y * 0.35: f16",
    "activated": "gelu_tanh(y): bf16",
    "transposed": "relu(y): bf16[N, M]",
    "row_sum": "sum(y, N): f32",
    "row_max": "max(y, N): bf16",
    "row_partial": "partial(sum(y * y, N)): f32",
    "column_mean": "mean(y, M): f32",
    "column_partial": "partial(min(y, M)): f32",
    "rstd": "rsqrt(mean(y * y, N) + 1e-5): f32",
    "scaled_by_row": "c * sum(y, M): f16",
}


@pytest.mark.parametrize("first", KINDS)
def test_c7_every_pair_of_results(first):
    agree_on = [
        f"""
        program p(x: bf16[M, K], w: bf16[N, K], c: f32[N]) {{
            y = x @ w.T
            return a = {KINDS[first]}, b = {KINDS[second]}
        }}
        """
        for second in KINDS
    ]
    assert agree(agree_on)


THREE = ("bf16", "f16", "f32")


@pytest.mark.parametrize(("read", "middle", "stored"), list(itertools.permutations(THREE)))
def test_c8_three_different_dtypes(read, middle, stored):
    assert agrees(f"""
    program p(x: bf16[M, K], w: bf16[N, K], t: {read}[M, N], r: {read}[M], c: {read}[N]) {{
        h = cast(r * (x @ w.T) * 0.7 + t, {middle})
        return h * c: {stored}, total = sum(h, N): {stored}, columns = max(h * 1.1, M): {middle}
    }}
    """)
