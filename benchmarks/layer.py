"""What lies between two attentions of a Llama, in torch: the program ``llama_layer`` of blocks.coda as a model would
have it, with gate and up, and q, k and v, as one product each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.eager import rotate_half
from benchmarks.models import EPS, POSITIONS, Model

DIFFERENTIABLE = ("o", "x", "w_o", "gamma_mlp", "w_gate_up", "w_down", "gamma_attn", "w_qkv")
RESULTS = ("out", "q", "k", "v")
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Ops:
    """The operations between the products."""

    add_norm: Callable[[Tensor, Tensor, Tensor], Pair]  # addend, residual, gamma: their sum, and its norm
    swiglu: Callable[[Tensor], Tensor]  # of gate and up side by side
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], Pair]  # q, k, cos, sin


def forward(x: dict[str, Tensor], model: Model, ops: Ops) -> tuple[Tensor, ...]:
    h, n = ops.add_norm(x["o"] @ x["w_o"].T, x["x"], x["gamma_mlp"])
    out, m = ops.add_norm(ops.swiglu(n @ x["w_gate_up"].T) @ x["w_down"].T, h, x["gamma_attn"])
    heads = (m @ x["w_qkv"].T).view(len(m), -1, model.head_dim)
    q, k, v = heads.split([model.heads, model.kv_heads, model.kv_heads], 1)
    return out, *ops.rope(q, k, x["c"], x["s"]), v


def _add_norm(addend: Tensor, residual: Tensor, gamma: Tensor) -> Pair:
    h = residual + addend
    return h, torch.rms_norm(h, h.shape[-1:], gamma, EPS)


def _swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return silu(gate) * up


def _rope(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Pair:
    c, s = c[:, None], s[:, None]
    return q * c + rotate_half(q) * s, k * c + rotate_half(k) * s


TORCH = Ops(_add_norm, _swiglu, _rope)


def liger() -> Ops:
    """Liger's functions, which must be importable."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    def add_norm(addend: Tensor, residual: Tensor, gamma: Tensor) -> Pair:
        n, h = LigerFusedAddRMSNormFunction.apply(addend, residual, gamma, EPS, 0.0, "llama", False)
        return h, n

    def rope(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Pair:
        q, k = LigerRopeFunction.apply(q[None].transpose(1, 2), k[None].transpose(1, 2), c[None], s[None])
        return q.transpose(1, 2)[0], k.transpose(1, 2)[0]

    return Ops(add_norm, LigerFusedGateUpSiLUMulFunction.apply, rope)


def operands(model: Model, rows: int, seed: int, device: str) -> dict[str, Tensor]:
    """Random weights and activations in bf16, the rotary tables as f32 with positions (pos, cos, sin) and gathered for
    both halves (c, s), and gradients of the results."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(scale)

    def weight(n: int, k: int) -> Tensor:
        return normal(n, k, scale=k**-0.5)

    half, d = model.head_dim // 2, model.d
    pos = torch.randint(POSITIONS, (rows,), generator=generator, device=device, dtype=torch.int32)
    angles = torch.outer(
        torch.arange(POSITIONS, device=device).float(), 500000.0 ** (-torch.arange(half, device=device) / half)
    )
    cos, sin = angles.cos(), angles.sin()
    return {
        "o": normal(rows, d), "x": normal(rows, d), "w_o": weight(d, d), "gamma_mlp": 1 + normal(d, scale=0.1),
        "w_gate_up": weight(2 * model.ffn, d), "w_down": weight(d, model.ffn), "gamma_attn": 1 + normal(d, scale=0.1),
        "w_qkv": weight(model.qkv, d), "pos": pos, "cos": cos, "sin": sin,
        "c": torch.cat([cos, cos], -1)[pos.long()].bfloat16(), "s": torch.cat([sin, sin], -1)[pos.long()].bfloat16(),
        "d_out": normal(rows, d), "d_q": normal(rows, model.heads, model.head_dim),
        "d_k": normal(rows, model.kv_heads, model.head_dim), "d_v": normal(rows, model.kv_heads, model.head_dim),
    }  # fmt: skip
