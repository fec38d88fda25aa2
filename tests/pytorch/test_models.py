"""Unmodified models of transformers: logits, loss and every gradient, and how many of their products are fused."""

from __future__ import annotations

import pytest
import torch

from tests.pytorch.models import check, exact, inputs, step, tiny

OPTIONS = {"inductor": False}
PRODUCTS = {  # fused / total; the classifier of ViT is a product by itself; those of experts are grouped
    "llama": (15, 15), "mistral": (15, 15), "qwen2": (15, 15), "qwen3": (15, 15), "gemma2": (15, 15), "phi3": (9, 9),
    "gpt2": (9, 9), "opt": (13, 13), "bert": (14, 14), "vit": (12, 13), "t5": (33, 33), "t5_gated": (37, 37),
    "gemma3": (15, 15), "gptj": (13, 13), "mixtral": (11, 11), "deepseek_v3": (18, 18),
    "deepseek_dense": (17, 17), "nanogpt": (9, 9), "titan": (15, 15),
}  # fmt: skip
SLOW = (
    "mistral", "qwen2", "t5", "t5_gated", "vit", "opt", "gemma3", "gptj", "mixtral", "deepseek_v3", "deepseek_dense"
)  # fmt: skip
ROUTED = ("mixtral", "deepseek_v3")


def train(name: str, dtype: torch.dtype, reports, **options):
    model, given = tiny(name, dtype), inputs(name, dtype)
    want, eager = exact(model, given), step(model, model, given)
    compiled = torch.compile(model, backend="coda", options={**OPTIONS, **options})
    check(step(compiled, model, given), eager, want)
    return sum(len(r.fused) for r in reports), sum(len(r.lines) for r in reports)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PRODUCTS])
def test_training_in_bf16(name, reports):
    if name == "t5":  # a ReLU that flips near 0 is all of the error, eager's or ours: one run says nothing
        pytest.skip("t5_gated has no kink")
    if name in ROUTED:  # a token goes to other experts for a rounding: the errors of one run say nothing
        pytest.skip("in f32 no token is that near")
    assert train(name, torch.bfloat16, reports) == PRODUCTS[name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "llama" else pytest.mark.slow) for n in PRODUCTS])
def test_training_in_f32(name, reports):
    assert train(name, torch.float32, reports) == PRODUCTS[name]


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_eager_rounding(name, reports):
    assert train(name, torch.bfloat16, reports, numerics="eager") == PRODUCTS[name]


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_inference(name, reports):
    model, given = tiny(name, torch.bfloat16).eval(), inputs(name, torch.bfloat16)
    with torch.no_grad():
        want = tiny(name, torch.bfloat16).eval().double()(**given).logits
        eager = model(**given).logits
        got = torch.compile(model, backend="coda", options=OPTIONS)(**given).logits
    assert (got - want).norm() <= 2 * (eager - want).norm()
    assert all(text.count("return") == 1 and "kept" not in text for r in reports for text in r.texts)
