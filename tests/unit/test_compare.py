"""The error gate, and the inputs it is fed with."""

import json
import math

import pytest
import torch

from coda.errors import CodaError
from coda.runtime.compare import compare
from coda.runtime.inputs import poisoned_outputs, random_inputs, small_sizes
from coda.runtime.reference import evaluate
from tests.support import BIAS_GELU, RESIDUAL_STATS, program

STATS = program(RESIDUAL_STATS)
SIZES = {"M": 33, "N": 40, "K": 64}


@pytest.fixture
def call():
    inputs = random_inputs(STATS, SIZES, seed=1)
    return inputs, evaluate(STATS, inputs)


def test_the_program_itself_passes(call):
    inputs, outputs = call
    result = compare(STATS, inputs, outputs)
    assert result.ok, str(result)
    assert [o.name for o in result.outputs] == ["h", "s"]


def test_twice_eager_is_the_limit(call):
    inputs, outputs = call
    first = compare(STATS, inputs, outputs).outputs[0]
    assert first.limit == pytest.approx(2 * first.eager_error)
    worse = outputs | {"h": outputs["h"] + 0.05 * torch.randn(33, 40).bfloat16()}
    result = compare(STATS, inputs, worse)
    assert [o.ok for o in result.outputs] == [False, True]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_stray_special_value_fails(call, value):
    inputs, outputs = call
    outputs["h"][3, 4] = value
    (h, _) = compare(STATS, inputs, outputs).outputs
    assert not h.ok
    assert h.misplaced == 1


def test_special_values_where_they_belong_pass(call):
    inputs, _ = call
    inputs["x"][3, 4], inputs["x"][5, 6] = math.nan, math.inf
    result = compare(STATS, inputs, evaluate(STATS, inputs))
    assert result.ok, str(result)


def test_a_missing_nan_fails(call):
    inputs, outputs = call
    inputs["x"][3, 4] = math.nan
    assert not compare(STATS, inputs, outputs).ok


def test_poison_fails(call):
    inputs, _ = call
    assert not compare(STATS, inputs, poisoned_outputs(STATS, SIZES)).ok


def test_where_eager_is_exact_one_ulp_is_allowed_and_two_are_not():
    p = program("program p(x: bf16[M, K], w: bf16[N, K]) { return x @ w.T: bf16 }")
    ones = torch.ones(4, 4).bfloat16()
    inputs = {"x": ones, "w": ones}
    (name,) = evaluate(p, inputs)
    ulp = torch.finfo(torch.bfloat16).eps * 4
    out = torch.full((4, 4), 4.0).bfloat16()
    assert compare(p, inputs, {name: out}).ok
    out[0, 0] += ulp
    assert compare(p, inputs, {name: out}).ok
    out[0, 1] += ulp
    assert not compare(p, inputs, {name: out}).ok


def test_an_all_zero_reference_is_compared_absolutely():
    p = program("program p(x: f32[M]) { return x - x: f32 }")
    (name,) = evaluate(p, {"x": torch.ones(3)})
    assert compare(p, {"x": torch.ones(3)}, {name: torch.zeros(3)}).ok
    assert not compare(p, {"x": torch.ones(3)}, {name: torch.full((3,), 1e-3)}).ok


def test_empty_outputs_pass():
    inputs = random_inputs(STATS, {"M": 0, "N": 4, "K": 8})
    assert compare(STATS, inputs, evaluate(STATS, inputs)).ok


def test_shape_and_dtype_are_checked(call):
    inputs, outputs = call
    with pytest.raises(CodaError, match="output 's' is missing"):
        compare(STATS, inputs, {"h": outputs["h"]})
    with pytest.raises(CodaError, match="the program declares"):
        compare(STATS, inputs, outputs | {"h": outputs["h"].float()})


def test_text_and_json(call):
    inputs, outputs = call
    result = compare(STATS, inputs, outputs)
    lines = str(result).splitlines()
    assert lines[0].split() == ["output", "type", "error", "eager", "limit"]
    assert lines[1].startswith("h ")
    assert lines[1].endswith("ok")
    document = json.loads(json.dumps(result.to_json()))
    assert document["ok"] is True
    assert document["outputs"][1]["name"] == "s"


# Inputs.

CE = """
program ce(x: bf16[M, D], w: bf16[V, D], label: i64[M], weight: f32[M]?, ignore: i64 = -100, zl: f32 = 0) {
    z = x @ w.T
    lse = logsumexp(z, V)
    nll = where(label != ignore, (lse - pick(z, V, label) + zl*lse*lse) * weight, 0)
    return nll: f32, lse: f32
}
"""
ROPE = """
program rope(h: bf16[M, D], w: bf16[(G d=8), D], pos: i32[M], cos: f32[P, f]) {
    z = h @ w.T
    a, rest = split(z, d = f | *)
    return a * cos[pos]: bf16, rest: bf16
}
"""


def test_inputs_are_reproducible_and_never_zero():
    first, again, other = (random_inputs(STATS, SIZES, seed=s) for s in (3, 3, 4))
    for name, x in first.items():
        assert torch.equal(x, again[name])
        assert not torch.equal(x, other[name])
        assert bool((x != 0).all())


def test_weights_keep_products_of_order_one():
    inputs = random_inputs(STATS, {"M": 64, "N": 64, "K": 4096})
    product = inputs["o"].float() @ inputs["w"].float().T
    assert 0.5 < float(product.std()) < 2


def test_labels_and_positions_stay_in_range():
    ce = random_inputs(program(CE), {"M": 500, "D": 4, "V": 7})
    assert ce["label"].dtype == torch.int64
    assert set(ce["label"].tolist()) == set(range(7))
    assert (ce["ignore"], ce["zl"]) == (-100, 0)
    rope = random_inputs(program(ROPE), {"M": 500, "D": 4, "G": 2, "d": 8, "P": 9, "f": 4})
    assert set(rope["pos"].tolist()) == set(range(9))


def test_optional_operands_can_be_left_out():
    p = program(BIAS_GELU)
    assert random_inputs(p, SIZES, optional=False)["bias"] is None
    assert compare(p, random_inputs(p, SIZES), evaluate(p, random_inputs(p, SIZES))).ok


def test_small_sizes_are_odd_where_possible():
    sizes = small_sizes(STATS)
    assert all(size % 2 for size in sizes.values())
    assert len(set(sizes.values())) == 3


def test_small_sizes_respect_the_program():
    sizes = small_sizes(program(ROPE))
    assert sizes["d"] == 8
    assert 0 < sizes["f"] <= 8
    inputs = random_inputs(program(ROPE), sizes)
    assert compare(program(ROPE), inputs, evaluate(program(ROPE), inputs)).ok


def test_small_sizes_keep_what_is_given():
    assert small_sizes(STATS, {"M": 16})["M"] == 16
