"""Every simplification gives the same bits, and fits where it should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coda.frontend import load
from coda.ir import Program
from coda.passes.simplify import RULES, simplify
from coda.printer import print_program
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.verify import verify
from tests.programs import random_epilogue
from tests.support import same

HEAD = "x: bf16[M, N], y: bf16[M, N], f: f32[M, N], z: f32[M, (s=2 N)], i: i64[M], w: bf16[N, K]"
CASES = {  # expression, what is left of it, declared type
    "transpose of transpose": ("x.T.T", "x", "bf16"),
    "layout as it was": ("layout(layout(x, [N, M]), [M, N]) * y", "x * y", "f32"),
    "slice of stack": ("stack(f, 2.0 * f, t).t[1]", "2.0 * f", "f32"),
    "stack of all slices": ("stack(z.s[0], z.s[1], s)", "layout(z, [M, N, s])", "f32[M, (s N)]"),
    "joined roundings": ("stack(cast(f, bf16), cast(-f, bf16), t)", "cast(stack(f, -f, t), bf16)", "bf16[M, (N t)]"),
    "joined roundings of two kinds": ("stack(cast(f, bf16), cast(f, f16), t)", None, "f32[M, (N t)]"),
    "slice of the wrong stack": ("stack(z.s[1], z.s[0], s)", None, "f32[M, (s N)]"),
    "x * 1": ("1.0 * f", "f", "f32"),
    "integer one": ("f * 1", "f", "f32"),
    "x / 1": ("f / 1", "f", "f32"),
    "1 / x": ("1.0 / f", None, "f32"),
    "x + -0.0": ("f + -0.0", "f", "f32"),
    "x + 0.0 changes -0.0": ("f + 0.0", None, "f32"),
    "x + 0 of an integer": ("f + 0", None, "f32"),
    "i + 0": ("i + 0", "i", "i64"),
    "x - 0": ("f - 0", "f", "f32"),
    "x - -0.0": ("f - -0.0", None, "f32"),
    "negated twice": ("-(-f)", "f", "f32"),
    "equal branches": ("where(f > 0, x, x)", "cast(x, f32)", "f32"),
    "cast twice": ("cast(cast(f, bf16), bf16)", "cast(f, bf16)", "bf16"),
    "cast to the stored dtype": ("cast(cast(x, f32), bf16)", "x", "bf16"),
    "a rounding stays": ("cast(cast(f, f16), bf16)", None, "bf16"),
    "saturation stays": ("cast(cast(f, bf16), bf16, saturate)", None, "bf16"),
    "f32 rounding of a computed value stays": ("cast(f * f, f32)", None, "f32"),
    "transposed product": ("(x @ w).T", "w.T @ x.T", "bf16[K, M]"),
}  # fmt: skip


def only(expression: str, result: str) -> Program:
    dims = "dim t = 2\n" if "t)" in expression else ""
    (program,) = load(f"program p({HEAD}) {{ {dims} return out = {expression}: {result} }}").programs.values()
    return program


@pytest.mark.parametrize("case", CASES)
def test_rule(case):
    expression, simpler, result = CASES[case]
    before = only(expression, result)
    wanted = before if simpler is None else only(simpler, result)
    after = simplify(before)
    verify(after)
    assert after.outputs == wanted.outputs, print_program(after)


def test_parts():
    text = """
    program p(x: f32[M, d], w: f32[M, e]) {
        dim f = d / 2
        dim h = d / 2
        a, b = split(x, d = f | h)
        both = concat(a, b, d = f | h)
        mixed = concat(b, a, d = h | f)
        c, g = split(concat(a * 2, w, k), k = f | e)
        return both: f32, mixed: f32, c: f32, g: f32
    }"""
    (program,) = load(text).programs.values()
    both, mixed, c, g = (o.value for o in simplify(program).outputs)
    assert (both.op, mixed.op, c.op, g.op) == ("input", "concat", "mul", "input")


def test_a_product_read_twice_is_not_flipped():
    text = "program p(x: bf16[M, K], w: bf16[N, K]) { z = x @ w.T; return a = z.T: bf16, b = z: bf16 }"
    (program,) = load(text).programs.values()
    assert sum(n.op == "dot" for n in simplify(program).nodes()) == 1


def test_the_names_of_rules_are_distinct():
    assert len({r.name for r in RULES}) == len(RULES)


@settings(max_examples=60, deadline=None)
@given(random_epilogue(), st.integers(0, 99))
def test_random_programs_keep_their_bits(program, seed):
    simple = simplify(program)
    verify(simple)
    assert simplify(simple) == simple
    sizes = {"M": 3, "N": 4, "K": 5}
    inputs = random_inputs(program, sizes, seed)
    befores, afters = (evaluate(p, inputs, dims=sizes).values() for p in (program, simple))
    for before, after in zip(befores, afters, strict=True):
        assert same(before, after) and torch.equal(before.signbit(), after.signbit())
