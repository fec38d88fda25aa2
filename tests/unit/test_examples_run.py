"""Every epilogue example, interpreted without rounding, against plain torch in float64. Backward examples are compared
with autograd of the forward they belong to."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import coda
from coda.cli import main
from coda.errors import CodaError
from coda.ir import Program
from coda.passes import derive
from coda.runtime.inputs import random_inputs, small_sizes
from coda.runtime.philox import uniform
from coda.runtime.reference import evaluate
from coda.target import lower
from coda.target.blocks import lower_program

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.coda"))


# Plain torch: operands as attributes (float64, integers as they are) -> the outputs in order.


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def residual(i) -> Tensor:
    return i.x + i.o @ i.w.T


def batched(i) -> Tensor:
    return i.x + (i.scale[:, None] * i.weight)[..., None] * (i.a @ i.w.mT + i.bias[:, None])


def gate_up(i, activation: Callable[[Tensor], Tensor]) -> Tensor:
    return activation(i.r[:, None] * (i.n @ i.w_gate.T)) * (i.r[:, None] * (i.n @ i.w_up.T))


def swiglu_stats(i):
    i.r = (i.stats.sum(0) / i.n.shape[1] + i.eps).rsqrt()
    return gate_up(i, F.silu), i.r


def halves(i, z: Tensor, interleaved: bool) -> Tensor:
    gate, up = (z[:, ::2], z[:, 1::2]) if interleaved else z.chunk(2, 1)
    return F.silu(gate) * up


def backward(z: Tensor, forward: Callable[[Tensor], Tensor], upstream: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of z, value) of an activation."""
    leaf = z.clone().requires_grad_()
    value = forward(leaf)
    (grad,) = torch.autograd.grad(value, leaf, upstream)
    return grad, value.detach()


def dswiglu(i):
    dz, a = backward(i.z, lambda z: F.silu(z.chunk(2, 1)[0]) * z.chunk(2, 1)[1], i.dy @ i.w_down)
    return i.r[:, None] * dz, a, (dz * i.z).sum(1)


def gpt_oss(i):
    z = i.x @ i.w.T + i.b
    gate, up = z[:, ::2].clamp(max=i.limit), z[:, 1::2].clamp(-i.limit, i.limit)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate),)


def dgelu(i):
    dz, _ = backward(i.z, F.gelu, i.dy @ i.w)
    return dz, dz.sum(0)


def swiglu_preact(i):
    z = torch.cat([i.r[:, None] * (i.n @ i.w_gate.T), i.r[:, None] * (i.n @ i.w_up.T)], 1)
    return halves(i, z, False), z


def from_one_weight(i, interleaved: bool):
    z = i.r[:, None] * (i.n @ i.w.T)
    return halves(i, z, interleaved), z


def cross_entropy(i, z: Tensor, **options):
    nll = F.cross_entropy(z, i.label.long(), reduction="none", **options)
    return nll, F.cross_entropy(z, i.label.long(), **options)


def weighted_tokens(i):
    z = i.x @ i.w.T
    lse, (nll, _) = z.logsumexp(1), cross_entropy(i, z)
    nll = (nll + i.zl * lse * lse) * i.weight
    return nll, lse, nll.mean()


def dlogits(i):
    """The kernel takes lse as it is given; here it is random, so the softmax is not normalised either."""
    return (i.g[:, None] * ((i.x @ i.w.T - i.lse[:, None]).exp() - F.one_hot(i.label, len(i.w))),)


def blocks(i):
    y = (i.x @ i.w.T).unflatten(1, (-1, 128))
    scale = y.abs().amax(-1) / 448
    return (y / scale[..., None]).flatten(1), scale


def keep(i, *shape: int) -> Tensor:
    return uniform(i.seed, i.offset, list(shape)) >= i.p


def heads(i, norm: bool, interleaved: bool = False):
    batch, length = i.h.shape[:2] if i.h.dim() == 3 else (i.sizes["B"], i.sizes["T"])
    z = (i.r[:, None] * (i.h.flatten(0, -2) @ i.w.T)).view(batch, length, -1, 128).transpose(1, 2)
    q, k, v = z.split([32, 8, 8], 1)
    if norm:
        q, k = F.rms_norm(q, (128,), i.qg, i.eps), F.rms_norm(k, (128,), i.kg, i.eps)
    cos, sin = (t[i.pos.long()].view(batch, 1, length, 64) for t in (i.cos, i.sin))

    def rotate(x: Tensor) -> Tensor:
        if interleaved:
            turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
            return torch.view_as_real(turned)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return rotate(q), rotate(k), v


def partly_rotated(i):
    """As transformers' apply_rotary_pos_emb on the first columns of each head, with the bias in the projection."""
    z = (i.h.flatten(0, -2) @ i.w.T + i.bias).view(i.sizes["B"], i.sizes["T"], -1, 80).transpose(1, 2)
    q, k, v = z.chunk(3, 1)
    cos, sin = (t[i.pos.long()].view(i.sizes["B"], 1, i.sizes["T"], 16).repeat(1, 1, 1, 2) for t in (i.cos, i.sin))

    def rotate(x: Tensor) -> Tensor:
        turned, rest = x[..., :32], x[..., 32:]
        a, b = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, rest], -1)

    return rotate(q), rotate(k), v


EXPECTED: dict[str, Callable] = {
    "linear": lambda i: (i.x @ i.w.T,),
    "linear_bias_gelu": lambda i: (gelu_tanh(i.x @ i.w.T + i.bias),),
    "linear_f16": lambda i: (i.x @ i.w.T + i.bias,),
    "linear_gpt2": lambda i: (gelu_tanh(i.x @ i.w + i.bias),),
    "batched_gated": lambda i: (
        F.silu(i.x @ i.w_gate.mT + i.b_gate[:, None]) * (i.x @ i.w_up.mT + i.b_up[:, None]),
    ),
    "batched_heads": lambda i: (torch.einsum("thr,hrd->thd", i.o, i.w),),
    "batched_linear": lambda i: (h := batched(i), h.square().sum(2), h.sum(1)),
    "lora": lambda i: (i.x @ i.w.T + i.h @ i.b.T,),
    "dgrad": lambda i: (i.dy @ i.w + i.dx_in,),
    "dgrad_gate_up": lambda i: (i.dg @ i.w_gate + i.du @ i.w_up,),
    "wgrad_accumulate": lambda i: (i.dw + i.dy.T @ i.x,),
    "bias_gradient": lambda i: (i.dy @ i.w.T, (i.dy @ i.w.T).sum(0)),
    "residual_stats": lambda i: (residual(i), residual(i).square().sum(1)),
    "residual_stats_aux": lambda i: (residual(i), residual(i) * i.gamma, residual(i).square().sum(1)),
    "residual_rstd": lambda i: (residual(i), (residual(i).square().mean(1) + i.eps).rsqrt()),
    "swiglu": lambda i: (gate_up(i, F.silu),),
    "swiglu_stats": swiglu_stats,
    "swiglu_preact": swiglu_preact,
    "swiglu_concatenated": lambda i: from_one_weight(i, False),
    "swiglu_interleaved": lambda i: from_one_weight(i, True),
    "geglu_tanh": lambda i: (gelu_tanh(i.x @ i.w_gate.T) * (i.x @ i.w_up.T),),
    "geglu_erf": lambda i: (F.gelu(i.x @ i.w_gate.T) * (i.x @ i.w_up.T),),
    "reglu": lambda i: (F.relu(i.x @ i.w_gate.T + i.b_gate) * (i.x @ i.w_up.T + i.b_up),),
    "gpt_oss_glu": gpt_oss,
    "relu2_mlp_up": lambda i: (F.relu(i.x @ i.w.T).square(), i.x @ i.w.T),
    "quick_gelu_mlp_up": lambda i: ((z := i.x @ i.w.T + i.b) * torch.sigmoid(1.702 * z),),
    "dswiglu": dswiglu,
    "dgeglu": lambda i: backward(i.z, lambda z: gelu_tanh(z.chunk(2, 1)[0]) * z.chunk(2, 1)[1], i.dy @ i.w_down),
    "dgelu": dgelu,
    "drelu2": lambda i: backward(i.z, lambda z: F.relu(z).square(), i.dy @ i.w),
    "layer_scale": lambda i: (i.x + i.gamma * (i.o @ i.w.T + i.b),),
    "residual_multiplier": lambda i: (i.x + i.multiplier * (i.o @ i.w.T),),
    "softcap_logits": lambda i: (i.cap * torch.tanh(i.x @ i.w.T / i.cap),),
    "cross_entropy": weighted_tokens,
    "cross_entropy_smooth": lambda i: cross_entropy(i, i.x @ i.w.T, label_smoothing=float(i.smoothing)),
    "cross_entropy_weighted": lambda i: cross_entropy(
        i, i.cap * torch.tanh(i.x @ i.w.T / i.cap), weight=i.class_weight
    ),
    "cross_entropy_dlogits": dlogits,
    "linear_cross_entropy": lambda i: (F.cross_entropy(i.x @ i.w.T, i.label),),
    "quantize_fp8": lambda i: ((i.x @ i.w.T / i.scale).clamp(-448, 448), (i.x @ i.w.T).abs().max()),
    "quantize_int8": lambda i: ((gelu_tanh(i.x @ i.w.T + i.bias) / i.scale).clamp(-128, 127).round(),),
    "quantize_blocks": blocks,
    "dropout_residual": lambda i: (i.x + torch.where(keep(i, *i.x.shape), i.o @ i.w.T / (1 - i.p), 0),),
    "dropout_residual_backward": lambda i: (
        dy := i.dz @ i.w, torch.where(keep(i, *dy.shape), dy / (1 - i.p), 0),
    ),
    "stochastic_depth": lambda i: (
        i.x + torch.where(keep(i, len(i.x))[:, None], i.o @ i.w.T / (1 - i.p), 0),
    ),
    "qk_norm": lambda i: heads(i, norm=True),
    "qkv_rope": lambda i: heads(i, norm=False),
    "qkv_rope_interleaved": lambda i: heads(
        SimpleNamespace(**vars(i) | {"w": i.w.flatten(0, -2)}), norm=False, interleaved=True
    ),
    "qkv_partial_rope": partly_rotated,
    "qkv_weights": lambda i: heads(SimpleNamespace(**vars(i), w=torch.cat([i.wq, i.wk, i.wv])), norm=True),
}  # fmt: skip


@lru_cache(maxsize=1)
def epilogue_examples() -> dict[str, Program]:
    """Examples that are one kernel. Those with several products are tested with the passes that cut them."""
    found = {}
    for path in EXAMPLES:
        for name, program in coda.parse(path).programs.items():
            try:
                lower(program)
            except CodaError:
                continue
            found[name] = program
    return found


def in_float64(program: Program, inputs: dict) -> SimpleNamespace:
    """Operands as torch wants them; a float scalar is the f32 that the program declares."""

    def convert(value):
        if isinstance(value, Tensor):
            return value.double() if value.is_floating_point() else value
        return torch.tensor(value).double() if isinstance(value, float) else value

    return SimpleNamespace(**{name: convert(value) for name, value in inputs.items()})


def test_every_epilogue_example_has_a_line_in_the_table():
    assert set(epilogue_examples()) == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example_is_what_torch_computes(name: str):
    program = epilogue_examples()[name]
    sizes = small_sizes(program)
    inputs = random_inputs(program, sizes, seed=1)
    if name == "cross_entropy_weighted":
        inputs["class_weight"] = inputs["class_weight"].abs()
    operands = in_float64(program, inputs)
    operands.sizes = sizes
    want = EXPECTED[name](operands)
    got = evaluate(program, inputs, exact=True, dims=sizes)
    assert len(got) == len(want)
    for (output, value), expected in zip(got.items(), want, strict=True):
        expected = expected.double().reshape(value.shape)
        torch.testing.assert_close(value.double(), expected, rtol=1e-8, atol=1e-9, msg=lambda m, o=output: f"{o}: {m}")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_has_a_comment_and_runs_from_the_command_line(path: Path, capsys):
    assert path.read_text().startswith("# ")
    if len(coda.parse(path).programs) == 1:
        assert main(["run", str(path), "--small", "--device", "cpu"]) == 0, capsys.readouterr().out


UNITS = [name for name in EXPECTED if "glu" in name or name.endswith("_mlp_up") or name == "linear_bias_gelu"]


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", UNITS)
def test_the_derived_backward_of_a_unit_is_kernels(name: str, memory: str):
    """Products, the gradients of both halves beside each other, and sums over the rows: no step is left to torch."""
    backward, _ = derive(epilogue_examples()[name], memory=memory)
    for program in (backward.forward, backward.backward):
        assert {"gemm"} <= {step.kind for step in lower_program(program).steps} <= {"gemm", "row", "map"}
