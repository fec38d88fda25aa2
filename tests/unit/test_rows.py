"""Row and map kernels: their lowering, their generated code on the host, and what they mean, against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coda.cli import rowview
from coda.errors import CodaError
from coda.ir import Program
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target.emit_rows import row_source
from coda.target.rows import lower_rows
from tests.programs import behind_attention, row_examples
from tests.rowmath import HostRows, compile_rows
from tests.support import program

SIZES = {"B": 2, "T": 3, "H": 2, "M": 5, "P": 7, "N": 6, "K": 3, "HQ": 4, "HK": 2}

# More of what the kernels know, by what it is for.
SPECIAL = {
    "map": "program p(x: bf16[M, N], y: f32[M, N], b: bf16[N]?) { return silu(x) * y + b: bf16 }",
    "broadcast": "program p(r: f32[M], c: bf16[N], s: f32 = 2.0) { return s * r + c: f32 }",
    "transposed": "program p(x: bf16[M, N]) { return y = 2 * x: bf16[N, M], s = sum(x, N): f32 }",
    "three_dims": "program p(x: f32[B, T, D], g: f32[D]) { return y = x * rsqrt(mean(x * x, D)) * g: f16 }",
    "group": "program p(x: bf16[M, (H D)]) { return y = x - max(x, (H D)): bf16, m = min(x, (H D)): f32 }",
    "bias_of_heads": "program p(dy: bf16[(B T), (H d=8)]) { return s = sum(dy, (B T)): f32 }",
    "transposed_heads": "program p(dy: bf16[B, H, T, d=8]) { return x = layout(dy, [(B T), (H d)]): bf16 }",
    "heads": "program p(x: bf16[(B T), (H D)], g: bf16[D]) { return x * rsqrt(mean(x * x, D)) * g: bf16[B, H, T, D] }",
    "lanes": "program p(z: bf16[M, (s=2 F)]) { return y = silu(z.s[0]) * z.s[1]: bf16, t = sum(z * z, (s F)): f32 }",
    "lanes_out": "program p(a: f32[M, F], b: f32[M, F]) { return z = stack(a + b, a - b, s): bf16[M, (F s)] }",
    "totals": "program p(x: bf16[M, N]) { return sum(x * x, (M N)): f32, c = mean(x, M): bf16, m = max(x, M): f32 }",
    "row_total": "program p(x: bf16[M, N]) { return mean(logsumexp(x, N), M): f32 }",
    "logsumexp": "program p(x: f32[M, N]) { return c = logsumexp(x, M): f32, t = logsumexp(x, (M N)): f32,\n"
    "r = logsumexp(logsumexp(x, N), M): f32, n = logsumexp(sum(x, N), M): f32 }",
    "logsumexp_kept": "program p(x: bf16[B, T, D]) { return s = logsumexp(x, T): f32, m = logsumexp(x, (T D)): f32 }",
    "logsumexp_of_heads": "program p(x: f32[(B T), (H d=16)], g: f32[d]) { y = g * x * rsqrt(mean(x * x, d))\n"
    "return y: bf16, s = logsumexp(y, (H d)): f32, t = logsumexp(y, (B T H)): f32 }",
    "counted": "program p(x: f32[(B T), (H d)]) { return s = sum(x, (B T)) * index(H) + index(d): f32 }",
    "counted_rows": "program p(x: f32[B, T, (H d)]) { return t = max(x, T) * index(B) + index(d): f32[B, (H d)] }",
    "kept_transposed": "program p(x: f32[B, T, D]) {\n"
    "return t = max(x, T) + index(D): f32[D, B], s = sum(x, T): f32[D, B] }",
    "finished": "program p(h: bf16[M, D], s: partial[sum, D] f32[M], g: f32[D]) {\n"
    "r = rsqrt(finish(s) / size(D))\n return n = h * r * g: bf16, r: f32 }",
    "finished_groups": "program p(h: bf16[(B T), D], s: partial[max, D] f32[(B T)], t: partial[sum, D] f32[B]) {\n"
    "y = h * finish(s) + finish(t)\n return y: f32[B, D, T], z = sum(y, D): f32 }",
    "pick": "program p(z: bf16[M, V], label: i64[M]) { return logsumexp(z, V) - pick(z, V, label): f32 }",
    "index": "program p(x: f32[M, N]) { return where(index(N) <= index(M), x, 0): f32 }",
    "sizes": "program p(x: f32[M, N]) { return x / size(M) + sum(x, N) / size(N): f32 }",
    "accumulated": "program p(x: bf16[M, N], inout y: f32[M, N], inout s: f32[N]) { y += x\n s += sum(x, M)\n }",
    "partial_rope": "program p(q: bf16[M, H, d=24], c: f32[M, f=8], s: f32[M, f]) {\n"
    "return rope_half(q, c, s): bf16[M, H, d] }",
    "dropout": "program p(x: bf16[(B T), D], seed: i64[], offset: i64[], p: f32) {\n"
    "return where(rand(seed, offset, [B, T, D]) >= p, x / (1 - p), 0): bf16 }",
    "drop_rows": "program p(x: f32[M, N], seed: i64[], offset: i64[]) {\n"
    "y = where(rand(seed, offset, [M]) >= 0.5, x, 0)\n return y: f32, s = sum(y, N): f32 }",
    "pairs": "program p(x: bf16[B, H, T, (f p=2)], c: f32[T, f], z: f32[(B T), (H f p)]) {\n"
    "y = rope_interleaved(x, c, 0.5)\n return y: bf16[(B T), (H f p)], s = sum(y * z, (H f p)): f32 }",
    "axis_kept": "program p(x: bf16[B, T, D]) { return s = sum(x, T): f32, m = mean(x, (T D)): bf16, z = 2 * x: f16 }",
    "bias_behind_rope": "program p(x: bf16[B, H, T, d=16], c: f32[T, f=8], inout b: f32[(H d)]) {\n"
    "y = rope_half(x, c, c)\n b += sum(y, (B T))\n return y: f32, g = sum(y, (B T H)): bf16 }",
    "head_sums": "program p(x: bf16[M, (H d=16)], g: f32[d]) { y = g * x * rsqrt(mean(x * x, d))\n"
    "return y: bf16, s = sum(y * y, (H d)) / size(M): f32, t = sum(y, (M H d)): f32 }",
    "two_sets": "program p(x: bf16[M, N], y: bf16[M, K]) { return z = 2 * x: f32, w = silu(y): bf16,\n"
    "r = mean(x, N) + max(y, K): f32 }",
    "concatenated": "program p(x: bf16[M, H, d], y: f32[M, P, d]) {\n"
    "return z = concat(x, 2 * y, G = H | P): bf16[M, (G d)] }",
    "last_token": "program p(x: bf16[(B T), N], g: f32[N]) {\n dim one = 1\n"
    "y = part(x * rsqrt(mean(x * x, N)) * g, T, 2, one)\n return y = y.one[0]: bf16[B, N] }",
    "kept_twice": "program p(x: f32[M, N]) { c = x - mean(x, N)\n v = mean(c * c, N)\n"
    "return y = c * rsqrt(v): f32, k = mean(c * c * c * c, N) / (v * v): f32 }",
}


def special(name: str) -> Program:
    return program(SPECIAL[name])


PROGRAMS = {**row_examples(), **{name: special(name) for name in SPECIAL}, **behind_attention()}


@pytest.fixture(scope="module")
def compiled() -> dict[str, HostRows]:
    return dict(zip(PROGRAMS, compile_rows([lower_rows(p) for p in PROGRAMS.values()]), strict=True))


def sizes_of(p: Program, width: int) -> dict[str, int]:
    counted = {s.name for n in p.nodes() if n.op == "size" for s in n.attr("expr").free_symbols}
    return {name: SIZES.get(name, width) for name in [*(a.name for a in p.free_axes), *counted]}


@pytest.mark.parametrize("width", [1, 8, 24, 37])
@pytest.mark.parametrize("name", PROGRAMS)
def test_generated_code_agrees_with_the_interpreter(name: str, width: int, compiled: dict[str, HostRows]) -> None:
    host, p = compiled[name], PROGRAMS[name]
    sizes = sizes_of(p, width)
    for optional in (True, False):
        inputs = random_inputs(p, sizes, 1, "cpu", optional=optional)
        want = evaluate(p, inputs, dims=sizes)
        for octets in (16, 0) if host.plan.variants[-1].octets == 0 else (16,):
            got = host(inputs, octets, sizes)
            for output in want:
                close = {"rtol": 2e-2 if want[output].dtype != torch.float32 else 2e-5, "atol": 1e-5}
                torch.testing.assert_close(got[output], want[output], **close, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_strides(data: st.DataObject, compiled: dict[str, HostRows]) -> None:
    """Operands transposed, sliced, or expanded: the launcher's strides, run by the generated code."""
    name = data.draw(st.sampled_from(["rms_norm_row", "map", "heads", "drms_norm", "lanes"]))
    p = PROGRAMS[name]
    sizes = sizes_of(p, 24)
    inputs = random_inputs(p, sizes, 1, "cpu")
    for key, x in inputs.items():
        if isinstance(x, Tensor) and x.dim() == 2:
            how = data.draw(st.sampled_from(["as it is", "transposed", "columns", "rows", "one row"]))
            wide = torch.cat([x, x], 1)
            inputs[key] = {
                "as it is": x, "transposed": x.T.contiguous().T, "columns": wide[:, : x.shape[1]],
                "rows": torch.cat([x, x])[::2], "one row": x[:1].expand(x.shape),
            }[how]  # fmt: skip
    want = evaluate(p, inputs, dims=sizes)
    got = compiled[name](inputs, dims=sizes)
    for output in want:
        torch.testing.assert_close(got[output], want[output], rtol=2e-2, atol=1e-4)


# -- what they mean --------------------------------------------------------------------------------------------------


def in_float64(name: str, sizes: dict[str, int]) -> tuple[dict, dict[str, Tensor]]:
    """Operands in float64, and the outputs of the interpreter without rounding."""
    p = PROGRAMS[name]
    inputs = random_inputs(p, sizes, 3, "cpu")
    exact = evaluate(p, inputs, exact=True, dims=sizes)
    return {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}, exact


def test_norms_are_those_of_torch() -> None:
    x, out = in_float64("rms_norm_row", {"M": 5, "D": 24})
    torch.testing.assert_close(out["y"], F.rms_norm(x["x"], (24,), x["gamma"], 1e-5), rtol=1e-6, atol=1e-6)
    x, out = in_float64("layer_norm_row", {"M": 5, "D": 24})
    want = F.layer_norm(x["x"], (24,), x["gamma"], x["beta"], 1e-5)
    torch.testing.assert_close(out["y"], want, rtol=1e-6, atol=1e-6)
    x, out = in_float64("softmax_row", {"M": 5, "V": 33})
    torch.testing.assert_close(out["p"], x["x"].softmax(1))
    x, out = in_float64("gemma_post_norm", {"M": 5, "D": 24})
    normed = F.rms_norm(x["y"], (24,), 1 + x["gamma"], 1e-6)
    torch.testing.assert_close(out["h"], x["x"] + normed, rtol=1e-6, atol=1e-6)


def test_backward_of_rms_norm_is_autograd() -> None:
    x, _ = in_float64("drms_norm", {"M": 5, "D": 24})
    leaf, gamma = x["x"].requires_grad_(), x["gamma"].requires_grad_()
    F.rms_norm(leaf, (24,), gamma, 0.0).backward(x["dy"])
    rstd = leaf.detach().square().mean(1).rsqrt()
    out = evaluate(PROGRAMS["drms_norm"], _stored(x, rstd=rstd), exact=True)
    torch.testing.assert_close(out["dx"], leaf.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["dgamma"], gamma.grad, rtol=1e-5, atol=1e-5)


def test_backward_of_layer_norm_is_autograd() -> None:
    x, _ = in_float64("dlayer_norm", {"M": 5, "D": 24})
    leaf, gamma = x["x"].requires_grad_(), x["gamma"].requires_grad_()
    beta = torch.zeros(24, dtype=torch.float64, requires_grad=True)
    F.layer_norm(leaf, (24,), gamma, beta, 0.0).backward(x["dy"])
    value = leaf.detach()
    stored = _stored(x, mean=value.mean(1), rstd=value.var(1, correction=0).rsqrt())
    out = evaluate(PROGRAMS["dlayer_norm"], stored, exact=True)
    for got, want in (("dx", leaf.grad), ("dgamma", gamma.grad), ("dbeta", beta.grad)):
        torch.testing.assert_close(out[got], want, rtol=1e-5, atol=1e-5)


def rotated(z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = z.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("name", ["drope", "dqk_norm"])
def test_backward_behind_attention_is_autograd(name: str) -> None:
    sizes = {"B": 2, "T": 3, "H": 2, "P": 7}
    x, out = in_float64(name, sizes)
    tables = [x[t][x["pos"].long()].view(2, 3, 1, 64) for t in ("cos", "sin")]
    z = (x["z"] if name == "dqk_norm" else torch.randn(6, 256, dtype=torch.float64)).view(2, 3, 2, 128)
    z.requires_grad_()
    if name == "dqk_norm":
        norms = z.detach().square().mean(-1).rsqrt()
        q = rotated(F.rms_norm(z, (128,), x["gamma"], 0.0), *tables)
        out = evaluate(PROGRAMS[name], _stored(x, rq=norms.view(6, 2)), exact=True, dims=sizes)
    else:
        q = rotated(z, *tables)
    q.backward(x["dq"].transpose(1, 2))
    torch.testing.assert_close(out["dz"], z.grad.reshape(6, 256), rtol=1e-5, atol=1e-5)


def test_backward_of_a_whole_projection_is_autograd() -> None:
    sizes = {"B": 2, "T": 3, "P": 7}
    x, out = in_float64("dqkv", sizes)
    tables = [x[t][x["pos"].long()].view(2, 3, 1, 64) for t in ("cos", "sin")]
    r = x["r"].detach().requires_grad_()
    acc = (x["z"] / x["r"][:, None]).requires_grad_()
    q, k, v = (r[:, None] * acc).view(2, 3, 48, 128).split([32, 8, 8], 2)
    loss = sum((y * x[name].transpose(1, 2)).sum() for name, y in
               (("dq", rotated(q, *tables)), ("dk", rotated(k, *tables)), ("dv", v)))  # fmt: skip
    loss.backward()
    torch.testing.assert_close(out["d_acc"], acc.grad)
    torch.testing.assert_close(out["dr"], r.grad)


def _stored(values: dict, **more: Tensor) -> dict:
    """Operands as the program declares them again."""
    stored = {k: x.detach() if isinstance(x, Tensor) else x for k, x in (values | more).items()}
    kept = {"rstd", "mean", "rq", "cos", "sin"}
    return {
        k: x if not (isinstance(x, Tensor) and x.is_floating_point()) else x.float() if k in kept else x.bfloat16()
        for k, x in stored.items()
    }


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", row_examples())
def test_lowering_of_examples(name: str, golden) -> None:
    plan = lower_rows(PROGRAMS[name])
    golden(f"lowering/{name}/plan.txt", "\n".join(rowview.text(plan)) + "\n")
    golden(f"lowering/{name}/kernels.cu", row_source(plan))


def test_axes_are_one_loop_where_they_lie_in_one_run() -> None:
    plan = lower_rows(program("program p(x: bf16[(B T), (H d)], y: bf16[(B T), (H d)]) { return x + y: bf16 }"))
    (part,) = plan.parts
    assert [[a.name for a in level] for level in part.levels] == [["B", "T"]]
    assert [[a.name for a in space] for space in part.spaces] == [["H", "d"]]


def test_a_map_is_a_row_kernel_without_reductions() -> None:
    assert lower_rows(special("map")).kind == "map"
    assert lower_rows(special("three_dims")).kind == "row"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("program p(x: f32[M, (H d)]) { return x * sum(x, d) + sum(x, (H d)): f32 }", "a second kernel"),
        ("program p(x: f32[B, T, D]) { return s = sum(x, T): f32, r = sum(x, B): f32 }", "keep different rows"),
        ("program p(x: f32[M, N]) { return x - mean(x, M): f32 }", "a second kernel"),
        ("program p(x: i64[M, N]) { return sum(x, N): i64 }", "a reduction of integers"),
        ("program p(x: f32[M, N]) { return partial(sum(x, N)): f32 }", "finishes its reductions"),
        (
            "program p(x: f32[T, N]) { dim one = 1\n y = 2 * x\n return y: f32, z = part(y, T, 2, one): f32 }",
            "who knows",
        ),
        ("program p(t: f32[P], i: i32[M, D]) { return t[i]: f32 }", "a position of its own for each column"),
    ],
)
def test_what_cannot_be_lowered_says_why(text: str, why: str) -> None:
    with pytest.raises(CodaError, match=why):
        lower_rows(program(text))
