"""The programs of the language's description, interpreted, against the same mathematics in torch."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import coda
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs, small_sizes
from coda.runtime.philox import uniform
from coda.runtime.reference import evaluate
from tests.support import bf16, program, same


def run(text: str, *, exact: bool = False, consts: dict | None = None, dims: dict | None = None, **inputs):
    return tuple(evaluate(program(text, **(consts or {})), inputs, exact=exact, dims=dims).values())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_block_program_with_a_norm():
    text = """
    program mlp(x: bf16[M, D], gamma: bf16[D], w_gate: bf16[F, D], w_up: bf16[F, D], w_down: bf16[D, F],
                eps: f32 = 1e-5) {
        n = rms_norm(x, gamma, eps)
        y = silu(n @ w_gate.T) * (n @ w_up.T)
        return x + y @ w_down.T: bf16
    }
    """
    x, gamma, gate, up, down = bf16(5, 8), bf16(8), bf16(12, 8), bf16(12, 8), bf16(8, 12)
    (got,) = run(text, exact=True, x=x, gamma=gamma, w_gate=gate, w_up=up, w_down=down)
    eps = torch.tensor(1e-5).double()  # the parameter is f32
    n = F.rms_norm(x.double(), (8,), gamma.double(), float(eps))
    close(got, x.double() + (F.silu(n @ gate.double().T) * (n @ up.double().T)) @ down.double().T)


def test_layer_norm():
    text = """
    program ln(x: bf16[M, D], g: bf16[D], b: bf16[D], w: bf16[N, D], bias: bf16[N]?, eps: f32) {
        return layer_norm(x, g, b, eps, over=D) @ w.T + bias: bf16
    }
    """
    x, g, b, w = bf16(5, 8), bf16(8), bf16(8), bf16(3, 8)
    (got,) = run(text, exact=True, x=x, g=g, b=b, w=w, eps=2**-17)
    close(got, F.layer_norm(x.double(), (8,), g.double(), b.double(), 2**-17) @ w.double().T)


def test_qkv_with_norm_per_head_and_partial_rope():
    text = """
    program qkv(h: bf16[(B T), D], r: f32[(B T)], w: bf16[(G d=8), D], qg: f32[d]?, pos: i32[(B T)],
                cos: f32[P, f], sin: f32[P, f], const HQ, const HK, eps: f32) {
        dim G = HQ + 2*HK
        z = r * (h @ w.T)
        q, k, v = split(z, G = HQ | HK | HK)
        q = q * rsqrt(mean(q*q, d) + eps) * qg
        return rope_half(q, cos[pos], sin[pos]): bf16[B, HQ, T, d], k: bf16[B, HK, T, d], v: bf16[B, HK, T, d]
    }
    """
    batch, length, width, heads, groups, half = 2, 3, 16, 4, 2, 3
    h, w = bf16(batch, length, width), bf16((heads + 2 * groups) * 8, width)
    r, pos = torch.rand(batch, length), torch.randint(0, 9, (batch, length), dtype=torch.int32)
    cos, sin = torch.randn(9, half), torch.randn(9, half)
    sizes = {"HQ": heads, "HK": groups}
    q, k, v = run(
        text, exact=True, dims=sizes, h=h, r=r.flatten(), w=w, pos=pos.flatten(), cos=cos, sin=sin, eps=2**-20
    )
    z = (r.double()[..., None] * (h.double() @ w.double().T)).unflatten(-1, (-1, 8)).transpose(1, 2)
    want_q, want_k, want_v = z.split([heads, groups, groups], 1)
    want_q = want_q * (want_q.square().mean(-1, keepdim=True) + 2**-20).rsqrt()
    c, s = cos.double()[pos.long()][:, None], sin.double()[pos.long()][:, None]
    a, b, rest = want_q.split([half, half, 2], -1)
    close(q, torch.cat([a * c - b * s, b * c + a * s, rest], -1))
    close(k, want_k)
    close(v, want_v)


CE = """
program ce(x: bf16[M, D], w: bf16[V, D], label: i64[M], weight: f32[M]?, ignore: i64 = -100, zl: f32 = 0) {
    z = x @ w.T
    lse = logsumexp(z, V)
    nll = where(label != ignore, (lse - pick(z, V, label) + zl*lse*lse) * weight, 0)
    return nll: f32, lse: f32
}
"""


def test_cross_entropy():
    x, w, label = bf16(6, 8), bf16(11, 8), torch.tensor([0, 10, -100, 3, 3, -100])
    nll, lse = run(CE, exact=True, x=x, w=w, label=label)
    z = x.double() @ w.double().T
    close(nll, F.cross_entropy(z, label, reduction="none"))
    close(lse, z.logsumexp(1))


def test_cross_entropy_with_all_labels_ignored_is_zero():
    nll, _ = run(CE, x=bf16(3, 8), w=bf16(5, 8), label=torch.full((3,), -100))
    assert nll.tolist() == [0.0] * 3


def test_cross_entropy_gradient():
    text = """
    program ce_bwd(x: bf16[M, D], w: bf16[V, D], label: i64[M], lse: f32[M], g: f32[M], inout dw: f32[V, D],
                   ignore: i64 = -100) {
        z = x @ w.T
        dz = where(label != ignore, g*(exp(z - lse) - (index(V) == label)), 0)
        dw += cast(dz, bf16).T @ x
        return cast(dz, bf16) @ w: bf16
    }
    """
    x, w = bf16(6, 8).double().requires_grad_(), bf16(11, 8).double().requires_grad_()
    label, g = torch.tensor([0, 10, -100, 3, 3, -100]), torch.rand(6)
    z = x @ w.T
    (F.cross_entropy(z, label, reduction="none") * g).sum().backward()
    got = evaluate(
        program(text),
        {"x": x.detach().bfloat16(), "w": w.detach().bfloat16(), "label": label, "lse": z.detach().logsumexp(1).float(),
         "g": g, "dw": torch.ones(11, 8)},
        exact=True,
    )  # fmt: skip
    torch.testing.assert_close(got["dw"], w.grad + 1, rtol=1e-6, atol=1e-6)  # lse is handed over in f32
    (dx,) = (v for n, v in got.items() if n != "dw")
    torch.testing.assert_close(dx, x.grad, rtol=1e-6, atol=1e-6)


def test_block_scaled_quantisation_of_an_all_zero_block():
    text = """
    program quant(x: bf16[M, K], w: bf16[(nb c=4), K]) {
        y = x @ w.T
        s = where(max(abs(y), c) == 0, 1, max(abs(y), c) / 448)
        return cast(y / s, f8e4m3, saturate): f8e4m3, s: f32[M, nb]
    }
    """
    x, w = bf16(3, 8), bf16(8, 8)
    x[1] = 0
    values, scale = run(text, x=x, w=w)
    y = x.float() @ w.float().T
    amax = y.unflatten(1, (2, 4)).abs().amax(-1)
    assert same(scale, torch.where(amax == 0, 1.0, amax / 448))
    want = (y / scale.repeat_interleave(4, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(values.float(), want.float())
    assert values.float()[1].tolist() == [0.0] * 8


def test_a_paired_activation_and_its_backward():
    text = """
    program dswiglu(dy: bf16[M, D], wd: bf16[D, F], z: bf16[M, (s=2 F)], r: f32[M]) {
        da = dy @ wd;  g = z.s[0];  u = z.s[1];  p = sigmoid(g)
        dz = stack(da*u*p*(1 + g*(1 - p)), da*g*p, s)
        return r * dz: bf16[M, (s F)], g*p*u: bf16, sum(dz * z, (s F)): f32
    }
    """
    dy, wd, z, r = bf16(5, 6), bf16(6, 7), bf16(5, 14), torch.rand(5)
    scaled, activation, row = run(text, exact=True, dy=dy, wd=wd, z=z, r=r)
    leaf = z.double().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    out = F.silu(gate) * up
    out.backward(dy.double() @ wd.double())
    close(scaled, r.double()[:, None] * leaf.grad)
    close(activation, out.detach())
    close(row, (leaf.grad * z.double()).sum(1))


def test_interleaved_and_concatenated_pairs():
    """(s F) holds all gates, then all ups; (F s) alternates them."""
    halves = "program p(n: bf16[M, D], w: bf16[(s=2 F), D]) { z = n @ w.T; return silu(z.s[0]) * z.s[1]: bf16 }"
    pairs = halves.replace("(s=2 F)", "(F s=2)")
    n, w = bf16(3, 8), bf16(10, 8)
    interleaved = torch.stack([w[:5], w[5:]], 1).reshape(10, 8)
    assert same(run(halves, n=n, w=w)[0], run(pairs, n=n, w=interleaved)[0])


def test_dropout_is_philox_of_the_global_index():
    text = """
    program drop(o: bf16[M, A], w: bf16[D, A], x: bf16[M, D], seed: i64[], off: i64[], p: f32) {
        keep = rand(seed, off, [M, D]) >= p
        return x + where(keep, (o @ w.T) / (1 - p), 0): bf16
    }
    """
    o, w, x = bf16(16, 8), bf16(24, 8), bf16(16, 24)
    (got,) = run(text, o=o, w=w, x=x, seed=11, off=torch.tensor(5), p=0.5)
    keep = uniform(11, 5, [16, 24]) >= 0.5
    assert 0.3 < float(keep.float().mean()) < 0.7
    assert same(got, (x.float() + torch.where(keep, (o.float() @ w.float().T) / 0.5, 0.0)).bfloat16())
    (fewer,) = run(text, o=o[:7], w=w, x=x[:7], seed=11, off=5, p=0.5)
    assert same(fewer, got[:7])


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.coda"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_passes_its_own_gate(path):
    for example in coda.parse(path).programs.values():
        sizes = small_sizes(example)
        inputs = random_inputs(example, sizes)
        result = compare(example, inputs, evaluate(example, inputs, dims=sizes), dims=sizes)
        assert result.ok, f"{sizes}\n{result}"
