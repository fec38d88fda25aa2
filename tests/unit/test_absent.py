"""Programs for calls without some of their optional operands."""

from __future__ import annotations

import pytest
import torch

from coda.errors import CodaError
from coda.passes.absent import without
from coda.passes.differentiate import differentiate
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.verify import verify
from tests.support import program

TEXT = """
program p(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]?, scale: f32[M]?) {
    return y = gelu_tanh(x @ w.T * scale + bias): bf16
}"""


@pytest.mark.parametrize("names", [["bias"], ["scale"], ["bias", "scale"]])
def test_the_same_bits_as_with_absent_operands(names):
    p = program(TEXT)
    after = without(p, names)
    verify(after)
    assert not {q.name for q in after.params} & set(names)
    assert sum(n.op == "default" for n in after.nodes()) == 2 - len(names)
    inputs = random_inputs(p, {"M": 3, "N": 4, "K": 5}) | dict.fromkeys(names)
    given = {n: x for n, x in inputs.items() if n not in names}
    assert torch.equal(evaluate(p, inputs)["y"], evaluate(after, given)["y"])


def test_no_gradient_for_what_is_absent():
    assert set(differentiate(without(program(TEXT), ["bias", "scale"])).gradients) == {"x", "w"}


def test_a_result_that_was_as_wide_as_the_operand():
    p = program("program p(r: f32[M], b: f32[N]?) { return y = r + b: f32 }")
    after = without(p, ["b"])
    verify(after)
    assert evaluate(after, {"r": torch.ones(2)}, dims={"N": 3})["y"].shape == (2, 3)


def test_only_optional_parameters_can_be_absent():
    with pytest.raises(CodaError, match="no optional parameter 'x'"):
        without(program(TEXT), ["x"])
