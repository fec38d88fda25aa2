"""C1, C4, C5, C7, C8, C11: the epilogue as a program."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import coda
from coda.errors import CodaError
from coda.runtime.compare import compare
from coda.runtime.reference import evaluate
from coda.target import lower
from tests.support import ROW_SCALE, bf16, kernel, program, same

M, N, K = 24, 40, 32


@pytest.fixture
def xw():
    return bf16(M, K), bf16(N, K)


def test_c1_a_shared_node_next_to_dead_code(xw):
    x, w = xw
    text = """
    program lca(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) {
        e = relu(x @ w.T)
        f = e + bias
        return (e + 2) + e: f32
    }
    """
    e = torch.relu(x.float() @ w.float().T)
    assert same(kernel(text)(x, w, bf16(N)), (e + 2) + e)


@pytest.mark.parametrize("op", ["exp", "sigmoid", "tanh", "erf", "gelu_erf", "gelu_tanh", "silu", "abs", "-"])
def test_c4_every_function_is_there(op, xw):
    x, w = xw
    want = {
        "gelu_erf": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "silu": F.silu, "-": torch.neg,
        "erf": torch.erf,
    }.get(op) or getattr(torch, op)  # fmt: skip
    f = kernel(f"program p(x: bf16[M, K], w: bf16[N, K]) {{ return {op}(x @ w.T): f32 }}")
    assert same(f(x, w), want(x.float() @ w.float().T))


def test_c4_an_unknown_function_is_placed_and_guessed():
    with pytest.raises(CodaError) as caught:
        coda.compile("program p(x: bf16[M, K], w: bf16[N, K]) {\n    return gelu_tan(x @ w.T): f32\n}")
    text = str(caught.value)
    assert "<string>:2:12: error:" in text
    assert "gelu_tan" in text
    assert "did you mean 'gelu_tanh'" in text


def test_c5_an_explicit_cast_is_a_rounding(xw):
    x, w = xw
    p = program("program p(x: bf16[M, K], w: bf16[N, K]) { return cast(x @ w.T, bf16) * 3.1: f32 }")
    (got,) = evaluate(p, {"x": x, "w": w}).values()
    z = x.float() @ w.float().T
    assert same(got, z.bfloat16().float() * 3.1)
    assert not same(got, z * 3.1)
    assert [n.op for n in lower(p).program.nodes()].count("cast") >= 1


def test_c5_a_cast_up_changes_nothing(xw):
    x, w = xw
    p = program("program p(x: bf16[M, K], w: bf16[N, K]) { return cast(cast(x @ w.T, bf16), f32) * 3.1: f32 }")
    (got,) = evaluate(p, {"x": x, "w": w}).values()
    assert same(got, (x.float() @ w.float().T).bfloat16().float() * 3.1)


DERIVED = {
    "y": lambda y: y,
    "y * 0.35": lambda y: y * 0.35,
    "relu(y)": torch.relu,
    "cast(y, bf16)": lambda y: y.bfloat16().float(),
    "sum(y, N)": lambda y: y.sum(1),
    "sum(y, M)": lambda y: y.sum(0),
    "max(y, N)": lambda y: y.amax(1),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(DERIVED, 2)))
def test_c7_any_two_results_of_one_product(first, second, xw):
    x, w = xw
    p = program(
        f"program p(x: bf16[M, K], w: bf16[N, K]) {{ y = x @ w.T; return a = {first}: f32, b = {second}: f32 }}"
    )
    got = evaluate(p, {"x": x, "w": w})
    y = x.float() @ w.float().T
    assert same(got["a"], DERIVED[first](y))
    assert same(got["b"], DERIVED[second](y))


DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@pytest.mark.parametrize(("source", "middle", "out"), list(itertools.product(DTYPES, repeat=3)))
def test_c8_input_middle_and_output_dtypes_are_independent(source, middle, out):
    x, w = torch.randn(M, K).to(DTYPES[source]), torch.randn(N, K).to(DTYPES[source])
    p = program(
        f"program p(x: {source}[M, K], w: {source}[N, K]) {{ h = cast(x @ w.T, {middle}); return h * 1.7: {out} }}"
    )
    (got,) = evaluate(p, {"x": x, "w": w}).values()
    assert same(got, ((x.float() @ w.float().T).to(DTYPES[middle]).float() * 1.7).to(DTYPES[out]))
    assert compare(p, {"x": x, "w": w}, {p.outputs[0].name: got}).ok


@pytest.mark.parametrize(
    "scale", [torch.randn(M), torch.randn(1), torch.randn(()), 0.7], ids=["M", "1", "0-dim", "number"]
)
def test_c11_a_scale_per_tensor_or_per_row_is_one_kernel(scale, xw):
    x, w = xw
    f = kernel(ROW_SCALE)
    got = f(x, w, scale)
    rows = torch.as_tensor(scale).expand(M)[:, None]
    assert same(got, (rows * (x.float() @ w.float().T)).bfloat16())
    assert f.last_route.kind == "kernel", str(f.last_route)
    f(x, w, torch.randn(M))
    assert f.artifact.runs == 2  # the same artifact, nothing rebuilt


def test_c4_special_values_pass_through(xw):
    x, w = xw
    x[0, 0], x[1, 0] = math.nan, math.inf
    f = kernel("program p(x: bf16[M, K], w: bf16[N, K]) { return silu(x @ w.T): f32 }")
    assert same(f(x, w), F.silu(x.float() @ w.float().T))
