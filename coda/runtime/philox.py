"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11) in torch.

The mapping is part of the language: ``rand(seed, offset, axes)`` at linear index ``i`` (row-major over the axes) is

    key     = (seed mod 2^32, seed / 2^32)
    counter = (i/4 mod 2^32, i/4 / 2^32, offset mod 2^32, offset / 2^32)        (seed, offset as unsigned 64-bit)
    word    = philox(counter, key)[i mod 4]
    value   = (word / 2^8) * 2^-24                                              in [0, 1), exact in f32

so four neighbours share one evaluation, and the value depends on neither tile, variant nor launch.
The counters are int64 tensors; torch has no unsigned 32x32 -> 64 product, so it is built from 16-bit halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW32 = 0xFFFFFFFF


def _mul_hi_lo(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32-bit constant times 32-bit values held in int64."""
    low = x * (multiplier & 0xFFFF)  # below 2^48
    high = x * (multiplier >> 16) + (low >> 16)  # below 2^49
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], rounds: int = 10) -> Tensor:
    """The block function: four 32-bit counters (int64 tensors of one shape) -> int64[..., 4] of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        hi0, lo0 = _mul_hi_lo(MULTIPLIERS[0], c0)
        hi1, lo1 = _mul_hi_lo(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & LOW32, (k1 + WEYL[1]) & LOW32
    return torch.stack((c0, c1, c2, c3), -1)


def uniform_at(seed: int, offset: int, position: Tensor) -> Tensor:
    """f32 uniform in [0, 1) at linear positions (int64), by the mapping above."""
    block = position >> 2
    words = philox4x32(
        (block & LOW32, block >> 32, torch.full_like(block, offset & LOW32),
         torch.full_like(block, (offset >> 32) & LOW32)),
        (seed & LOW32, (seed >> 32) & LOW32),
    )  # fmt: skip
    chosen = words.gather(-1, (position & 3).unsqueeze(-1)).squeeze(-1)
    return (chosen >> 8).float() * 2.0**-24


def uniform(seed: int, offset: int, sizes: list[int], device: torch.device | str | None = None) -> Tensor:
    """f32[*sizes] uniform in [0, 1) by the mapping above."""
    count = 1
    for size in sizes:
        count *= size
    block = torch.arange((count + 3) // 4, device=device)
    high = torch.full_like(block, (offset >> 32) & LOW32)
    words = philox4x32(
        (block & LOW32, block >> 32, torch.full_like(block, offset & LOW32), high),
        (seed & LOW32, (seed >> 32) & LOW32),
    )
    return ((words.reshape(-1)[:count] >> 8).float() * 2.0**-24).reshape(sizes)
