"""F1 to F10: norms, their variants, and what delaying them may and may not change."""

import pytest
import torch
import torch.nn.functional as F

import coda
from coda.errors import CodaError
from coda.passes import fuse, optimize
from coda.passes.delay_norm import delay_norm
from coda.passes.differentiate import differentiate
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target.blocks import lower_program
from tests.gradients import check_gradients
from tests.support import bf16, program

LINEAR = "program p(x: bf16[M, D], g: {g}[D], w: bf16[N, D], eps: f32 = 1e-5) {{ return y = {norm} @ w.T: bf16 }}"
SIZES = {"M": 16, "D": 64, "N": 24}


def linear(norm: str, g: str = "bf16"):
    return program(LINEAR.format(norm=norm, g=g))


def relative(x, reference):
    return float((x.double() - reference).norm() / reference.norm())


def test_f1_f8_gemma_weights_are_around_zero_forward_and_backward():
    p = linear("rms_norm(x, g, eps, offset=1)")
    after, _ = delay_norm(p)
    backward = check_gradients(after, SIZES)
    inputs = random_inputs(p, SIZES)
    x, g, w = (inputs[n].double().requires_grad_() for n in "xgw")
    y = F.rms_norm(x, (64,), 1 + g, 1e-5) @ w.T
    torch.testing.assert_close(evaluate(after, inputs, exact=True)["y"], y)
    d_y = torch.randn(16, 24).bfloat16()
    got = evaluate(backward.joined(), {**inputs, "d_y": d_y}, exact=True)
    for name, want in zip("xgw", torch.autograd.grad(y, (x, g, w), d_y.double()), strict=True):
        torch.testing.assert_close(got[f"d_{name}"], want)


def test_f3_the_delayed_order_is_as_accurate_as_both_others():
    """Llama rounds before the weight, Gemma after it, the delayed norm rounds x * g: a third order, and no worse."""
    torch.manual_seed(0)
    orders = {"gemma": linear("rms_norm(x, g, eps)"), "llama": linear("rms_norm_rounded(x, g, eps, bf16)")}
    inputs = random_inputs(orders["gemma"], SIZES)
    exact = evaluate(orders["gemma"], inputs, exact=True)["y"]
    undelayed = {n: relative(evaluate(p, inputs)["y"], exact) for n, p in orders.items()}
    for p in orders.values():
        delayed, notes = delay_norm(p)
        assert "is rounded without its row factor" in str(notes[0])
        assert relative(evaluate(delayed, inputs)["y"], exact) <= 1.1 * max(undelayed.values())


def test_f3_eager_rounding_moves_nothing():
    p = linear("rms_norm_rounded(x, g, eps, bf16)")
    assert optimize(p, numerics="eager")[0] == p


def test_f4_the_weight_has_its_own_dtype():
    p = linear("rms_norm(x, g, eps)", g="f32")
    backward = check_gradients(delay_norm(p)[0], SIZES)
    types = {o.name: str(o.type.dtype) for o in backward.backward.outputs}
    assert types == {"d_x": "bf16", "d_g": "f32", "d_w": "bf16"}


def test_f5_any_leading_dims():
    p = program(
        "program p(x: bf16[(B T), D], g: f32[D], w: bf16[N, D]) { return y = rms_norm(x, g, 1e-5) @ w.T: bf16 }"
    )
    check_gradients(delay_norm(p)[0], {"B": 2, "T": 3, "D": 8, "N": 4})
    f = coda.compile(p)
    assert f(bf16(2, 3, 8), torch.randn(8), bf16(4, 8)).shape in ((6, 4), (2, 3, 4))


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.1])
def test_f6_eps_is_a_value_not_a_pattern(eps):
    given, written = linear("rms_norm(x, g, eps)"), linear(f"rms_norm(x, g, {eps})")
    inputs = random_inputs(given, SIZES) | {"eps": eps}
    ys = []
    for p in (given, written):
        after, notes = delay_norm(p)
        assert len(notes) == 1 and notes[0].label is not None
        ys.append(evaluate(after, inputs)["y"])
    assert torch.equal(*ys)


def test_f9_unknown_options_are_errors():
    with pytest.raises(CodaError, match="'rms_norm' has no option 'zero_centred'"):
        linear("rms_norm(x, g, eps, zero_centred=1)")


@pytest.mark.parametrize("scale", [1e4, 1e-4, 0.0])
def test_f10_rows_far_from_one(scale):
    """The accumulator is f32 until it is scaled, so neither forward nor backward overflows or loses small rows."""
    torch.manual_seed(0)
    p = linear("rms_norm(x, g, eps)")
    after, _ = delay_norm(p)
    inputs = random_inputs(p, SIZES)
    inputs["x"][::2] *= scale
    assert compare(p, inputs, evaluate(after, inputs)).ok
    backward = differentiate(after)
    call = {**inputs, "d_y": torch.randn(16, 24).bfloat16()}
    both = backward.joined()
    got, exact = evaluate(both, call), evaluate(both, call, exact=True)
    for name in exact:
        assert got[name].isfinite().all()
        assert relative(got[name], exact[name]) < 2**-6


NORMS = {
    "weight": "rms_norm(x, g, eps)",
    "one and weight": "rms_norm(x, g, eps, offset=1)",
    "no weight": "rms_norm(x, eps=eps, over=D)",
    "rounded": "rms_norm_rounded(x, g, eps, bf16)",
    "layer norm": "layer_norm(x, g, eps=eps)",
    "layer norm without weight": "layer_norm(x, eps=eps, over=D)",
}


@pytest.mark.parametrize("w", ["w", "const w"])
@pytest.mark.parametrize("g", ["bf16", "f32"])
@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_before_a_product_is_kernels_forward_and_backward(norm, g, w):
    """F1, F4: whatever the weight, if there is one; frozen or not. Gradients are those of torch in float64."""
    p = program(LINEAR.format(norm=NORMS[norm], g=g).replace("w: bf16[N, D]", f"{w}: bf16[N, D]"))
    check_gradients(p, SIZES)
    block = fuse(p, None)
    assert block.gradients is not None
    for made in (p, block.gradients.forward, block.gradients.backward):
        steps = lower_program(made).steps
        assert {"gemm"} <= {step.kind for step in steps} <= {"gemm", "row", "map"}
