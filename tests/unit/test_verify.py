"""Each rule of the IR is broken once, by a program that only this rule refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coda.dtypes import BF16, BOOL, F16, F32, I64
from coda.errors import CodaError
from coda.frontend import load
from coda.ir import Axis, Node, Output, Param, Program, Type, appearing_axes, intern
from coda.ops import build
from coda.verify import NODE_RULES, OUTPUT_RULES, PARAM_RULES, PROGRAM_RULES, verify
from tests.support import operand, tensor_type

GOOD = load(
    "program good(x: bf16[M, K], w: bf16[N, K], b: bf16[N]?, inout dw: f32[N, K]) {\n"
    "  dw += w * 2\n  return y = x @ w.T + b: bf16, s = partial(sum(x * x, K)): f32\n}"
).programs["good"]
X, W = operand("x", BF16, "M", "K"), operand("w", BF16, "N", "K")
B = operand("b", BF16, "N")


def program(*values: Node, params: tuple[Param, ...] | None = None) -> Program:
    """GOOD with other results."""
    outputs = GOOD.outputs[:1] + tuple(Output(f"y{i}", v, v.type) for i, v in enumerate(values))
    params = GOOD.params if params is None else params
    return Program("good", params, outputs, appearing_axes(params, outputs))


def with_param(**changes) -> Program:
    return replace(GOOD, params=(replace(GOOD.params[0], **changes), *GOOD.params[1:]))


def with_output(**changes) -> Program:
    return GOOD.with_outputs((*GOOD.outputs[:1], replace(GOOD.outputs[1], **changes), *GOOD.outputs[2:]))


def two_sizes() -> Program:
    bad = Param("z", Type(F32, ((Axis.of("M", 4),),)))
    return replace(GOOD, params=(*GOOD.params, bad), axes=appearing_axes((*GOOD.params, bad), GOOD.outputs))


def foreign_symbol() -> Program:
    derived, other = Axis.of("P", 8), Axis("Q", Axis.free("P").size)
    bad = Param("z", Type(F32, ((derived,), (other,))))
    return replace(GOOD, params=(*GOOD.params, bad), axes=appearing_axes((*GOOD.params, bad), GOOD.outputs))


def square_input() -> Node:
    return intern("input", (), {"name": "d", "type": SQUARE}, SQUARE)


SQUARE, TILE = tensor_type(F32, "M", "M"), tensor_type(F32, "M", "N")
REDUCED = build("reduce_sum", X, axes=("K",))

BROKEN = {
    "name": lambda: replace(GOOD, name="dim"),
    "results": lambda: Program("good", GOOD.params[:3], (), appearing_axes(GOOD.params[:3], ())),
    "axes": lambda: replace(GOOD, axes=GOOD.axes[::-1]),
    "axis-size": two_sizes,
    "size-symbol": foreign_symbol,
    "distinct-params": lambda: replace(GOOD, params=(*GOOD.params, GOOD.params[0])),
    "distinct-outputs": lambda: GOOD.with_outputs((*GOOD.outputs, GOOD.outputs[-1])),
    "accumulations-first": lambda: GOOD.with_outputs(GOOD.outputs[::-1]),
    "param-name": lambda: program(params=(*GOOD.params, Param("K", Type(F32)))),
    "default": lambda: with_param(default=1.0),
    "inout": lambda: GOOD.with_outputs(GOOD.outputs[1:]),
    "inout-given": lambda: replace(GOOD, params=(*GOOD.params[:3], replace(GOOD.params[3], optional=True))),
    "operation": lambda: program(intern("nonsense", (X,), {}, X.type)),
    "interned": lambda: program(Node("exp", (X,), (), X.type.with_dtype(F32))),
    "typed": lambda: program(intern("exp", (X,), {}, X.type)),
    "axes-distinct": lambda: program(square_input(), params=(*GOOD.params, Param("d", SQUARE))),
    "stored-operands": lambda: program(intern("dot", (build("mul", X, X), build("transpose", W)), {}, TILE)),
    "declared": lambda: program(operand("unknown", F32, "M")),
    "identity": lambda: program(build("exp", B)),
    "default-of": lambda: program(build("default", X, identity=0.0)),
    "constant": lambda: program(build("const", value=1, dtype=F32)),
    "partial-of": lambda: program(build("partial", build("exp", X))),
    "partial-result": lambda: program(build("neg", build("partial", REDUCED))),
    "output-name": lambda: with_output(name="N"),
    "output-dtype": lambda: with_output(type=GOOD.outputs[1].type.with_dtype(F16)),
    "output-axes": lambda: with_output(type=Type(BF16, GOOD.outputs[1].type.dims[:1])),
    "output-partial": lambda: program(build("partial", REDUCED)),
    "output-optional": lambda: program(B),
    "into": lambda: with_output(name="x"),
}  # fmt: skip


def broken_rules(p: Program) -> set[str]:
    with pytest.raises(CodaError) as caught:
        verify(p)
    return {d.message.rpartition("[")[2].rstrip("]") for d in caught.value.diagnostics}


def test_good_program_passes():
    verify(GOOD)


@pytest.mark.parametrize("rule", BROKEN)
def test_rule_is_enforced(rule):
    assert rule in broken_rules(BROKEN[rule]())


def test_every_rule_has_a_broken_program():
    rules = {r.name for table in (PROGRAM_RULES, PARAM_RULES, NODE_RULES, OUTPUT_RULES) for r in table}
    assert rules == set(BROKEN)


def test_constants_of_each_dtype_pass():
    verify(program(*(build("const", value=v, dtype=d) for v, d in ((True, BOOL), (1, I64), (1.0, F32)))))
