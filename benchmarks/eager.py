"""The items of models.py in torch, as a model would have them: what eager PyTorch runs, what torch.compile may fuse,
and on float64 operands the reference of all who compute the same.

Operands are ``a`` and ``b`` of the product, in the layout of the item, and what is computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from benchmarks.models import EPS, POSITIONS, Item, Model

Tensors = dict[str, Tensor]


def operands(item: Item, model: Model, rows: int, seed: int, device: str) -> Tensors:
    """Random operands in bf16; no zeros, which would run cooler and faster."""
    generator = torch.Generator(device).manual_seed(seed)
    m, n, k = item.product(model, rows)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(scale)

    layouts = {"nt": ((m, k), (n, k)), "nn": ((m, k), (k, n)), "tn": ((k, m), (k, n))}
    a, b = layouts[item.layout]
    found = {"a": normal(*a), "b": normal(*b, scale=k**-0.5)}
    more: dict[str, Callable[[], Tensor]] = {
        "residual": lambda: normal(m, n),
        "h": lambda: normal(m, n),
        "gamma": lambda: 1 + normal(n, scale=0.1),
        "r": lambda: 0.5 + torch.rand(m, generator=generator, device=device),
        "z": lambda: normal(m, 2 * n),
        "pos": lambda: torch.randint(POSITIONS, (m,), generator=generator, device=device, dtype=torch.int32),
        "cos": lambda: _angles(model, device).cos(),
        "sin": lambda: _angles(model, device).sin(),
        "label": lambda: torch.randint(n, (m,), generator=generator, device=device),
    }
    return found | {name: more[name]() for name in OPERANDS[item.name]}


def bare(item: Item) -> Callable[[Tensor, Tensor], Tensor]:
    """The product alone: cuBLAS."""
    return {
        "nt": lambda a, b: torch.matmul(a, b.T),
        "nn": torch.matmul,
        "tn": lambda a, b: torch.matmul(a.T, b),
    }[item.layout]


def math(item: Item, model: Model) -> Callable[..., Tensors]:
    """What the item computes: a function of its operands by name, to results by name."""
    return {
        "out_proj": residual_norm, "down": residual_norm, "gate_up": swiglu, "lm_head": loss,
        "qkv": lambda **x: qkv_rope(**x, model=model), "down_dgrad": swiglu_backward,
        "gate_up_dgrad": norm_backward, "qkv_dgrad": norm_backward,
    }.get(item.name, lambda a, b: {"y": bare(item)(a, b)})  # fmt: skip


OPERANDS: dict[str, tuple[str, ...]] = {
    "out_proj": ("residual", "gamma"), "down": ("residual", "gamma"), "gate_up": (), "lm_head": ("label",),
    "qkv": ("pos", "cos", "sin"), "down_dgrad": ("z",), "gate_up_dgrad": ("h", "gamma", "r", "residual"),
    "qkv_dgrad": ("h", "gamma", "r", "residual"), "out_proj_dgrad": (), "qkv_wgrad": (), "down_wgrad": (),
    "gate_up_wgrad": (), "out_proj_wgrad": (),
}  # fmt: skip


def residual_norm(a: Tensor, b: Tensor, residual: Tensor, gamma: Tensor) -> Tensors:
    h = residual + a @ b.T
    return {"h": h, "n": torch.rms_norm(h, h.shape[-1:], gamma, EPS)}


def swiglu(a: Tensor, b: Tensor, r: Tensor | None = None) -> Tensors:
    """The preactivation is kept for the backward. ``r``: a factor for each row, as of a norm that was delayed."""
    z = a @ b.T if r is None else (r[:, None] * (a @ b.T)).to(a.dtype)
    gate, up = z.chunk(2, -1)
    return {"y": silu(gate) * up, "z": z}


def qkv_rope(a: Tensor, b: Tensor, pos: Tensor, cos: Tensor, sin: Tensor, model: Model) -> Tensors:
    z = (a @ b.T).view(len(a), -1, model.head_dim)
    q, k, v = z.split([model.heads, model.kv_heads, model.kv_heads], 1)
    c, s = (torch.cat([t, t], -1)[pos][:, None].to(a.dtype) for t in (cos, sin))
    return {"q": q * c + rotate_half(q) * s, "k": k * c + rotate_half(k) * s, "v": v.contiguous()}


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def loss(a: Tensor, b: Tensor, label: Tensor) -> Tensors:
    logits = a @ b.T
    return {"loss": cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), label, reduction="none")}


def swiglu_backward(a: Tensor, b: Tensor, z: Tensor) -> Tensors:
    """The gradient of gate and up, and the activation again, which the gradient of the next weight needs."""
    dy = a @ b
    gate, up = z.chunk(2, -1)
    active, slope = silu(gate), torch.sigmoid(gate)
    dz = torch.cat([dy * up * slope * (1 + gate * (1 - slope)), dy * active], -1)
    return {"dz": dz, "y": active * up}


def norm_backward(a: Tensor, b: Tensor, h: Tensor, gamma: Tensor, r: Tensor, residual: Tensor) -> Tensors:
    """Of n = h*r*gamma, r = 1/rms(h); ``residual`` is the gradient that comes past the norm. In f32, as torch's own."""
    wide = torch.promote_types(h.dtype, torch.float32)
    dn, x, r = (a @ b).to(wide), h.to(wide), r.to(wide)[:, None]
    g = dn * gamma.to(wide)
    dh = r * g - x * r**3 * (g * x).mean(-1, keepdim=True)
    return {"dh": (residual.to(wide) + dh).to(h.dtype), "dgamma": (dn * x * r).sum(0).to(h.dtype)}


def _angles(model: Model, device: str) -> Tensor:
    half = model.head_dim // 2
    frequencies = 500000.0 ** (-torch.arange(half, device=device) / half)  # Llama 3's rope_theta
    return torch.outer(torch.arange(POSITIONS, device=device).float(), frequencies)


def relative_errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """``|got - want| / |want|`` (Frobenius) of each result that was computed; NaN where an element was not written."""
    return {name: ((got[name].double() - want[name]).norm() / want[name].norm()).item() for name in got}


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
