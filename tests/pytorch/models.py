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
from tests.pytorch.handwritten import LENGTH, SMALL, Sizes

tf = pytest.importorskip("transformers")

Builder = Callable[[], nn.Module]


def zoo(sizes: Sizes = SMALL, chosen: int = 2) -> dict[str, Builder]:
    """Models of two layers by name. Mixtures of four experts send a token to the ``chosen`` best."""
    width, inner, heads, head, vocabulary = sizes.width, sizes.inner, sizes.heads, sizes.head, sizes.vocabulary
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    decoder = {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": sizes.kv_heads, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    encoder = {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": heads,
        "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
    }  # fmt: skip
    gpt2 = {
        "vocab_size": vocabulary, "n_embd": width, "n_layer": 2, "n_head": heads, "n_positions": LENGTH,
        "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, **ends,
    }  # fmt: skip
    opt = {
        "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": heads,
        "ffn_dim": inner, "max_position_embeddings": LENGTH, "word_embed_proj_dim": width, "dropout": 0,
        "attention_dropout": 0,
    }  # fmt: skip
    t5 = {
        "vocab_size": vocabulary, "d_model": width, "d_kv": head, "d_ff": inner, "num_layers": 2, "num_heads": heads,
        "dropout_rate": 0, "decoder_start_token_id": 0,
    }  # fmt: skip
    deepseek = decoder | {
        "moe_intermediate_size": inner // 2, "num_key_value_heads": heads, "n_routed_experts": 4,
        "num_experts_per_tok": chosen, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": width // 2, "q_lora_rank": width // 2, "qk_rope_head_dim": head, "qk_nope_head_dim": head,
        "v_head_dim": head,
    }  # fmt: skip
    mixtral = decoder | {"num_local_experts": 4, "num_experts_per_tok": chosen}
    heads_of = {"head_dim": head}
    gemma = {**decoder, **heads_of, "query_pre_attn_scalar": head}
    return {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**decoder)),
        "llama_tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**decoder, tie_word_embeddings=True)),
        "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**decoder)),
        "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**decoder)),
        "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**decoder, **heads_of)),
        "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**gemma)),
        "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**gemma)),
        "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**decoder, **ends, pad_token_id=0)),
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**gpt2)),
        "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**gpt2, rotary_dim=head // 2)),
        "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**opt)),
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(vocab_size=vocabulary, **encoder)),
        "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(image_size=32, patch_size=8, **encoder)),
        "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**t5)),
        "t5_gated": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(**t5, initializer_factor=0.25, feed_forward_proj="gated-gelu")
        ),
        "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**mixtral)),
        "deepseek_v3": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**deepseek)),
        "deepseek_dense": lambda: tf.DeepseekV3ForCausalLM(
            tf.DeepseekV3Config(**deepseek | {"first_k_dense_replace": 2})
        ),
        "nanogpt": lambda: handwritten.NanoGPT(sizes=sizes),
        "titan": lambda: handwritten.Titan(sizes=sizes),
    }


BUILDERS = zoo()
BUILDERS["llama_heads"] = zoo(Sizes(512, 256, 512))["llama"]  # heads of 64 columns, as kernels take them


def tiny(name: str, dtype: torch.dtype, sizes: Sizes | None = None, routed: bool = True) -> nn.Module:
    """A model whose norm weights and biases are not those of its initialisation. Not ``routed``: every expert takes
    every token, so that none goes elsewhere where a router's input is rounded."""
    torch.manual_seed(0)
    model = (BUILDERS if sizes is None else zoo(sizes, 2 if routed else 4))[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(dtype)


def inputs(name: str, dtype: torch.dtype, batch: int = 2, length: int = 12) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(batch, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels.to(dtype), "labels": torch.arange(batch) % 2}
    ids = torch.randint(0, SMALL.vocabulary, (batch, length), generator=generator)
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
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")  # grouped products have no float64
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
