"""coda-kernels as published (PyPI 0.2): of its operations those that run without its unreleased Llama blocks. Gate and
up lie in alternate columns, as do the pairs that RoPE rotates; neither applies 1/rms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks import eager
from benchmarks.candidates import Candidate
from benchmarks.models import Item, Model
from benchmarks.peers.quack import compile_ahead, gated, interleave, tuned

__all__ = ["compile_ahead", "offer"]


def offer(item: Item, model: Model) -> Iterator[Candidate]:
    from coda.core.gemm import functional  # coda-kernels, not this project

    def swiglu(x: Mapping[str, Tensor]) -> Any:
        return functional.gemm_swiglu(x["a"], x["weight"].T)

    def rope(x: Mapping[str, Tensor]) -> Any:
        return functional.gemm_rope(x["a"], x["b"].T, x["pos"], x["frequencies"])

    def loss(x: Mapping[str, Tensor]) -> Any:
        return functional.gemm_lse_select_logits(x["a"], x["b"].T, x["label"], ignore_index=-100, return_lse=False)[0]

    if item.name == "gate_up":
        yield from tuned("coda-kernels", functional._gemm_swiglu_tuned, swiglu, gated, interleave, _swiglu)
    elif item.name == "qkv":
        yield from tuned("coda-kernels", functional._gemm_rope_tuned, rope, lambda got, _: {"qkv": got},
                         lambda x: _frequencies(x, model), _rope)  # fmt: skip
    elif item.name == "lm_head":
        tuner = functional._gemm_lse_select_logits_tuned
        yield from tuned("coda-kernels", tuner, loss, lambda got, _: {"loss": got},
                         lambda x: {**x, "label": x["label"].int()}, _loss)  # fmt: skip


def _swiglu(a: Tensor, b: Tensor, weight: Tensor, r: Tensor) -> Mapping[str, Tensor]:
    return eager.swiglu(a, b)


def _loss(a: Tensor, b: Tensor, label: Tensor) -> Mapping[str, Tensor]:
    return eager.loss(a, b, label.long())


def _frequencies(x: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """The frequency of each column, 0 where nothing is rotated. Positions stay small: it takes fast sines."""
    half = model.head_dim // 2
    one = 500000.0 ** (-torch.arange(half, device=x["a"].device) / half)
    rotated = one.repeat_interleave(2).repeat(model.heads + model.kv_heads)
    still = torch.zeros(model.head_dim * model.kv_heads, device=one.device)
    return {"a": x["a"], "b": x["b"], "pos": x["pos"] % 64, "frequencies": torch.cat([rotated, still])}


def _rope(a: Tensor, b: Tensor, pos: Tensor, frequencies: Tensor) -> Mapping[str, Tensor]:
    """Neighbouring columns are a pair, turned backwards."""
    z = (a @ b.T).unflatten(-1, (-1, 2))
    angle = (pos[:, None] * frequencies[::2]).to(torch.promote_types(a.dtype, torch.float32))
    c, s = angle.cos().to(a.dtype), angle.sin().to(a.dtype)
    x, y = z[..., 0], z[..., 1]
    return {"qkv": torch.stack([x * c + y * s, y * c - x * s], -1).flatten(1)}
