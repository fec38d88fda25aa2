"""Gradients of a residual stream are stored once: in bf16, as the products read them."""

from __future__ import annotations

import pytest

from coda.dtypes import F32
from coda.passes import derive, fuse, partition
from coda.passes.narrow import narrow
from coda.verify import verify
from tests.support import program

TWO_LAYERS = """program p(x: bf16[M, D], w: bf16[D, D2], v: bf16[D2, D], u: bf16[D, D2]) {
    h = cast(x + relu(x @ w) @ v, bf16)
    return y = h + relu(h @ u) @ v: bf16
}"""


def matrices_between(block) -> list:
    return [e for e in block.backward.edges if len(e.type.axes) > 1]


def test_no_gradient_lies_between_kernels_in_f32():
    block = fuse(program(TWO_LAYERS), None)
    assert matrices_between(block)
    assert all(e.type.dtype != F32 for e in matrices_between(block))
    assert any(n.rule == "narrow" and n.label.moved for n in block.notes)
    verify(block.gradients.backward)


def test_eager_numerics_is_left_alone():
    _, notes = derive(program(TWO_LAYERS), numerics="eager")
    assert not any(n.rule == "narrow" for n in notes)


@pytest.mark.parametrize(
    "text",
    [
        "program p(x: bf16[M, D], w: bf16[D, N]) { return y = x @ w: bf16 }",
        # A forward that keeps f32 beside bf16 means it.
        "program p(x: bf16[M, D], w: bf16[D, N]) { h = exp(x); return y = cast(h, bf16) @ w: bf16, z = h: f32 }",
        # The gradient of the bias is summed where that of the product is rounded.
        "program p(x: bf16[M, D], w: bf16[D, N], b: bf16[N]) { return y = relu(x @ w + b): bf16 }",
    ],
    ids=["one product", "values of the forward", "bias"],
)
def test_nothing_to_do(text: str):
    _, notes = derive(program(text))
    assert not any(n.rule == "narrow" for n in notes)


def test_a_gradient_between_kernels_is_stored_in_sixteen_bits():
    """Behind a LayerNorm: from the product that makes the gradient to the row kernel that reads it."""
    source = """program p(x: bf16[M, D], g: bf16[D], b: bf16[D], w: bf16[N, D]) {
        return layer_norm(x, g, b, 1e-5) @ w.T: bf16
    }"""
    backward, notes = derive(program(source))
    assert any("stored as PyTorch stores it" in n.sentence for n in notes)
    edges = partition(backward.backward).edges
    assert not [e for e in edges if e.type.dtype.name == "f32" and len(e.type.dims) > 1]
    again, more = narrow(backward.backward, {"d_out"})
    assert (again, more) == (backward.backward, ())


def test_a_gradient_that_is_returned_is_not_stored_a_second_time_for_the_norm_before_it():
    """Not even times the weight of the norm: its row kernel reads what is returned."""
    source = """program p(a: bf16[M, D], x: bf16[M, D], g: bf16[D], w: bf16[N, D]) {
        h = cast(x + rms_norm(a, g, 1e-6), bf16)
        return y = h @ w.T: bf16
    }"""
    backward, notes = derive(program(source))
    kernels = partition(backward.backward).kernels
    (row,) = (k for k in kernels if k.kind == "row")
    assert [o.name for o in kernels[0].program.outputs if len(o.type.dims) > 1] == ["d_x"]
    assert "d_x" in row.reads
    assert any(n.rule == "narrow" for n in notes)
