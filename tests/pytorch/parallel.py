"""A decoder of modules as torchtitan has them, and plans of tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from tests.pytorch.handwritten import LENGTH, SMALL, Output, Sizes


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.head, self.inner = sizes.head, Inner()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        q, k, v = (w(x).view(batch, length, -1, self.head) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = self.inner(*(z.transpose(1, 2) for z in (q, k, v)))
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat((-b, a), dim=-1) * sin[:, :, None]


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(sizes.width, eps=1e-5) for _ in range(2))
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin)
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    def __init__(self, layers: int = 1, sizes: Sizes = SMALL):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(sizes.width, eps=1e-5), nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 1e-4 ** torch.linspace(0, 1, sizes.head // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos()[None])
        self.register_buffer("sin", angles.sin()[None])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x, length = self.tokens(input_ids), input_ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:, :length], self.sin[:, :length])
        logits = self.head(self.norm(x))
        return Output(logits, F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))


# Plans: what happens to each module, by its path in a layer.


def without_sequence(model: nn.Module, mesh: Any) -> None:
    """Heads and inner columns over the ranks: q, k, v, gate and up by columns, o and down by rows."""
    plan: dict[str, Any] = {f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")}
    plan |= {f"feed_forward.{n}": ColwiseParallel() for n in ("w1", "w3")}
    plan |= {n: RowwiseParallel() for n in ("attention.wo", "feed_forward.w2")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def with_sequence(model: nn.Module, mesh: Any) -> None:
    """The plan of the tutorial and of torchtitan: between the products each rank has a part of the sequence, and q, k
    and v stay DTensors up to the attention."""
    rows = RowwiseParallel(output_layouts=Shard(1))
    heads = ColwiseParallel(use_local_output=False)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), Replicate(), Replicate()),
            desired_input_layouts=(Replicate(), Replicate(), Replicate()),
        ),
        "attention.wq": heads, "attention.wk": heads, "attention.wv": heads,
        "attention.inner": PrepareModuleInput(
            input_layouts=(Shard(1),) * 3, desired_input_layouts=(Shard(1),) * 3, use_local_output=True
        ),
        "attention.wo": rows,
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(), "feed_forward.w2": rows,
    }  # fmt: skip
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
