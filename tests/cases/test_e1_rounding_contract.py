"""E1: fused and eager differ in where they round, and both are defined."""

import torch
import torch.nn.functional as F

import coda
from coda.runtime.compare import compare
from tests.support import bf16

TEXT = """
program chain(x: bf16[M, K], w: bf16[N, K], bias: bf16[N], r: bf16[M, N]) {
    return gelu_tanh(x @ w.T + bias) * 0.7 + r: bf16
}
"""


def test_e1_eager_numerics_are_those_of_addmm_and_the_chain_after_it():
    x, w = (torch.randint(-15, 16, s).bfloat16() for s in ((33, 24), (40, 24)))  # products are exact in f32
    bias, r = bf16(40), bf16(33, 40)
    eager = coda.compile(TEXT, numerics="eager")(x, w, bias, r)
    want = F.gelu(torch.addmm(bias, x, w.T), approximate="tanh") * 0.7 + r
    assert torch.equal(eager, want)
    fused = coda.compile(TEXT)(x, w, bias, r)
    assert not torch.equal(fused, want)
    z = x.float() @ w.float().T + bias.float()
    assert torch.equal(fused, (F.gelu(z, approximate="tanh") * 0.7 + r.float()).bfloat16())


def test_e1_fused_is_no_less_accurate():
    f = coda.compile(TEXT)
    inputs = {"x": bf16(33, 64), "w": bf16(40, 64), "bias": bf16(40), "r": bf16(33, 40)}
    result = compare(f.program, inputs, {f.program.outputs[0].name: f(**inputs)})
    (error,) = result.outputs
    assert error.error < error.eager_error
