"""The prover: equal programs, and what it says of different ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coda.dtypes import I64
from coda.errors import CodaError
from coda.frontend import expression as expression_of
from coda.ir import rewrite
from coda.ops import build
from coda.passes.differentiate import differentiate
from coda.passes.prove import prove, prove_gradients
from tests.support import program

HEAD = "x: f32[M, (s=2 N)], y: f32[M, N], r: f32[M], w: f32[K, N], i: i64[M], t: f32[P, N]"


def prove_texts(a: str, b: str, **options):
    dims = "dim h = 2*N; dim k = N;"
    return prove(*(program(f"program p({HEAD}) {{ {dims} return out = {e}: f32 }}") for e in (a, b)), **options)


EQUAL = {
    "r * (y @ w.T)": "(r * y) @ w.T",
    "sum(r * y, N)": "sum(y, N) * r",
    "mean(y, N)": "sum(y, N) / size(N)",
    "(y - r) * (y + r)": "y * y - r * r",
    "x.s[0] + x.s[1]": "sum(x, s)",
    "stack(y, 2 * y, s).s[1]": "y + y",
    "part(concat(y, exp(y), h = N | N), h, N, N)": "exp(y)",
    "t[i] * r": "r * t[i]",
    "rsqrt((y + 1) * (y + 1))": "rsqrt(y * y + 2 * y + 1)",
    "where(y > 0, y, y * r) / r": "where(y > 0, y, r * y) / r",
    "-(y / r)": "y / -r",
    "pick(y, N, i)": "sum(where(i == index(N), y, 0), N)",
    "logsumexp(y + r, N)": "logsumexp(r + y, N)",
    "cast(y, bf16)": "y",
}


@pytest.mark.parametrize("a", EQUAL)
@pytest.mark.parametrize("symbolic", [True, False])
def test_equal(a, symbolic):
    proof = prove_texts(a, EQUAL[a], symbolic=symbolic)
    assert proof, proof
    assert str(proof).startswith("equal over the reals")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("r * y", "r + y"),
        ("rsqrt(y)", "rsqrt(2 * y)"),
        ("silu(y)", "relu(y)"),
        ("x.s[0]", "x.s[1]"),
        ("max(y, N)", "min(y, N)"),
    ],
)
@pytest.mark.parametrize("symbolic", [True, False])
def test_different(a, b, symbolic):
    proof = prove_texts(a, b, symbolic=symbolic)
    assert not proof
    assert str(proof).startswith("not equal: out[")


def test_programs_that_are_too_large_are_refused_at_once():
    wide = program("program p(x: bf16[M, (H=32 d=1024)], w: bf16[N, (H d)]) { return y = x @ w.T: bf16 }")
    with pytest.raises(CodaError, match="elements one by one"):
        prove(wide, wide)
    with pytest.raises(CodaError, match="elements one by one"):
        prove_gradients(differentiate(wide))


def test_programs_without_common_outputs():
    a, b = (program(f"program p(x: f32[M]) {{ return {n} = x: f32 }}") for n in ("y", "z"))
    with pytest.raises(CodaError, match="no output in common"):
        prove(a, b)


# Backwards.

GRADIENTS = [
    "x.s[0] * tanh(y) / r",
    "rms_norm(y, g, 1e-5)",
    "layer_norm(y, g, g, 1e-5)",
    "swiglu(x)",
    "exp(y - logsumexp(y, N))",
    "max(y * r, N) - min(y, N)",
    "where(y > r, y * y, -r)",
    "gelu_tanh(cast(y, bf16) @ v) * relu(r)",
    "r * (cast(y, bf16) @ v) + cast(x.s[1], bf16) @ v",
    "mean(maximum(y, r), N)",
    "softcap(y, 3) + clamp(y, -1, 1)",
    "pick(y, N, i) * sum(x, s)",
]


def backward_of(expression: str):
    head = "x: bf16[M, (s=2 N)], y: f32[M, N], r: f32[M], g: f32[N], v: bf16[N, K], i: i64[M]"
    return differentiate(program(f"program p({head}) {{ return out = {expression}: f32 }}"))


@pytest.mark.parametrize("expression", GRADIENTS)
def test_gradients(expression):
    assert prove_gradients(backward_of(expression))


@pytest.mark.parametrize("expression", GRADIENTS)
def test_a_wrong_gradient_is_found(expression):
    """Each gradient, off by a factor in one of its elements."""
    right = backward_of(expression)
    for o in right.backward.outputs:
        axis = o.type.axes[-1]
        off = build("eq", build("index", axis=axis), build("const", value=1, dtype=I64))
        wrong = expression_of("where(off, 1.5 * d, d)", off=off, d=o.value)
        wrong = build("cast", wrong, dtype=o.type.dtype, saturate=False)
        wrong = wrong if wrong.type.dims == o.type.dims else build("layout", wrong, dims=o.type.dims)
        outputs = [replace(x, value=wrong) if x is o else x for x in right.backward.outputs]
        proof = prove_gradients(replace(right, backward=right.backward.with_outputs(outputs)))
        assert not proof and "not equal" in str(proof), o.name


def test_opaque_calls_are_functions_of_all_their_operands():
    text = """extern f(x: bf16[M, D]) -> y: bf16[M, D]
        program p(x: bf16[M, D], r: f32[M]) { y = f(x); return out = r * y: f32 }"""
    assert prove(program(text), program(text.replace("r * y", "y * r")))
    assert not prove(program(text), program(text.replace("f(x);", "x;")))


CALLS = """
extern f(x: bf16[M, D], y: bf16[M, D]) -> z: bf16[M, D], s: f32[M]
extern f_backward(x: bf16[M, D], y: bf16[M, D], d_z: bf16[M, D], d_s: f32[M]) -> d_x: bf16[M, D], d_y: bf16[M, D]
program p(a: bf16[M, D], w: bf16[D, E]) {
    dim E = D
    b: bf16[M, E] = a @ w
    c, s = f(b, b)
    e: bf16[M, E] = s * c * b
    z, t = f(e, c)
    return out = z + c * t: bf16
}
"""


def test_gradients_through_opaque_calls():
    """Two calls of one function, the second behind the first, and operands that are read twice."""
    assert prove_gradients(differentiate(program(CALLS)))


@pytest.mark.parametrize("which", ["given", "returned"])
def test_a_wrong_gradient_at_an_opaque_call_is_found(which):
    """A call of the derivative with a gradient that is off, or whose result is taken for another."""
    right = differentiate(program(CALLS))

    def wrong(node, args):
        if node.op != "call" or "d_z" not in [name for name, _ in node.attr("callee").params]:
            return None
        if which == "given":
            d_z = build("cast", expression_of("1.5 * d", d=args[2]), dtype=args[2].dtype, saturate=False)
            return build("call", *args[:2], d_z, *args[3:], span=node.span, **dict(node.attrs))
        return build("call", *args, span=node.span, callee=node.attr("callee"), result=1 - node.attr("result"))

    proof = prove_gradients(replace(right, backward=rewrite(right.backward, wrong)))
    assert not proof and "not equal" in str(proof)
