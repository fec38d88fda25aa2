"""The IR as text: explicit, readable, and the way back."""

from __future__ import annotations

import math

import pytest

from coda.dtypes import F32, I64
from coda.frontend import load, load_path
from coda.ir import Axis, Output, Program, appearing_axes, size_symbol
from coda.ops import build
from coda.printer import literal, print_program, size_text
from tests.programs import tour
from tests.support import operand


def printed(text: str) -> str:
    (program,) = load(text).programs.values()
    return print_program(program)


def program_of(value) -> Program:
    from coda.ir import Param

    nodes = Program("p", (), (Output("y", value, value.type),)).nodes()
    params = tuple(Param(n.attr("name"), n.type) for n in nodes if n.op == "input")
    outputs = (Output("y", value, value.type),)
    return Program("p", params, outputs, appearing_axes(params, outputs))


def roundtrips(program: Program) -> str:
    text = print_program(program)
    assert load(text).programs[program.name] == program, text
    return text


@pytest.mark.parametrize("name", [n for n in tour() if n != "moe"])
def test_tour(name, golden):
    programs = load_path(tour()[name]).programs.values()
    golden(f"printer/{name}.coda", "\n".join(map(print_program, programs)))


def test_casts_and_identities_are_visible():
    text = printed("program p(x: bf16[M, K], w: bf16[N, K], b: bf16[N]?) { return x @ w.T + b: bf16 }")
    assert "acc1 = x @ w.T\n" in text
    assert "out = cast(acc1 + default(b, -0.0), bf16): bf16[M, N]" in text


def test_a_shared_value_gets_a_name_and_a_result_its_own():
    text = printed("program p(x: f32[M]) { y = exp(x); return y * y + y, y }")
    assert "    y = exp(x)\n    return out0 = y * y + y: f32[M], y: f32[M]\n" in text


@pytest.mark.parametrize("value", [0.1, -0.0, 1e-300, math.inf, -math.inf, math.nan, 3.0, -2.5])
def test_floats_read_back(value):
    x = operand("x", F32, "M")
    roundtrips(program_of(build("add", x, build("const", value=value, dtype=F32))))


def test_negated_constant_is_not_a_negative_one():
    five = build("const", value=5, dtype=I64)
    text = roundtrips(program_of(build("mul", operand("x", F32, "M"), build("neg", five))))
    assert "t1 = 5\n" in text


def test_parentheses_only_where_needed():
    text = printed("program p(a: f32[M], b: f32[M], c: f32[M]) { return a - (b - c) - (a / (b * c)) * -(a + b) }")
    assert "out = a - (b - c) - a / (b * c) * -(a + b)" in text


def test_names_meet_no_parameter():
    x, t1 = operand("t2", F32, "M"), operand("t1", F32, "M")
    shared = build("exp", x)
    text = roundtrips(program_of(build("mul", build("mul", shared, shared), t1)))
    assert "t3 = exp(t2)" in text


def test_sizes():
    d, k = size_symbol("D"), size_symbol("K")
    assert size_text(d * d / (k * k)) == "(D*D)/(K*K)"
    assert size_text(d / 2 + 3) == "D/2 + 3"


def test_size_of_an_axis_nobody_binds_is_a_const():
    x = operand("x", F32, "K")
    part = build("part", x, axis="K", start=size_symbol("H"), into=Axis.free("H"))
    assert "const H" in roundtrips(program_of(part))


def test_literals():
    assert [literal(v) for v in (True, 3, 1e-5, -0.0)] == ["true", "3", "1e-05", "-0.0"]
