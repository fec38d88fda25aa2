"""Decoders as people write them: in the style of nanoGPT, and of torchtitan with its complex rotary embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 128  # positions


@dataclass(frozen=True)
class Sizes:
    """Of a model: as small as tests like them."""

    vocabulary: int = 96
    width: int = 64
    inner: int = 112
    heads: int = 4
    kv_heads: int = 2

    @property
    def head(self) -> int:
        return self.width // self.heads


SMALL = Sizes()
WIDE = Sizes(vocabulary=512, width=512, inner=1024, heads=8, kv_heads=2)  # heads of 64 columns, as kernels take them


@dataclass
class Output:
    """What models of transformers return, as far as the tests read it."""

    logits: Tensor
    loss: Tensor


class Decoder(nn.Module):
    """Token embedding, layers, norm, head, loss."""

    def __init__(self, sizes: Sizes, layers: list[nn.Module], norm: nn.Module, tied: bool):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers, self.norm = nn.ModuleList(layers), norm
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.norm(self.body(self.embed(input_ids))))
        return Output(logits, F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))


# nanoGPT: a fused projection of q, k and v, LayerNorm, GELU, learnt positions, tied weights.


class NanoBlock(nn.Module):
    def __init__(self, sizes: Sizes = SMALL) -> None:
        super().__init__()
        width, self.heads = sizes.width, sizes.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.0)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(width, dim=2)
        k = k.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        q = q.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        return self.dropout(self.c_proj(y))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.dropout(self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)))))


class NanoGPT(Decoder):
    def __init__(self, layers: int = 2, sizes: Sizes = SMALL) -> None:
        super().__init__(sizes, [NanoBlock(sizes) for _ in range(layers)], nn.LayerNorm(sizes.width), tied=True)
        self.positions = nn.Embedding(LENGTH, sizes.width)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))


# torchtitan: RMSNorm, rotary embeddings as products of complex numbers, a gated unit.


def frequencies(head: int) -> Tensor:
    angles = torch.outer(torch.arange(LENGTH), 1.0 / 10000.0 ** (torch.arange(0, head, 2).float() / head))
    return torch.polar(torch.ones_like(angles), angles)


def rotate(q: Tensor, k: Tensor, cis: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    b = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    cis = cis[: a.shape[1]].view(1, a.shape[1], 1, a.shape[-1])
    q, k = (torch.view_as_real(x * cis).flatten(3).type_as(like) for x, like in ((a, q), (b, k)))
    return q, k


class TitanBlock(nn.Module):
    def __init__(self, sizes: Sizes = SMALL) -> None:
        super().__init__()
        width, self.head, self.repeats = sizes.width, sizes.head, sizes.heads // sizes.kv_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, sizes.kv_heads * self.head, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, sizes.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.inner, width, bias=False)

    def attention(self, x: Tensor, cis: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, k, cis)
        k, v = (y.repeat_interleave(self.repeats, dim=2) for y in (k, v))
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))

    def forward(self, x: Tensor, cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cis)
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))


class Titan(Decoder):
    def __init__(self, layers: int = 2, sizes: Sizes = SMALL) -> None:
        norm = nn.RMSNorm(sizes.width, eps=1e-5)
        super().__init__(sizes, [TitanBlock(sizes) for _ in range(layers)], norm, tied=False)
        self.cis = frequencies(sizes.head)

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h, self.cis.to(h.device))
        return h


# Adapters, as peft writes them.


class Lora(nn.Module):
    """A linear with a frozen weight and a product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16.0):
        super().__init__()
        self.base_layer, self.scaling = base.requires_grad_(False), alpha / rank
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        )  # fmt: skip
        nn.init.normal_(self.lora_B.weight, std=1 / math.sqrt(rank))
        self.lora_dropout = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling
        return result.to(dtype)


def with_lora(model: nn.Module, names: tuple[str, ...] = ("wq", "wv", "w2", "c_proj")) -> nn.Module:
    """The model with all weights frozen and adapters beside some linears, in place."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                setattr(module, name, Lora(child).to(child.weight.dtype))
    return model
