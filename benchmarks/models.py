"""The models whose sizes are measured, and the products of one of their layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EPS = 1e-5
POSITIONS = 8192


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama. ``d`` is the width of the residual stream and of what attention returns."""

    name: str
    d: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the axes of blocks.coda, but for the rows M."""
        return {"A": self.d, "D": self.d, "F": self.ffn, "P": POSITIONS, "V": self.vocab}

    @property
    def consts(self) -> dict[str, int]:
        """Values of the const parameters of blocks.coda."""
        return {"HQ": self.heads, "HK": self.kv_heads, "f": self.head_dim // 2}


MODELS = {
    m.name: m
    for m in (
        Model("Llama-3-8B", 4096, 14336, 32, 8, 128, 128256),
        Model("Llama-3-1B", 2048, 8192, 32, 8, 64, 128256),
    )
}


@dataclass(frozen=True)
class Item:
    """A product of a layer and all that is computed around it. ``product`` gives its M, N and K for a model and a
    number of rows; ``layout`` which operands lie transposed: ``nt`` is x[M, K] @ w[N, K].T as in a forward, ``nn`` is
    dy[M, K] @ w[K, N] as in the gradient of an input, ``tn`` is dy[K, M].T @ x[K, N] as in that of a weight."""

    name: str
    phase: str
    layout: str
    product: Callable[[Model, int], tuple[int, int, int]]


ITEMS = {
    i.name: i
    for i in (
        Item("out_proj", "forward", "nt", lambda m, rows: (rows, m.d, m.d)),
        Item("gate_up", "forward", "nt", lambda m, rows: (rows, 2 * m.ffn, m.d)),
        Item("down", "forward", "nt", lambda m, rows: (rows, m.d, m.ffn)),
        Item("qkv", "forward", "nt", lambda m, rows: (rows, m.qkv, m.d)),
        Item("lm_head", "forward", "nt", lambda m, rows: (rows, m.vocab, m.d)),
        Item("qkv_dgrad", "backward", "nn", lambda m, rows: (rows, m.d, m.qkv)),
        Item("down_dgrad", "backward", "nn", lambda m, rows: (rows, m.ffn, m.d)),
        Item("gate_up_dgrad", "backward", "nn", lambda m, rows: (rows, m.d, 2 * m.ffn)),
        Item("out_proj_dgrad", "backward", "nn", lambda m, rows: (rows, m.d, m.d)),
        Item("qkv_wgrad", "backward", "tn", lambda m, rows: (m.qkv, m.d, rows)),
        Item("down_wgrad", "backward", "tn", lambda m, rows: (m.d, m.ffn, rows)),
        Item("gate_up_wgrad", "backward", "tn", lambda m, rows: (2 * m.ffn, m.d, rows)),
        Item("out_proj_wgrad", "backward", "tn", lambda m, rows: (m.d, m.d, rows)),
    )
}
