"""Row factors behind products: found by meaning, refused where they cost, equal over the reals, accurate enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coda.frontend import load_path
from coda.ir import Program, topological
from coda.passes import derive
from coda.passes.delay_norm import delay_norm
from coda.passes.differentiate import differentiate
from coda.passes.eager import round_as_eager
from coda.passes.prove import prove
from coda.printer import print_program
from coda.runtime.binding import bind, shapes_of
from coda.runtime.compare import compare, measure
from coda.runtime.gradients import autograd, random_seeds
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.verify import verify
from tests.gradients import check_gradients, without_lines
from tests.support import program

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = "x: bf16[M, D], g: bf16[D], b: bf16[D], w: bf16[N, D], v: bf16[F, D], s: f32[N], eps: f32 = 1e-5"


def linear(norm: str, head: str = HEAD, more: str = "") -> Program:
    return program(f"program p({head}) {{ n = {norm}; return y = n @ w.T: bf16{more} }}")


def delayed(p: Program) -> Program:
    after, notes = delay_norm(p)
    verify(after)
    assert all(n.label is not None for n in notes) and notes
    return after


MOVES = {  # the operand, and the program after the pass
    "rms_norm(x, g, eps)": "rsqrt(mean(x * x, D) + eps) * (cast(x * g, bf16) @ w.T)",
    "rms_norm(x, g, eps, offset=1)": "rsqrt(mean(x * x, D) + eps) * (cast(x * (1 + g), bf16) @ w.T)",
    "rms_norm_rounded(x, g, eps, bf16)": "rsqrt(mean(x * x, D) + eps) * (cast(x * g, bf16) @ w.T)",
    "x * rsqrt(mean(x * x, D) + eps)": "rsqrt(mean(x * x, D) + eps) * (x @ w.T)",
    "g * (x / sqrt(mean(x * x, D) + eps))": "1.0 / sqrt(mean(x * x, D) + eps) * (cast(x * g, bf16) @ w.T)",
    "-(x / max(x, D))": "-(1.0 / max(x, D)) * (x @ w.T)",
}


@pytest.mark.parametrize("norm", MOVES)
def test_found_by_meaning(norm):
    before = linear(norm)
    after = delayed(before)
    assert after.outputs == program(f"program p({HEAD}) {{ return y = {MOVES[norm]}: bf16 }}").outputs
    assert prove(before, after)


def test_scales_of_a_weight_move_too():
    before = program(f"program p({HEAD}) {{ return y = x @ (w * s).T: bf16 }}")
    after = delayed(before)
    assert after.outputs == program(f"program p({HEAD}) {{ return y = s * (x @ w.T): bf16 }}").outputs
    assert prove(before, after)


def test_both_sides():
    before = program(f"program p({HEAD}) {{ return y = rms_norm(x, g, eps) @ (w * s).T: bf16 }}")
    text = "rsqrt(mean(x * x, D) + eps) * s * (cast(x * g, bf16) @ w.T)"
    after = delayed(before)
    assert after.outputs == program(f"program p({HEAD}) {{ return y = {text}: bf16 }}").outputs
    assert prove(before, after)


@pytest.mark.parametrize("bias", ["", " + bias"])
def test_layer_norm_of_a_frozen_weight(bias):
    head = HEAD.replace("w:", "const w:") + ", bias: bf16[N]?"
    before = program(f"program p({head}) {{ return y = layer_norm(x, g, b, eps) @ w.T{bias}: bf16 }}")
    after = delayed(before)
    assert prove(before, after)
    (dot,) = (n for n in after.nodes() if n.op == "dot")
    assert dot.args[0].op == "input"  # x as it is stored: no normalised matrix is left


REFUSED = {
    "returned": ("rms_norm(x, g, eps)", ", n: bf16", "'n' is scaled before the product: it is returned as well"),
    "read elsewhere": ("rms_norm(x, g, eps)", ", z = exp(n): bf16", "'exp' needs it as well"),
    "other side": ("rms_norm(x, g, eps)", ", z = cast(v, bf16) @ n.T: f32", "'transpose' needs it as well"),
    "layer norm in training": ("layer_norm(x, g, b, eps)", "", "worth it only where the weight is frozen"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    norm, more, message = REFUSED[case]
    before = linear(norm, more=more)
    after, notes = delay_norm(before)
    assert after == before
    assert any(message in str(n) and "[refused]" in str(n) for n in notes)


def test_refused_where_rounding_is_eager():
    before = linear("rms_norm(x, g, eps)")
    after, (note,) = delay_norm(before, numerics="eager")
    assert after == before and "numerics=eager" in str(note)


def test_f16_has_not_the_range():
    before = linear("rms_norm(x, g, eps)", HEAD.replace("bf16", "f16")).outputs
    p = program(f"program p({HEAD.replace('bf16', 'f16')}) {{ n = rms_norm(x, g, eps); return y = n @ w.T: bf16 }}")
    after, (note,) = delay_norm(p)
    assert after.outputs == before and "range of f16" in str(note)


def test_a_factor_known_in_the_epilogue_stays_there():
    """r is there when y is made in the epilogue of the first product; moving it on would gain nothing."""
    p = program("program p(x: bf16[M, D], r: f32[M], w: bf16[F, D], v: bf16[D, F]) {"
                " y = r * (x @ w.T); return out = y @ v.T: bf16 }")  # fmt: skip
    assert delay_norm(p) == (p, ())


def test_a_norm_between_two_products():
    p = program("program p(o: bf16[M, A], u: bf16[D, A], g: bf16[D], w: bf16[N, D]) {"
                " h = cast(o @ u.T, bf16); n = rms_norm(h, g, 1e-5); return out = n @ w.T: bf16 }")  # fmt: skip
    after = delayed(p)
    assert prove(p, after)
    assert after.outputs[0].value.args[0].op == "mul"


# The backward of the delayed program.


def test_the_backward_has_plain_products():
    """dacc = r * dy is rounded once and read by both products; the norm's row reduction is sum(dy * acc, N), where acc
    is recovered from y."""
    after = delayed(linear("rms_norm(x, g, eps)"))
    backward = differentiate(after)
    plain, notes = delay_norm(backward.backward)
    want = program("""
        program p_backward(x: bf16[M, D], g: bf16[D], w: bf16[N, D], r: f32[M], y: bf16[M, N], d_y: bf16[M, N]) {
            d_acc = cast(d_y * r, bf16)
            t = -0.5 * sum(d_y * (y / r), N) * r * r * r / size(D) * x
            d_n = d_acc @ w
            return d_x = d_n * g + t + t: bf16, d_g = sum(d_n * x, M): bf16, d_w = g * (d_acc.T @ x): bf16
        }""")
    assert plain.outputs == want.outputs, print_program(plain)
    assert {str(n.label) for n in notes if n.label} and any("transpose" in str(n) for n in notes)


@pytest.mark.parametrize("name", ["mlp_block"])
def test_blocks(name, golden):
    (before,) = load_path(EXAMPLES / f"{name}.coda").programs.values()
    after, notes = delay_norm(before)
    sizes = {"M": 3, "D": 8, "F": 4}
    backward = check_gradients(after, sizes)
    plain, more = delay_norm(backward.backward)
    verify(plain)
    text = "".join(f"{print_program(p)}\n" for p in (backward.forward, plain))
    golden(f"backward/{name}_delayed.coda", text + without_lines(*notes, *backward.notes, *more))


def test_gradients_of_the_delayed_program_are_those_of_the_original():
    before = linear("rms_norm(x, g, eps)")
    a, b = (differentiate(p).joined() for p in (before, delayed(before)))
    assert prove(a, b)
    assert prove(b, delay_norm(b)[0])


# Numerics (case F10).


def rows(kind: str) -> torch.Tensor:
    x = torch.randn(32, 64)
    if kind == "scaled":
        x *= torch.tensor([1e4, 1e-4, 1.0, 30.0]).repeat(8)[:, None]
    if kind == "zero":
        x[::2] = 0
    if kind == "eps dominates":
        x *= 1e-6
    if kind == "outliers":
        x[:, 3] *= 1e3
    return x.bfloat16()


@pytest.mark.parametrize("kind", ["plain", "scaled", "zero", "eps dominates", "outliers"])
@pytest.mark.parametrize("norm", ["rms_norm(x, g, eps)", "rms_norm(x, g, eps, offset=1)"])
def test_delayed_norms_pass_the_error_gate(kind, norm):
    torch.manual_seed(0)
    before = linear(norm)
    inputs = random_inputs(before, {"M": 32, "D": 64, "N": 48, "F": 8}) | {"x": rows(kind)}
    comparison = compare(before, inputs, evaluate(delayed(before), inputs))
    assert comparison.ok, comparison


@pytest.mark.parametrize("kind", ["plain", "scaled", "zero", "eps dominates", "outliers"])
def test_gradients_of_delayed_norms_pass_the_error_gate(kind):
    """As the compiler derives them, against autograd in float64; eager is autograd with eager PyTorch's roundings."""
    torch.manual_seed(0)
    before = linear("rms_norm(x, g, eps)")
    sizes = {"M": 32, "D": 64, "N": 48}
    inputs = random_inputs(before, sizes | {"F": 8}) | {"x": rows(kind)}
    sizes = bind(before, shapes_of(inputs), sizes)
    backward, _ = derive(before, ["x", "g", "w"])
    kept = evaluate(backward.forward, inputs)
    seeds = random_seeds(before, backward.backward, sizes, 1)
    known = {**inputs, **kept, **{f"d_{n}": s for n, s in seeds.items()}}
    got = evaluate(backward.backward, {p.name: known[p.name] for p in backward.backward.params})
    exact = autograd(before, inputs, seeds, sizes)
    eager = autograd(round_as_eager(before), inputs, seeds, sizes, exact=False)
    outputs = {o.name: o for o in backward.backward.outputs}
    for name, output in backward.gradients.items():
        error = measure(outputs[output], got[output], exact[name], eager[name].to(got[output].dtype))
        assert error.ok, (name, error)


def test_layer_norm_of_rows_whose_mean_cancels():
    """Row by row, each with its own |mean| / std: the bound of the documentation holds for every row, not on average.
    Rows of large values that cancel (mean 0) lose nothing; rows of zeros give the bias exactly."""
    torch.manual_seed(0)
    head = HEAD.replace("w:", "const w:")
    before = program(f"program p({head}) {{ return y = layer_norm(x, g, b, eps) @ w.T: bf16 }}")
    inputs = random_inputs(before, {"M": 48, "D": 64, "N": 48, "F": 8})
    x = torch.randn(48, 64)
    signs = torch.tensor([1.0, -1.0]).repeat(32)
    x[0::6] = 1e4 * signs * (1 + 0.01 * x[0::6])  # large, and the mean cancels
    x[1::6] = 1e-4 * x[1::6]  # eps dominates
    x[2::6] += 30.0  # the mean dominates
    x[3::6] = 0.0
    x[4::6] *= 1e4
    inputs["x"] = x.bfloat16()
    exact = evaluate(before, inputs, exact=True)["y"]
    got = evaluate(delayed(before), inputs)["y"].double()
    stored = inputs["x"].double()
    std = (stored.var(1, unbiased=False) + 1e-5).sqrt()
    bound = 2.0**-8 * (1 + stored.mean(1).abs() / std)  # of what the row's product is made of
    scale = inputs["w"].double().norm() / 48**0.5 * (inputs["g"].double().norm() + inputs["b"].double().norm())
    error = (got - exact).abs().amax(1)
    assert (error <= bound * scale).all(), (error / (bound * scale)).max()
    torch.testing.assert_close(got[3::6], exact[3::6], rtol=2**-8, atol=0)


@pytest.mark.parametrize("offset", [0, 1, 10, 100])
def test_layer_norm_loses_as_much_as_the_mean_exceeds_the_deviation(offset):
    """The documented bound: the error of a plain bf16 product, 2^-8, times |mean| / std, up to a small factor."""
    torch.manual_seed(0)
    head = HEAD.replace("w:", "const w:")
    before = program(f"program p({head}) {{ return y = layer_norm(x, g, b, eps) @ w.T: bf16 }}")
    inputs = random_inputs(before, {"M": 32, "D": 64, "N": 48, "F": 8})
    inputs["x"] = (torch.randn(32, 64) + offset).bfloat16()
    exact = evaluate(before, inputs, exact=True)["y"]
    error = (evaluate(delayed(before), inputs)["y"] - exact).norm() / exact.norm()
    assert error <= 2.0**-8 * max(1, offset)


def test_a_constant_row_cancels():
    head = HEAD.replace("w:", "const w:")
    before = program(f"program p({head}) {{ return y = layer_norm(x, g, b, eps) @ w.T: bf16 }}")
    inputs = random_inputs(before, {"M": 4, "D": 64, "N": 48, "F": 8}) | {"x": torch.full((4, 64), 3.0).bfloat16()}
    exact = evaluate(before, inputs, exact=True)["y"]
    torch.testing.assert_close(evaluate(delayed(before), inputs)["y"].double(), exact, rtol=2**-7, atol=2**-7)


def test_what_is_behind_a_product_stays_there():
    """r of the first product is in the epilogue of the second; the third gains nothing from having it."""
    source = """program p(o: bf16[M, A], w_o: bf16[D, A], w_gate: bf16[F, D], w_up: bf16[F, D], w_down: bf16[E, F]) {
        h = cast(o @ w_o.T, bf16)
        n = h * rsqrt(mean(h * h, D) + 1e-5)
        y = silu(n @ w_gate.T) * (n @ w_up.T)
        return y @ w_down.T: bf16
    }"""
    once, notes = delay_norm(program(source))
    assert [n.label is not None for n in notes] == [True, True]
    again, notes = delay_norm(once)
    assert again == once
    assert not notes


WIDE_HEAD = "x: bf16[M, D=8], g: bf16[D], w: bf16[V=40, D], v: bf16[D, V], eps: f32 = 1e-5"


@pytest.mark.parametrize(
    ("results", "moves"),
    [
        ("y = z: bf16", False),  # logits
        ("y = 3 * tanh(z / 3): bf16", False),
        (
            "y = cast(gelu_erf(z), bf16) @ v.T: bf16",
            True,
        ),  # a kernel makes the gradient of z
        ("y = logsumexp(z, V): f32", True),
    ],
)
def test_a_norm_before_a_wide_result_stays_in_training(results, moves):
    """Else the gradient of the result, which comes from outside, would be read, scaled and written."""
    p = program(f"program p({WIDE_HEAD}) {{ z = rms_norm(x, g, eps) @ w.T; return {results} }}")
    assert delay_norm(p)[0] != p
    after, notes = delay_norm(p, trained=True)
    assert (after != p) == moves
    assert moves or "comes from outside, over more than 4 times as many columns" in str(notes[0])
    check_gradients(after, {"M": 3})
    products = [n for n in derive(p)[0].backward.nodes() if n.op == "dot" and n.type.names == {"V", "D"}]
    read = [n for product in products for n in topological([product.args[0]]) if n.op == "input"]
    assert moves or (read and all("V" in n.type.names for n in read))  # no factor of rows


def test_a_norm_before_a_result_that_is_not_known_to_be_wide_moves_in_training():
    p = linear("rms_norm(x, g, eps)")
    assert delay_norm(p, trained=True)[0] == delay_norm(p)[0] != p
