"""Syntax tree to IR: axes and dtypes, the casts that are inserted, functions, consts, and all errors at once."""

from __future__ import annotations

import pytest

from coda.dtypes import BF16, BOOL, F16, F32, I64
from coda.errors import CodaError
from coda.frontend import expression, load, load_path
from coda.ir import Node, Program, size_symbol
from coda.ops import OPS, build
from coda.verify import verify
from tests.programs import tour
from tests.support import operand


def only(text: str, **consts: int | str) -> Program:
    (program,) = load(text, consts).programs.values()
    verify(program)
    return program


def linear(body: str, params: str = "x: bf16[M, K], w: bf16[N, K], bias: bf16[N]?, r: f32[M]", **consts) -> Program:
    return only(f"program linear({params}) {{\n{body}\n}}", **consts)


def ops(node: Node) -> list[str]:
    """The operations from a result inwards, along the first operands."""
    chain = [node.op]
    while node.args:
        node = node.args[0]
        chain.append(node.op)
    return chain


def errors(text: str) -> list[str]:
    with pytest.raises(CodaError) as caught:
        load(text)
    return [d.message for d in caught.value.diagnostics]


# The tour.


@pytest.mark.parametrize("name", [n for n in tour() if n != "moe"])
def test_tour(name):
    for program in load_path(tour()[name]).programs.values():
        verify(program)


def test_moe_is_planned():
    with pytest.raises(CodaError) as caught:
        load_path(tour()["moe"])
    assert all("planned for a later release" in d.message for d in caught.value.diagnostics)
    assert len(caught.value.diagnostics) == 4


# Rounding.


def test_declared_result_casts_once():
    (y,) = linear("return x @ w.T: bf16").outputs
    assert ops(y.value) == ["cast", "dot", "input"]
    assert y.value.dtype == BF16


def test_explicit_casts_stay_even_cast_of_cast():
    (y,) = linear("return cast(cast(cast(x @ w.T, bf16), bf16), f32): f32").outputs
    assert ops(y.value) == ["cast", "cast", "cast", "dot", "input"]


def test_explicit_cast_is_not_doubled_by_the_result_type():
    (y,) = linear("return cast(x @ w.T, bf16): bf16").outputs
    assert ops(y.value) == ["cast", "dot", "input"]


def test_computed_operand_is_cast_to_the_other():
    (y,) = linear("return (x * r) @ w.T", "x: bf16[M, K], w: f16[N, K], r: f32[M]").outputs
    assert y.value.args[0].op == "cast"
    assert y.value.args[0].dtype == F16


def test_two_computed_operands_take_the_nearest_matrix():
    (y,) = linear("return (x * r) @ (w * 2).T", "x: bf16[M, K], w: bf16[N, K], r: f32[M]").outputs
    left, right = y.value.args
    assert (left.op, left.dtype) == ("cast", BF16)
    assert ops(right) == ["cast", "transpose", "mul", "input"]


def test_stored_f32_is_not_cast():
    (y,) = linear("return x @ w.T", "x: f32[M, K], w: f32[N, K]").outputs
    assert ops(y.value) == ["dot", "input"]


def test_moving_values_does_not_make_them_computed():
    (y,) = linear("return x @ w.s[0].T", "x: f32[M, K], w: f32[s=2, N, K]").outputs
    assert [n.op for n in y.value.args] == ["input", "transpose"]


def test_typed_assignment_casts_and_lays_out():
    program = linear("z: bf16[M, (s F)] = stack(x @ w.T, x @ v.T, s)\nreturn z @ u.T",
                     "x: bf16[M, K], w: bf16[F, K], v: bf16[F, K], u: bf16[N, (s=2 F)]")  # fmt: skip
    z = program.outputs[0].value.args[0]
    assert ops(z)[:3] == ["layout", "cast", "stack"]
    assert str(z.type) == "bf16[M, (s F)]"


def test_result_order_is_the_memory_order():
    (y,) = linear("return x @ w.T: bf16[N, M]").outputs
    assert str(y.type) == "bf16[N, M]"
    assert str(y.value.type) == "bf16[M, N]"


# Literals and optional operands.


def test_literals_have_their_dtype():
    nodes = linear("return where(true, r * 2.5, 1)").nodes()
    assert {(n.attr("value"), n.dtype) for n in nodes if n.op == "const"} == {(True, BOOL), (2.5, F32), (1, I64)}


def test_equal_numbers_of_other_kind_are_other_nodes():
    texts = ("0", "0.0", "-0.0", "false", "1", "1.0", "true", "nan")
    assert len({expression(t) for t in texts}) == len(texts)
    assert expression("nan") is expression("nan")


@pytest.mark.parametrize(
    ("text", "identity"),
    [("x + b", "-0.0"), ("b + x", "-0.0"), ("x - b", "0.0"), ("x * b", "1.0"), ("b * x", "1.0"), ("x / b", "1.0")],
)
def test_identity_of_an_optional_operand(text, identity):
    program = linear(f"return {text}", "x: f32[M, N], b: f32[N]?")
    (default,) = [n for n in program.nodes() if n.op == "default"]
    assert repr(default.attr("identity")) == identity


# Axes.


def test_axis_of_equal_size_is_another_axis():
    program = linear("dim A = D\nreturn x + o @ w.T: bf16", "o: bf16[M, A], w: bf16[D, A], x: bf16[M, D]")
    a, d = (next(axis for axis in program.axes if axis.name == n) for n in "AD")
    assert a.size == d.size == size_symbol("D")
    assert a != d
    assert (a.is_free, d.is_free) == (False, True)


def test_axes_in_order_of_appearance():
    program = linear("return sum(x @ w.T, N): f32")
    assert [a.name for a in program.axes] == ["M", "K", "N"]


def test_const_sizes_are_symbols_until_given():
    params = "x: bf16[M, K], w: bf16[(G d=8), K], const HQ, const HK = 2"
    text = "dim G = HQ + 2*HK\nq, k, v = split(x @ w.T, G = HQ | HK | HK)\nreturn q, k, v"
    assert str(linear(text, params).outputs[0].type.axis("HQ").size) == "HQ"
    given = linear(text, params, HQ=4)
    assert given.param("w").type.axis("G").static == 8
    assert given.outputs[2].value.attr("start") == 6


def test_rest_of_a_split_may_be_empty():
    program = linear("a, rest = split(x, K = K2 | *)\nreturn a, rest", "x: bf16[M, K], const K2")
    assert str(program.outputs[1].type.axis("K_rest").size) == "K - K2"
    empty = linear("dim K2 = K\na, rest = split(x, K = K2 | *)\nreturn a, rest", "x: bf16[M, K]")
    assert empty.outputs[1].type.axis("K_rest").static == 0


def test_dim_may_divide():
    program = linear("dim P = K / 2\na, b = split(x, K = P | *)\nreturn a, b", "x: bf16[M, K]")
    assert str(program.outputs[0].type.axis("P").size) == "K/2"


def test_gather_replaces_the_first_axis_or_the_named_one():
    program = linear("return table[pos], table[f = pos]", "table: f32[P, f], pos: i32[(B T)]")
    assert [str(o.type) for o in program.outputs] == ["f32[(B T), f]", "f32[P, (B T)]"]


# Results.


def test_names_of_results():
    program = linear("h = cast(x @ w.T, bf16)\nreturn h, sum(h, N), y = h * 2: bf16, r")
    assert [o.name for o in program.outputs] == ["h", "out1", "y", "out3"]


def test_accumulation():
    program = only("program p(dy: bf16[M, N], x: bf16[M, K], inout dw: f32[N, K]) { dw += dy.T @ x }")
    (output,) = program.outputs
    assert (output.name, output.into, output.type) == ("dw", "dw", program.param("dw").type)


def test_choice():
    text = "program p(x: f32[M], const act: {silu, relu} = relu) { return act(x) }"
    assert only(text).outputs[0].value.op == "relu"
    assert only(text, act="silu").outputs[0].value.op == "silu"
    with pytest.raises(CodaError, match="not a choice"):
        load(text, {"act": "gelu_erf"})
    with pytest.raises(CodaError, match="no const 'axt'"):
        load(text, {"axt": "silu"})


# Functions.


def test_library_norm_is_inlined():
    (y,) = linear("return rms_norm(x, g, eps)", "x: bf16[M, D], g: bf16[D], eps: f32").outputs
    x, g, eps = (operand("x", BF16, "M", "D"), operand("g", BF16, "D"), operand("eps", F32))
    assert y.value is expression("x * rsqrt(mean(x * x, D) + eps) * g", x=x, g=g, eps=eps)


def test_absent_optional_arguments_vanish():
    program = linear(
        "return rms_norm(x, eps=eps, over=D), rms_norm(x, g, eps, offset=1)", "x: bf16[M, D], g: bf16[D], eps: f32"
    )
    assert program.outputs[0].value.args[1].op == "rsqrt"
    assert program.outputs[1].value.args[1].op == "add"


def test_axis_of_a_function_by_keyword_and_group():
    program = linear("return softmax(x, over=(H d)), softmax(x, over=d)", "x: f32[M, (H d)]")
    axes = [n.attr("axes") for n in program.nodes() if n.op == "reduce_logsumexp"]
    assert axes == [("H", "d"), ("d",)]


def test_functions_of_the_file_hide_the_library():
    (y,) = only("fn softmax(x) { return exp(x) }\nprogram p(x: f32[M]) { return softmax(x) }").outputs
    assert y.value.op == "exp"


# Diagnostics.


def test_all_errors_at_once_and_none_twice():
    text = "program p(x: f32[M]) {\n y = foo(x)\n z = y + bar\n return y: f32, z: f32, baz: f32\n}"
    assert errors(text) == ["there is no function 'foo'", "'bar' is not defined", "'baz' is not defined"]


def test_errors_of_several_programs():
    text = "program a(x: f32[M]) { return u }\nprogram b(x: f32[M]) { return v }"
    assert errors(text) == ["'u' is not defined", "'v' is not defined"]


def test_warnings():
    module = load("fn f(x) { return x }\nprogram p(x: f32[M], y: f32[M], _z: f32[M]) {\n a = x\n a = x\n return a }")
    assert [w.message for w in module.warnings] == [
        "fn 'f' is never called, so it is not checked",
        "'y' is never used",
        "'a' is never used",
    ]


# Expressions over given nodes.


@pytest.mark.parametrize(
    "op", [o for o in OPS.values() if o.family == "pointwise" and o.derivative], ids=lambda o: o.name
)
def test_every_pointwise_derivative_is_an_expression(op):
    names = "abc"[: op.arity]
    operands = {n: operand(n, F32, "M", "N") for n in names}
    if op.name == "where":
        operands["a"] = build("gt", operands["a"], operands["b"])
    y = build(op.name, *operands.values())
    for text in op.derivative:
        if text is not None:
            node = expression(text, y=y, dy=operand("dy", F32, "M", "N"), **operands)
            assert node.type.names <= {"M", "N"}


def test_expression_tells_its_errors():
    with pytest.raises(CodaError, match="'b' is not defined"):
        expression("a + b", a=operand("a", F32, "M"))


def test_missing_file():
    with pytest.raises(CodaError, match="cannot read nowhere"):
        load_path("nowhere.coda")
