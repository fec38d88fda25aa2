"""Derived backwards: of the examples and the library, for every choice of what is wanted, as readable text."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coda.dtypes import BF16, F32
from coda.errors import CodaError
from coda.frontend import load, load_path
from coda.ir import Program
from coda.passes import optimize
from coda.passes.differentiate import differentiate
from coda.printer import print_program
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from tests.gradients import autograd, check_gradients, check_text, without_lines
from tests.programs import tour
from tests.support import program

FILES = sorted((Path(__file__).parents[2] / "examples").glob("*.coda"))
EXAMPLES = {p.stem: p for p in FILES if not p.stem.endswith("_block") or p.stem == "mlp_block"}  # see test_blocks.py
SIZES = {n: s for n, s in zip("MNKDFAVP", (3, 8, 5, 8, 4, 8, 7, 6), strict=True)}
TABLES = {"qkv": ["h", "r", "w", "qg", "kg"], "qkv_rope": ["h", "r", "w"]}  # cos[pos] has no derivative in cos


def sizes_of(p: Program) -> dict[str, int]:
    symbols = {s.name for a in p.axes for s in a.size.free_symbols}
    return {n: s for n, s in SIZES.items() if n in symbols} | {n: 2 for n in symbols - SIZES.keys()}


def only(path: Path) -> Program:
    (p,) = load_path(path).programs.values()
    return p


# Examples and the language's tour.


UNLIKE = {"wgrad_accumulate", "quantize_int8"}  # accumulates; returns integers


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - UNLIKE))
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_examples(name, memory):
    p = only(EXAMPLES[name])
    floats = [q.name for q in p.params if q.type.dtype.kind == "float" and q.type.dims and q.name not in ("cos", "sin")]
    check_gradients(p, sizes_of(p), floats, memory=memory)


@pytest.mark.parametrize("name", [n for n in tour() if n not in ("moe", "ce_bwd")])
def test_tour(name):
    p = only(tour()[name])
    check_gradients(p, sizes_of(p) | ({"T": 3, "f": 3, "D": 4} if name == "qkv" else {}), TABLES.get(name))


@pytest.mark.parametrize(
    "name", ["linear", "linear_bias_gelu", "swiglu", "swiglu_preact", "mlp_block", "residual_rstd"]
)
def test_text(name, golden):
    backward = differentiate(only(EXAMPLES[name]))
    notes = without_lines(*backward.notes)
    golden(f"backward/{name}.coda", f"{print_program(backward.forward)}{notes}\n{print_program(backward.backward)}")


def test_linear_is_two_plain_products():
    backward = differentiate(only(EXAMPLES["linear"]))
    (want,) = load("""
        program linear_backward(x: bf16[M, K], w: bf16[N, K], d_y: bf16[M, N]) {
            return d_x = d_y @ w: bf16, d_w = d_y.T @ x: bf16
        }""").programs.values()
    assert backward.backward == want and backward.forward == only(EXAMPLES["linear"])


# The library, against torch's own functions.


def gradients_in_torch(function, *tensors, seed):
    leaves = [t.double().requires_grad_() for t in tensors]
    y = function(*leaves)
    return y, torch.autograd.grad(y, leaves, seed.double())


def rms(x, g, offset=0.0):
    return F.rms_norm(x, (x.shape[-1],), offset + g, 1e-5)


def rope(x, c, s):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def rope_pairs(x, c, s):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


LIBRARY = {
    "rms_norm": ("rms_norm(x, g, 1e-5)", "x: f32[M, D], g: f32[D]", rms),
    "rms_norm offset": ("rms_norm(x, g, 1e-5, offset=1)", "x: f32[M, D], g: f32[D]", lambda x, g: rms(x, g, 1.0)),
    "rms_norm_rounded": ("rms_norm_rounded(x, g, 1e-5, bf16)", "x: f32[M, D], g: f32[D]", rms),
    "layer_norm": (
        "layer_norm(x, g, b, 1e-5)", "x: f32[M, D], g: f32[D], b: f32[D]",
        lambda x, g, b: F.layer_norm(x, x.shape[-1:], g, b, 1e-5),
    ),
    "softmax": ("softmax(x, over=D)", "x: f32[M, D]", lambda x: x.softmax(-1)),
    "swiglu": ("swiglu(x)", "x: f32[M, (s=2 D)]", lambda x: F.silu(x[:, :8]) * x[:, 8:]),
    "geglu_tanh": ("geglu_tanh(x)", "x: f32[M, (s=2 D)]", lambda x: F.gelu(x[:, :8], approximate="tanh") * x[:, 8:]),
    "geglu_erf": ("geglu_erf(x)", "x: f32[M, (s=2 D)]", lambda x: F.gelu(x[:, :8]) * x[:, 8:]),
    "rope_half": ("rope_half(x, c, s)", "x: f32[M, d], c: f32[M, f], s: f32[M, f]", rope),
    "rope_interleaved": ("rope_interleaved(x, c, s)", "x: f32[M, (f p=2)], c: f32[M, f], s: f32[M, f]", rope_pairs),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY)
def test_library(name):
    call, params, function = LIBRARY[name]
    size = "dim d = 2*f;" if name == "rope_half" else ""
    result = "f32[M, (f p)]" if name == "rope_interleaved" else "f32"
    p = program(f"program p({params}) {{ {size} return y = {call}: {result} }}")
    sizes = sizes_of(p) | {"M": 3}
    backward = check_gradients(p, sizes)
    inputs = random_inputs(p, sizes)
    seed = torch.randn_like(evaluate(p, inputs)["y"])
    y, want = gradients_in_torch(function, *inputs.values(), seed=seed)
    torch.testing.assert_close(evaluate(p, inputs, exact=True)["y"], y)
    got = evaluate(backward.joined(), {**inputs, "d_y": seed}, exact=True)
    for param, gradient in zip(inputs, want, strict=True):
        torch.testing.assert_close(got[backward.gradients[param]], gradient, rtol=1e-9, atol=1e-9)


def test_cross_entropy():
    """The tour's loss, with ignored labels, against torch's cross entropy per row and z-loss beside it."""
    p = only(tour()["ce"])
    inputs = random_inputs(p, {"M": 6, "D": 5, "V": 7})
    inputs |= {"label": torch.tensor([0, 6, -100, 3, 3, -100]), "zl": 0.1}
    backward = check_gradients(p, {}, inputs=inputs)
    seeds = {"d_nll": torch.randn(6), "d_lse": torch.zeros(6)}
    x, w = (inputs[n].double().requires_grad_() for n in "xw")
    z = x @ w.T
    nll = F.cross_entropy(z, inputs["label"], reduction="none") + 0.1 * z.logsumexp(1) ** 2
    nll = torch.where(inputs["label"] != -100, nll * inputs["weight"].double(), 0.0)
    got = evaluate(backward.joined(), {**inputs, **seeds}, exact=True)
    for name, gradient in zip("xw", torch.autograd.grad(nll, (x, w), seeds["d_nll"].double()), strict=True):
        torch.testing.assert_close(got[f"d_{name}"], gradient)


def test_all_labels_ignored_gives_zero_gradients():
    p = only(tour()["ce"])
    inputs = random_inputs(p, {"M": 2, "D": 5, "V": 7}) | {"label": torch.tensor([-100, -100])}
    backward = differentiate(p, ["x", "w"], of=["nll"])
    got = evaluate(backward.joined(), {**inputs, "d_nll": torch.ones(2)}, exact=True)
    assert not got["d_x"].any() and not got["d_w"].any()


# What is asked for, and nothing else.

FLOATS = ("x", "gamma", "w_gate", "w_up", "w_down")


@pytest.mark.parametrize("wrt", [c for n in range(1, 6) for c in itertools.combinations(FLOATS, n)])
def test_every_subset_of_wanted_gradients(wrt):
    p = only(EXAMPLES["mlp_block"])
    backward = check_gradients(p, sizes_of(p), wrt)
    assert set(backward.gradients) == set(wrt)


def products(p: Program) -> int:
    return sum(n.op == "dot" for n in p.nodes())


def test_gradients_that_are_not_wanted_cost_nothing():
    p = only(EXAMPLES["mlp_block"])
    assert products(differentiate(p, ["w_down"]).backward) == 1
    assert products(differentiate(p, ["x"]).backward) == 3
    assert products(differentiate(p).backward) == 6


def test_an_output_without_gradient():
    p = only(EXAMPLES["residual_rstd"])
    backward = check_gradients(p, sizes_of(p), of=["h"])
    assert "d_rstd" not in {q.name for q in backward.backward.params}


def test_parameters_that_do_not_matter_get_no_gradient():
    p = program("program p(x: f32[M], y: f32[M]) { return z = where(y > 0, x, 0): f32 }")
    assert differentiate(p).gradients == {"x": "d_x"}
    with pytest.raises(CodaError, match="no output of 'p' depends on y"):
        differentiate(p, ["y"])


def test_absent_operands():
    p = only(EXAMPLES["linear_bias_gelu"])
    inputs = random_inputs(p, sizes_of(p), optional=False)
    check_gradients(p, sizes_of(p), ["x", "w"], inputs=inputs)


def test_inputs_are_not_written():
    p = only(EXAMPLES["mlp_block"])
    inputs = random_inputs(p, sizes_of(p))
    before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    backward = differentiate(p)
    call = {**inputs, "d_out": torch.randn(3, 8).bfloat16()}
    first, second = (evaluate(backward.joined(), call) for _ in range(2))
    assert all(torch.equal(before[n], inputs[n]) for n in before)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_gradients_have_the_dtype_of_their_parameter():
    p = program("program p(x: bf16[M, K], w: bf16[N, K], b: f32[N]) { return y = x @ w.T + b: bf16 }")
    backward = differentiate(p, accumulate=["w"])
    types = {o.name: o.type.dtype for o in backward.backward.outputs}
    assert types == {"d_x": BF16, "d_w": F32, "d_b": F32}
    assert backward.backward.param("d_w").inout
    check_text(backward.backward)
    inputs = random_inputs(p, sizes_of(p))
    seed, main = torch.randn(3, 8).bfloat16(), torch.ones(8, 5)
    got = evaluate(backward.backward, {"x": inputs["x"], "w": inputs["w"], "d_y": seed, "d_w": main}, exact=True)
    want = autograd(p, inputs, {"y": seed}, {"M": 3, "N": 8, "K": 5})
    torch.testing.assert_close(got["d_w"], 1 + want["w"])


def test_products_in_fp8_have_gradients_in_bf16():
    p = program("program p(x: f8e4m3[M, K], w: f8e4m3[N, K]) { return y = x @ w.T: bf16 }")
    backward = differentiate(p, ["x", "w"])
    assert all(n.args[0].dtype == BF16 for n in backward.backward.nodes() if n.op == "dot")
    check_text(backward.backward)


# What is kept.


def kept(p: Program, **options) -> list[str]:
    backward = differentiate(p, **options)
    return [o.name for o in backward.forward.outputs[len(p.outputs) :]]


def test_what_the_program_returns_is_not_kept_twice():
    p = program("""
        program p(n: bf16[M, D], w: bf16[(s=2 F), D], r: f32[M]) {
            z = r * (n @ w.T)
            return y = swiglu(z): bf16, z: bf16[M, (s F)]
        }""")
    assert kept(p, wrt=["n", "w"]) == []
    assert differentiate(p, ["n", "w"]).saved == ("z",)


def test_a_product_is_recovered_from_what_is_returned_scaled():
    """sum(dz * acc) of a norm's row reduction, from z = r * acc: r, a 1/rms, is never 0. A factor given may be."""
    text = "program p(x: bf16[M, D], w: bf16[N, D]{}) {{ r = {}; z = r * (x @ w.T); return y = exp(z): bf16, z: bf16 }}"
    norm = program(text.format("", "rsqrt(mean(x * x, D) + 1e-5)"))
    assert kept(norm) == ["r"]
    check_gradients(norm, sizes_of(norm))
    assert kept(program(text.format(", s: f32[M]", "s * 2"))) == ["acc"]


def test_preactivations_are_kept_with_their_bias_and_statistics_in_f32():
    p = only(EXAMPLES["linear_bias_gelu"])
    assert kept(p) == ["z"]
    norm = program("program p(x: bf16[M, D], g: bf16[D]) { return y = rms_norm(x, g, 1e-5): bf16 }")
    forward = differentiate(norm).forward
    assert [str(o.type) for o in forward.outputs[1:]] == ["f32[M]"]


def test_an_operand_that_the_forward_has_in_memory_is_not_written_again():
    """y, behind gate and up, for the gradient of w_down. With low memory it is, with all else."""
    p = only(EXAMPLES["mlp_block"])
    assert "y" in kept(p) and "y" not in kept(p, memory="low")


def test_a_norm_is_kept_where_it_is_an_operand_and_not_where_its_factors_leave_the_product():
    """dw = dy.T @ n reads the n that the forward multiplies by w; delayed, it is (dy.T @ x) * g."""
    p = program("program p(x: bf16[M, D], g: bf16[D], w: bf16[N, D]) { return y = rms_norm(x, g, 1e-5) @ w.T: bf16 }")
    assert {str(o.type) for o in differentiate(p).forward.outputs} == {"bf16[M, N]", "f32[M]", "bf16[M, D]"}
    assert kept(optimize(p)[0]) == ["r"]


def test_low_memory_computes_products_again():
    p = only(EXAMPLES["mlp_block"])
    assert kept(p, memory="low") == ["r"]
    assert products(differentiate(p, memory="low").backward) == 8


# Errors.


def test_a_gradient_that_is_not_known_is_an_error_where_it_is_written():
    (p,) = load("program p(t: f32[P, D], i: i64[M]) {\n    return y = 2 * t[i]: f32\n}").programs.values()
    with pytest.raises(CodaError, match=r"<string>:2:.*'gather' has no derivative.*depends on t") as error:
        differentiate(p)
    assert "leave t out of wrt" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrt": ["z"]}, "there is no parameter 'z'"),
        ({"of": ["z"]}, "there is no output 'z'"),
        ({"accumulate": ["z"]}, "there is no gradient 'z'"),
        ({"memory": "much"}, "memory='much' is not known"),
        ({"wrt": ["i"]}, "'i' is of dtype i64"),
    ],
)
def test_options_are_checked(options, message):
    p = program("program p(x: f32[M], i: i64[M]) { return y = x * i: f32 }")
    with pytest.raises(CodaError, match=message):
        differentiate(p, **options)
