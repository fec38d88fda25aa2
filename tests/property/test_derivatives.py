"""The derivative text of every operation against torch autograd, in float64: at random points, at kinks, at limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coda.dtypes import BOOL, F32
from coda.frontend import expression
from coda.ir import Axis, Node, Output, Param, Program
from coda.ops import OPS, build
from coda.runtime.reference import evaluate
from tests.support import operand

LETTERS = "abc"
TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "where": torch.where,
    "maximum": torch.maximum, "minimum": torch.minimum, "clamp": torch.clamp, "abs": torch.abs, "sign": torch.sign,
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "erf": torch.erf, "relu": torch.relu, "silu": torch.nn.functional.silu,
    "gelu_erf": torch.nn.functional.gelu, "gelu_tanh": lambda a: torch.nn.functional.gelu(a, approximate="tanh"),
    "relu2": lambda a: torch.relu(a).square(), "leaky_relu": lambda a, b: torch.where(a > 0, a, b * a),
    "elu": lambda a, b: torch.where(a > 0, a, b * torch.expm1(a)), "quick_gelu": lambda a: a * torch.sigmoid(1.702 * a),
    "softplus": lambda a: torch.nn.functional.softplus(a, threshold=50), "hardswish": torch.nn.functional.hardswish,
    "softcap": lambda a, b: b * torch.tanh(a / b),
    "reduce_sum": lambda a: a.sum(1), "reduce_mean": lambda a: a.mean(1), "reduce_max": lambda a: a.amax(1),
    "reduce_min": lambda a: a.amin(1), "reduce_logsumexp": lambda a: a.logsumexp(1),
    "dot": torch.matmul, "transpose": lambda a: a.T,
}  # fmt: skip
POINTWISE = sorted(n for n, op in OPS.items() if op.family == "pointwise" and any(op.derivative or ()))
REDUCTIONS = sorted(n for n, op in OPS.items() if op.family == "reduce" and op.derivative)
POSITIVE = {"log", "sqrt", "rsqrt"}


def derivative(op: str, which: int, nodes: list[Node], **attrs) -> Program:
    """The program that computes the gradient of one operand from the operands and ``dy``."""
    y = build(op, *nodes, **attrs)
    dy = build("input", name="dy", type=y.type)
    names = dict(zip(LETTERS, nodes, strict=False)) | {"y": y, "dy": dy}
    if "axes" in attrs:
        (reduced,) = attrs["axes"]
        names["count"] = build("size", expr=Axis.free(reduced).size)
        hit = build("eq", nodes[0], y)
        names["ties"] = build("reduce_sum", hit, axes=attrs["axes"])
    text = OPS[op].derivative[which]
    grad = expression(text, **names)
    inputs = [n for n in dict.fromkeys((*nodes, dy)) if n.op == "input"]
    return Program(op, tuple(Param(n.attr("name"), n.type) for n in inputs), (Output("grad", grad, grad.type),))


def gradient(program: Program, values: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """Ours, in float64. A gradient over fewer axes (that of a sum is ``dy``) is expanded to the operand's shape."""
    got = evaluate(program, values, exact=True)["grad"]
    return got.unsqueeze(-1).expand(shape) if got.dim() < len(shape) else got


def autograd(op: str, which: int, values: list[Tensor], dy: Tensor) -> Tensor:
    leaves = [v.double().requires_grad_(i == which) if v.is_floating_point() else v for i, v in enumerate(values)]
    y = TORCH[op](*leaves)
    (grad,) = torch.autograd.grad(y, leaves[which], dy.double())
    return grad


def check_pointwise(op: str, values: list[Tensor], dy: Tensor) -> None:
    for which, text in enumerate(OPS[op].derivative):
        if text is None:
            continue
        nodes = [operand(n, F32 if v.is_floating_point() else BOOL, "M") for n, v in zip(LETTERS, values, strict=False)]
        program = derivative(op, which, nodes)
        got = gradient(program, dict(zip(LETTERS, values, strict=False)) | {"dy": dy}, dy.shape)
        torch.testing.assert_close(got, autograd(op, which, values, dy), rtol=1e-9, atol=1e-12, equal_nan=True)


def test_every_derivative_is_tested():
    covered = {*POINTWISE, *REDUCTIONS, "dot", "transpose"}
    moves = {"cast", "default", "layout"}  # their derivative is dy itself
    assert {n for n, op in OPS.items() if any(op.derivative or ())} == covered | moves
    assert covered <= TORCH.keys()


@pytest.mark.parametrize("op", POINTWISE)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_pointwise_at_random_points(op, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    arity = OPS[op].arity
    values = [torch.randn(32, generator=generator) * scale for _ in range(arity)]
    if op in POSITIVE:
        values = [v.abs() + 1e-3 for v in values]
    if op == "where":
        values[0] = values[0] > 0
    if op == "clamp":
        values[1:] = [-values[1].abs(), values[2].abs()]
    if op == "softcap":
        values[1] = values[1].abs() + scale
    check_pointwise(op, values, torch.randn(32, generator=generator))


KINKS = {
    "relu": [[0.0, -0.0, 1.0, -1.0]],
    "abs": [[0.0, -0.0, 2.0, -2.0]],
    "sign": [[0.0, -0.0, 2.0, -2.0]],
    "maximum": [[1.0, 2.0, 0.0, -0.0], [1.0, 1.0, -0.0, 0.0]],
    "minimum": [[1.0, 2.0, 0.0, -0.0], [1.0, 1.0, -0.0, 0.0]],
    "clamp": [[-1.0, 2.0, 3.0, -3.0], [-1.0] * 4, [2.0] * 4],
    "sqrt": [[0.0, 1.0]],
    "rsqrt": [[0.0, 1.0]],
    "log": [[0.0, 1.0]],
    "tanh": [[0.0, -0.0]],
    "relu2": [[0.0, -0.0, 1.0, -1.0]],
    "leaky_relu": [[0.0, -0.0, 1.0, -1.0], [0.01] * 4],
    "elu": [[0.0, -0.0, 1.0, -1.0], [0.5] * 4],
    "hardswish": [[-3.0, 3.0, 0.0, -0.0]],
}


@pytest.mark.parametrize("op", KINKS)
def test_pointwise_at_kinks(op):
    values = [torch.tensor(v) for v in KINKS[op]]
    check_pointwise(op, values, torch.full_like(values[0], 3.0))


@pytest.mark.parametrize("op", ["tanh", "sigmoid", "erf", "relu", "silu", "gelu_erf", "gelu_tanh", "quick_gelu",
                                "softplus", "hardswish"])  # fmt: skip
def test_activations_far_out(op):
    """Large arguments must neither overflow nor leave NaN: the derivative there is 0 or 1."""
    far = torch.tensor([100.0, -100.0, 1e4, -1e4])
    check_pointwise(op, [far], torch.ones(4))
    in_f32 = evaluate(derivative(op, 0, [operand("a", F32, "M")]), {"a": far, "dy": torch.ones(4)})
    assert in_f32["grad"].isfinite().all()


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_reductions(op, kind):
    x = torch.randn(5, 7) if kind == "random" else torch.tensor([[1.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    dy = torch.randn(x.shape[0])
    program = derivative(op, 0, [operand("a", F32, "M", "N")], axes=("N",))
    got = gradient(program, {"a": x, "dy": dy}, x.shape)
    torch.testing.assert_close(got, autograd(op, 0, [x], dy), rtol=1e-9, atol=1e-12)


def test_logsumexp_with_masked_columns():
    x = torch.tensor([[0.0, -math.inf, 1.0]])
    program = derivative("reduce_logsumexp", 0, [operand("a", F32, "M", "N")], axes=("N",))
    got = gradient(program, {"a": x, "dy": torch.ones(1)}, x.shape)
    torch.testing.assert_close(got, autograd("reduce_logsumexp", 0, [x], torch.ones(1)), rtol=1e-9, atol=0)


@pytest.mark.parametrize("which", [0, 1])
def test_product(which):
    a, b, dy = torch.randn(5, 7), torch.randn(7, 3), torch.randn(5, 3)
    program = derivative("dot", which, [operand("a", F32, "M", "K"), operand("b", F32, "K", "N")])
    got = evaluate(program, {"a": a, "b": b, "dy": dy}, exact=True)["grad"]
    torch.testing.assert_close(got, autograd("dot", which, [a, b], dy), rtol=1e-12, atol=1e-12)


def test_transpose():
    program = derivative("transpose", 0, [operand("a", F32, "M", "N")])
    a, dy = torch.randn(5, 3), torch.randn(3, 5)
    assert torch.equal(evaluate(program, {"a": a, "dy": dy}, exact=True)["grad"], dy.double().T)
