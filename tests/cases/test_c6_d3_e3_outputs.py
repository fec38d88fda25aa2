"""C6: reductions are results like any other. D3: operands stay rows or columns of what they are written beside, however
the product lies in memory. E3: a rounding belongs to one result."""

from __future__ import annotations

import pytest
import torch

from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target import lower
from coda.target.blocks import lower_program
from coda.target.plan import Plan, Space
from tests.hostmath import compile_plans, own_functions
from tests.support import program, same_bits

HEAD = "x: bf16[M, K], w: bf16[N, K], row: f32[M], column: f32[N]"


def kernel(text: str) -> Plan:
    """The one kernel of a program."""
    (plan,) = lower_program(program(text)).gemms
    return plan


def agrees(text: str) -> bool:
    """Whether generated code, run by the host compiler, gives the interpreter's bits."""
    p = program(text)
    (call,) = compile_plans([kernel(text)])
    inputs = random_inputs(p, {"M": 37, "N": 72, "K": 16}, 0)
    with own_functions():
        want = evaluate(p, inputs)
        got = call(inputs)
    return all(same_bits(got[name], want[name]) for name in want)


@pytest.mark.parametrize("over", ["N", "M"])
@pytest.mark.parametrize("kind", ["sum", "max", "mean"])
def test_c6_a_reduction_beside_the_matrix_it_reduces(kind, over):
    """The row's input: a sum of squares behind a product. One kernel, and it returns both."""
    plan = lower(program(f"program p({HEAD}) {{ y = x @ w.T; return y: bf16, s = {kind}(y * y, {over}): f32 }}"))
    assert len(plan.finishings) == 1
    assert {s.kind for s in plan.stores} == {"tile", "row" if over == "N" else "column"}


def test_c6_a_reduction_alone_stores_no_matrix():
    plan = lower(program(f"program p({HEAD}) {{ y = x @ w.T; return s = sum(y * y, N): f32 }}"))
    assert [s.kind for s in plan.stores] == ["row"]


# The same product, with its operands and its result stored either way.
ORDERS = {
    "as it is": ("x @ w.T", "[M, N]"),
    "result transposed": ("x @ w.T", "[N, M]"),
    "solved transposed": ("(w @ x.T).T", "[M, N]"),
    "both": ("(w @ x.T).T", "[N, M]"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_d3_rows_stay_rows_and_columns_columns(order):
    product, result = ORDERS[order]
    text = f"program p({HEAD}) {{ return y = row * ({product}) + column: bf16{result} }}"
    plan = kernel(text)
    spaces = {o.arg: o.space for o in plan.operands}
    swapped = {a.name for a in plan.rows} == {"N"}  # the kernel may solve the transposed problem
    assert spaces == {
        "row": Space.COLUMN if swapped else Space.ROW, "column": Space.ROW if swapped else Space.COLUMN
    }  # fmt: skip
    assert agrees(text)
    inputs = random_inputs(program(text), {"M": 5, "N": 8, "K": 3}, 0)
    x, w, row, column = (inputs[n].double() for n in ("x", "w", "row", "column"))
    want = row[:, None] * (x @ w.T) + column
    got = evaluate(program(text), inputs, exact=True)["y"]
    torch.testing.assert_close(got, want if result == "[M, N]" else want.T)


def test_e3_each_result_has_its_own_rounding():
    """Two results of one value: the narrow one does not narrow the other, nor what is computed from it."""
    text = f"program p({HEAD}) {{ y = x @ w.T * 0.37; return a = y: bf16, b = y: f32, c = exp(y): f16 }}"
    assert agrees(text)
    p = program(text)
    inputs = random_inputs(p, {"M": 9, "N": 8, "K": 40}, 0)
    got = evaluate(p, inputs)
    assert torch.equal(got["a"], got["b"].bfloat16())
    assert not torch.equal(got["a"].float(), got["b"])
    assert torch.equal(got["c"], got["b"].exp().half())


def test_e3_where_the_source_rounds_all_readers_see_it():
    text = f"program p({HEAD}) {{ y = cast(x @ w.T * 0.37, bf16); return a = y: bf16, b = y * 3: f32 }}"
    assert agrees(text)
    p = program(text)
    got = evaluate(p, random_inputs(p, {"M": 9, "N": 8, "K": 40}, 0))
    assert torch.equal(got["b"], got["a"].float() * 3)
