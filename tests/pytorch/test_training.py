"""What training loops do: autocast, checkpointing, adapters, frozen and tied weights, packed sequences."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from coda.passes import partition
from coda.pytorch.block import block
from tests.pytorch.handwritten import NanoGPT, Titan, TitanBlock, frequencies, with_lora
from tests.pytorch.models import (
    agrees,
    check,
    compiled,
    exact,
    gradients_agree,
    inputs,
    step,
    tiny,
)

GIVEN = inputs("titan", torch.float32)


def fused(reports) -> tuple[int, int]:
    return sum(len(r.fused) for r in reports), sum(len(r.lines) for r in reports)


# Autocast.


def under_autocast(call, dtype):
    def run(**given):
        with torch.autocast("cpu", dtype):
            return call(**given)

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [False, True])  # of what is compiled: then it is in the graph
def test_autocast(dtype, inside, reports):
    model = tiny("titan", torch.float32)
    want, eager = exact(model, GIVEN), step(under_autocast(model, dtype), model, GIVEN)
    call = compiled(under_autocast(model, dtype)) if inside else under_autocast(compiled(model), dtype)
    got = step(call, model, GIVEN)
    check(got, eager, want)
    assert got.logits.dtype is eager.logits.dtype is dtype
    assert fused(reports) == (15, 15)
    assert all("cast(w" not in text for r in reports for text in r.texts)  # each weight is converted once


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "gemma2"))])
def test_autocast_of_transformers(name, reports):
    model, given = tiny(name, torch.float32), inputs(name, torch.float32)
    want, eager = exact(model, given), step(under_autocast(model, torch.bfloat16), model, given)
    check(step(under_autocast(compiled(model), torch.bfloat16), model, given), eager, want)
    assert fused(reports)[0] == fused(reports)[1]


def test_autocast_is_left_and_entered_again():
    """A part in f32 inside a region of autocast, a sum that autocast does in f32, a join of two dtypes."""
    torch.manual_seed(0)
    first, second = nn.Linear(32, 48), nn.Linear(96, 32)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.gelu(first(x))
            with torch.autocast("cpu", enabled=False):
                z = F.silu(first(x))
            h = second(torch.cat([y, z], -1))
        return h, (z + 1).sum(-1)

    x = torch.randn(4, 5, 32)
    with torch.no_grad():
        got, want = compiled(call)(x), call(x)
    for a, b in zip(got, want, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("ambient", [False, True])
def test_what_autocast_cannot_reach_stays_as_it_is(ambient, reports):
    """A branch is a graph of its own: the whole stays with torch, which casts in it."""
    linear = nn.Linear(32, 32)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cond(x.sum() > 0, lambda x: F.gelu(linear(x)), lambda x: linear(x), (x,))

    x = torch.randn(4, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=ambient):
        got, want = compiled(inside)(x), inside(x)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got, want)
    assert not any(r.fused for r in reports)


def test_autocast_around_backward():
    """The gradients of a compiled step do not depend on where backward is called."""
    model = tiny("titan", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = step(compiled(model), model, GIVEN)
    after = step(under_autocast(compiled(model), torch.bfloat16), model, GIVEN)
    for name, gradient in after.gradients.items():
        assert torch.equal(gradient, inside.gradients[name])


def test_half_precision(reports):
    agrees(tiny("titan", torch.float16), GIVEN)
    assert fused(reports) == (15, 15)


# Modes without gradients.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(mode, reports):
    model = tiny("titan", torch.float32)
    call = compiled(model)
    with mode():
        torch.testing.assert_close(call(**GIVEN).logits, model(**GIVEN).logits, rtol=1e-4, atol=1e-5)
    assert all('"wrt": []' in options for r in reports for options in r.options)
    agrees(model, GIVEN, call)  # and then it is trained


# Activation checkpointing.


class Checkpointed(Titan):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def body(self, h):
        for layer in self.layers:
            h = checkpoint(layer, h, self.cis, **self.how)
        return h


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_fused(reentrant, reports):
    torch.manual_seed(0)
    agrees(Checkpointed(use_reentrant=reentrant), GIVEN)
    assert fused(reports) == (15, 15)


def test_checkpointed_under_autocast(reports):
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant=False)
    want, eager = exact(model, GIVEN), step(under_autocast(model, torch.bfloat16), model, GIVEN)
    check(step(under_autocast(compiled(model), torch.bfloat16), model, GIVEN), eager, want)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_of_transformers(reentrant, reports):
    model = tiny("llama", torch.float32).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    agrees(model, inputs("llama", torch.float32))
    assert fused(reports)[0] == 14  # lm_head is behind a graph break


# Gradients that add up, weights that want none.


def test_gradients_accumulate_over_two_steps():
    model = tiny("titan", torch.float32)
    call, batches = compiled(model), [inputs("titan", torch.float32, 2, n) for n in (12, 9)]
    found = []
    for run in (model, call):
        for given in batches:
            run(**given).loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
    want, got = found
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-5)


def test_tied_weights():
    agrees(tiny("nanogpt", torch.float32), GIVEN)


@pytest.mark.slow
def test_tied_weights_of_transformers():
    agrees(tiny("llama_tied", torch.float32), inputs("llama", torch.float32))


def test_i4_frozen_weights():
    model = tiny("titan", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("wq", "w3", "ffn_norm", "head")))
    agrees(model, GIVEN)


def test_i1_two_backwards_and_untouched_inputs():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    x = torch.randn(3, 16, requires_grad=True)
    before = x.detach().clone()
    y = compiled(model)(x)
    seed = torch.randn_like(y)
    kept = seed.clone()
    first = torch.autograd.grad(y, x, seed, retain_graph=True)[0]
    second = torch.autograd.grad(y, x, seed)[0]
    assert torch.equal(first, second) and torch.equal(x, before) and torch.equal(seed, kept)


def test_i2_the_gradient_of_a_residual_is_untouched():
    norm, linear = nn.RMSNorm(32), nn.Linear(32, 32)
    model = nn.ModuleList([norm, linear])

    def call(x):
        y = norm(x)
        return linear(y) + y + x

    gradients_agree(call, torch.randn(4, 5, 32, requires_grad=True), model=model)


# Adapters.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora(dtype, reports):
    torch.manual_seed(0)
    agrees(with_lora(tiny("titan", dtype)), GIVEN)
    assert fused(reports) == (27, 27)


def test_lora_is_one_region(reports):
    base, a, b = nn.Linear(32, 48, bias=False), nn.Linear(32, 4, bias=False), nn.Linear(4, 48, bias=False)
    base.weight.requires_grad_(False)
    model = nn.ModuleList([base, a, b])
    x = torch.randn(4, 5, 32, requires_grad=True)
    gradients_agree(lambda x: F.silu(base(x) + 2.0 * b(a(x))), x, model=model)
    assert len(reports[-1].fused) == 3 and len(reports[-1].texts) == 1


def test_lora_is_a_second_accumulation(reports):
    base, a, b = (nn.Linear(i, o, bias=False).bfloat16() for i, o in ((32, 48), (32, 8), (8, 48)))
    compiled(lambda x: F.silu(base(x) + 2.0 * b(a(x))))(torch.randn(4, 5, 32).bfloat16())
    (text,), (options,) = reports[-1].texts, reports[-1].options
    kernels = partition(block(text, options).forward).kernels
    assert [len(k.group.dots) for k in kernels] == [1, 2]


# Dtypes and positions.


class WideNorm(nn.Module):
    """A norm with a weight in f32 in a model in bf16."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return (F.rms_norm(x.float(), x.shape[-1:], eps=1e-6) * self.weight).to(x.dtype)


def test_f4_norm_weights_in_f32(reports):
    model = tiny("titan", torch.bfloat16)
    for layer in model.layers:
        layer.attention_norm, layer.ffn_norm = WideNorm(64), WideNorm(64)
    agrees(model, GIVEN)
    assert fused(reports) == (15, 15)
    assert ": f32[N]" in reports[-1].texts[0]


class Packed(Titan):
    """Several sequences in one row, each with positions from 0."""

    def forward(self, input_ids, labels, positions):
        self.cis = frequencies(16)[positions[0]]
        return super().forward(input_ids, labels)


def test_g7_packed_sequences(reports):
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    agrees(Packed(), {**inputs("titan", torch.float32, 1), "positions": positions})
    assert fused(reports) == (15, 15)


@pytest.mark.slow
def test_g7_packed_sequences_of_transformers(reports):
    given = inputs("llama", torch.float32, 2)
    given["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12).clone()
    agrees(tiny("llama", torch.float32), given)
    assert fused(reports) == (15, 15)


def test_one_block_by_itself(reports):
    """Compiled block by block, as FSDP users do: the chain is cut at the edges, and all the same it is fused."""
    torch.manual_seed(0)
    model = Titan()
    twin = copy.deepcopy(model)
    for layer in twin.layers:
        layer.compile(backend="coda", options={"inductor": False})
    want = exact(model, GIVEN)
    check(step(twin, twin, GIVEN), step(model, model, GIVEN), want)
    assert fused(reports) == (7, 7)  # one graph for both


def test_nanogpt_and_titan_blocks_are_whole(reports):
    """What is between two attentions is one region."""
    compiled(TitanBlock())(torch.randn(2, 7, 64), frequencies(16))
    assert len(reports[-1].texts) == 2
    compiled(NanoGPT())(**GIVEN)
    assert len(reports[-1].texts) == 3
