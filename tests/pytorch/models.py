"""Tiny models of transformers with random weights, and what a training step of them gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pytorch import handwritten

tf = pytest.importorskip("transformers")

VOCABULARY, WIDTH, INNER = 96, 64, 112
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
ENCODER = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip

WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}  # heads of 64 columns, as kernels take them
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 128, "resid_pdrop": 0,
    "embd_pdrop": 0, "attn_pdrop": 0,
}  # fmt: skip
OPT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": INNER,
    "max_position_embeddings": 128, "word_embed_proj_dim": WIDTH, "dropout": 0, "attention_dropout": 0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": INNER, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0, "decoder_start_token_id": 0,
}  # fmt: skip

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER)),
    "llama_heads": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER | WIDE)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**DECODER)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**DECODER)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**DECODER, head_dim=16)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**DECODER, head_dim=16, query_pre_attn_scalar=16)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**DECODER, head_dim=16, query_pre_attn_scalar=16)),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**GPT2, rotary_dim=8)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**DECODER, pad_token_id=0)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**OPT)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(vocab_size=VOCABULARY, **ENCODER)),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(image_size=32, patch_size=8, **ENCODER)),
    "t5_gated": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(**T5, initializer_factor=0.25, feed_forward_proj="gated-gelu")
    ),
    "nanogpt": handwritten.NanoGPT,
    "titan": handwritten.Titan,
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
}


def tiny(name: str, dtype: torch.dtype) -> nn.Module:
    """A model whose norm weights and biases are not those of its initialisation."""
    torch.manual_seed(0)
    model = BUILDERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(dtype)


def inputs(name: str, dtype: torch.dtype, batch: int = 2, length: int = 12) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(batch, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels.to(dtype), "labels": torch.arange(batch) % 2}
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Step:
    """Logits, loss and gradients of one training step."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def step(call: Callable[..., Any], model: nn.Module, given: dict[str, Any]) -> Step:
    model.zero_grad()
    out = call(**given)
    out.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step(out.logits.detach(), out.loss.detach(), gradients)


def exact(model: nn.Module, given: dict[str, Any]) -> Step:
    """The step in float64, from the same rounded weights."""
    double = copy.deepcopy(model).double()
    return step(double, double, {k: v.double() if v.is_floating_point() else v for k, v in given.items()})


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm())


def check(got: Step, eager: Step, want: Step, factor: float = 2.0) -> None:
    """Each result is within ``factor`` times eager's error against float64. What is 0 in exact arithmetic, the gradient
    of a bias of keys, is compared with the largest gradient."""
    dtype = want.logits.dtype if eager.logits.dtype is torch.float64 else eager.logits.dtype
    eps = torch.finfo(dtype).eps
    scale = max(float(g.norm()) for g in want.gradients.values())
    assert error(got.logits, want.logits) <= factor * error(eager.logits, want.logits) + eps * float(want.logits.norm())
    assert error(got.loss, want.loss) <= factor * error(eager.loss, want.loss) + eps * abs(float(want.loss))
    assert got.gradients.keys() == want.gradients.keys()
    for name, exact_gradient in want.gradients.items():
        allowed = factor * error(eager.gradients[name], exact_gradient) + eps * 1e-2 * scale
        assert error(got.gradients[name], exact_gradient) <= allowed, name


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A model or function compiled by the backend: options of torch.compile and of coda, without Inductor."""
    dynamo = {k: options.pop(k) for k in ("dynamic", "fullgraph") if k in options}
    return torch.compile(model, backend="coda", options={"inductor": False, **options}, **dynamo)


def agrees(model: nn.Module, given: dict[str, Any], call: Callable[..., Any] | None = None) -> None:
    """A training step agrees with float64."""
    want, eager = exact(model, given), step(model, model, given)
    check(step(compiled(model) if call is None else call, model, given), eager, want)


def gradients_agree(call: Callable[..., Tensor], *leaves: Tensor, model: nn.Module | None = None) -> None:
    """A function and its compiled form give the same results and gradients in f32."""
    wanting = [x for x in (*leaves, *(model.parameters() if model else ())) if x.requires_grad]
    want, got = call(*leaves), compiled(call)(*leaves)
    seed = torch.randn_like(want)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, wanting, seed), torch.autograd.grad(want, wanting, seed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
