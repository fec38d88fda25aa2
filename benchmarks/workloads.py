"""What is measured: the programs of ``programs.coda``, each beside the same math in torch.

The torch functions are written as a model would have them, so that eager torch rounds where eager torch rounds and
``torch.compile`` may fuse what it can. They serve three ends: compiled they are a competitor, eager they set the error
gate, and on float64 inputs they are the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

PROGRAMS = Path(__file__).with_name("programs.coda")
POSITIONS = 8192
SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 28672, 4096), (8192, 6144, 4096))


@dataclass(frozen=True)
class Workload:
    """A program by name, its operands in order, and the same math in torch."""

    name: str
    operands: tuple[str, ...]
    math: Callable[..., tuple[Tensor, ...]]
    columns: int | None = None  # measured at this N only

    def at(self, n: int) -> bool:
        return self.columns in (None, n)


def _gemm(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (x @ w.T,)


def _bias_gelu(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (gelu(x @ w.T + bias, approximate="tanh"),)


def _residual_stats(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    h = residual + x @ w.T
    return h, _sum_of_squares(h)


def _residual_stats_aux(x: Tensor, w: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    h = residual + x @ w.T
    return h, h * gamma, _sum_of_squares(h)


def _swiglu(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    return _swiglu_preact(x, w, r)[:1]


def _swiglu_preact(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    z = (r[:, None] * (x @ w.T)).to(x.dtype)
    gate, up = z.chunk(2, dim=1)
    return silu(gate) * up, z


def _qkv_rope(x: Tensor, w: Tensor, r: Tensor, pos: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Llama 3's 32 heads of q, 8 of k and v, 128 columns each; q and k rotated by halves."""
    z = (r[:, None] * (x @ w.T)).to(x.dtype).view(-1, 48, 128)
    q, k, v = z.split([32, 8, 8], 1)
    c, s = cos[pos][:, None].to(x.dtype), sin[pos][:, None].to(x.dtype)
    return _rotate(q, c, s), _rotate(k, c, s), v.contiguous()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _sum_of_squares(h: Tensor) -> Tensor:
    wide = h if h.dtype == torch.float64 else h.float()
    return (wide * wide).sum(-1)


WORKLOADS = {
    w.name: w
    for w in (
        Workload("gemm", ("x", "w"), _gemm),
        Workload("bias_gelu", ("x", "w", "bias"), _bias_gelu),
        Workload("residual_stats", ("x", "w", "residual"), _residual_stats),
        Workload("residual_stats_aux", ("x", "w", "residual", "gamma"), _residual_stats_aux),
        Workload("swiglu", ("x", "w", "r"), _swiglu),
        Workload("swiglu_preact", ("x", "w", "r"), _swiglu_preact),
        Workload("qkv_rope", ("x", "w", "r", "pos", "cos", "sin"), _qkv_rope, columns=48 * 128),
    )
}


def operands(m: int, n: int, k: int, seed: int, device: str) -> dict[str, Tensor]:
    """One set of random operands for every workload of a shape; no zeros, which would run cooler and faster."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    frequencies = 500000.0 ** (-torch.arange(64, device=device) / 64)  # Llama 3's rope_theta
    angles = torch.outer(torch.arange(POSITIONS, device=device).float(), frequencies)
    return {
        "x": normal(m, k),
        "w": normal(n, k, scale=k**-0.5),
        "residual": normal(m, n),
        "bias": normal(n),
        "gamma": 1 + normal(n, scale=0.1),
        "r": 0.5 + torch.rand(m, generator=generator, device=device),
        "pos": torch.randint(POSITIONS, (m,), generator=generator, device=device, dtype=torch.int32),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def relative_errors(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> list[float]:
    """``|got - want| / |want|`` (Frobenius) for each output; NaN where an element was left unwritten.

    Row statistics may come as partials, one row of values for each tile column; their sum is what is compared.
    """
    errors = []
    for g, w in zip(got, want, strict=True):
        total = g.double().sum(0) if g.dim() == w.dim() + 1 else g.double()
        errors.append(((total - w).norm() / w.norm()).item())
    return errors
