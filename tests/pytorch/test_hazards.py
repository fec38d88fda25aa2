"""What real models and training loops do to a backend."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.pytorch.models import DECODER, check, exact, inputs, step, tf, tiny


def compiled(model, **options):
    dynamo = {k: options.pop(k) for k in ("dynamic", "fullgraph") if k in options}
    return torch.compile(model, backend="coda", options={"inductor": False, **options}, **dynamo)


def agrees(model: nn.Module, given: dict, call=None) -> None:
    want, eager = exact(model, given), step(model, model, given)
    check(step(compiled(model) if call is None else call, model, given), eager, want)


def gradients_agree(call, *leaves: Tensor, model=None) -> None:
    """A function and its compiled form give the same results and gradients in f32."""
    wanting = [x for x in (*leaves, *(model.parameters() if model else ())) if x.requires_grad]
    want, got = call(*leaves), compiled(call)(*leaves)
    seed = torch.randn_like(want)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, wanting, seed), torch.autograd.grad(want, wanting, seed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# L1, L4: shapes and graphs.


@pytest.mark.parametrize("dynamic", [None, True])  # True makes numbers like eps symbolic in the first of two calls
def test_l1_two_graphs_for_all_lengths(dynamic, reports):
    model = tiny("llama", torch.float32)
    call = compiled(model, dynamic=dynamic)
    with torch.no_grad():
        for length in (7, 9, 16, 17, 33, 40):
            given = inputs("llama", torch.float32, 2, length)
            torch.testing.assert_close(call(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-5)
    assert len(reports) <= 2
    if dynamic is None:  # M is symbolic: the same programs in both graphs
        assert len(reports) == 2 and len({text for r in reports for text in r.texts}) == 3


@pytest.mark.parametrize(("batch", "length"), [(1, 9), (1, 1), (3, 1)])
def test_one_row_or_one_sequence(batch, length):
    model, given = tiny("llama", torch.float32), inputs("llama", torch.float32, batch, length)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_l4_fullgraph(name):
    model, given = tiny(name, torch.bfloat16), inputs(name, torch.bfloat16)
    agrees(model, given, compiled(model, fullgraph=True))


@pytest.mark.slow
def test_inductor_runs_the_rest():
    model, given = tiny("llama", torch.float32), inputs("llama", torch.float32)
    agrees(model, given, compiled(model, inductor=True))


# Training loops.


def test_checkpointed_layers_are_fused(reports):
    model = tiny("llama", torch.float32).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    agrees(model, inputs("llama", torch.float32))
    assert sum(len(r.fused) for r in reports) == 14  # lm_head is behind a graph break


def test_tied_weights():
    torch.manual_seed(0)
    agrees(tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER, tie_word_embeddings=True)), inputs("llama", torch.float32))


def test_i4_frozen_weights():
    model = tiny("llama", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("q_proj", "up_proj", "model.norm")))
    agrees(model, inputs("llama", torch.float32))


def test_lora_is_one_region(reports):
    base, a, b = nn.Linear(32, 48, bias=False), nn.Linear(32, 4, bias=False), nn.Linear(4, 48, bias=False)
    base.weight.requires_grad_(False)
    model = nn.ModuleList([base, a, b])
    x = torch.randn(4, 5, 32, requires_grad=True)
    gradients_agree(lambda x: nn.functional.silu(base(x) + 2.0 * b(a(x))), x, model=model)
    assert len(reports[-1].fused) == 3 and len(reports[-1].texts) == 1


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


# Memory.


def test_a_view_of_a_matched_tensor_is_written(reports):
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)

    def call(x):
        y = nn.functional.gelu(first(x))
        z = y.view(-1, 32)
        h = second(y)
        z.mul_(2)
        return h + y

    with torch.no_grad():
        x = torch.randn(4, 5, 32)
        torch.testing.assert_close(compiled(call)(x), call(x))
    assert "written in place" in str(reports[-1])


def test_an_input_and_a_buffer_are_written():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("scale", torch.ones(32))

        def forward(self, x):
            self.scale.add_(1)
            y = nn.functional.gelu(self.linear(x * self.scale))
            x.add_(1)
            return y + x

    model = Counter()
    twin = copy.deepcopy(model)
    a = torch.randn(4, 5, 32)
    b = a.clone()
    torch.testing.assert_close(compiled(twin)(b), model(a))
    assert torch.equal(a, b) and torch.equal(model.scale, twin.scale)


# Shapes of weights.


def test_a_square_weight_with_a_residual():
    model = nn.Linear(32, 32, bias=False)
    gradients_agree(lambda x: torch.relu(x + model(x)), torch.randn(4, 5, 32, requires_grad=True), model=model)


@pytest.mark.parametrize("turned", [True, False])
def test_functions_without_a_module(turned, reports):
    x, b = torch.randn(4, 32, requires_grad=True), torch.randn(48)
    w = torch.randn(*((48, 32) if turned else (32, 48)), requires_grad=True)
    gradients_agree(lambda x, w, b: nn.functional.gelu(x @ (w.T if turned else w) + b), x, w, b)
    assert ("@ w.T" in reports[-1].texts[0]) == turned


# What is refused, and how.


def test_autocast_is_left_to_inductor(reports):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU())
    x = torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert "autocast" in reports[-1].unfused[0].reason


def test_f9_unknown_options_are_errors():
    model = nn.Linear(4, 4)
    with pytest.raises(Exception, match=r"(?s)no option 'numeric'.*did you mean 'numerics'"):
        compiled(model, numeric="eager")(torch.randn(2, 4))
    with pytest.raises(Exception, match=r"(?s)numerics='fast'.*it is 'fused' or 'eager'"):
        compiled(model, numerics="fast")(torch.randn(2, 4))


@pytest.mark.parametrize("name", ["tune", "fuse_loss"])
def test_f9_options_of_a_later_release_are_errors(name):
    with pytest.raises(Exception, match=f"{name}=True of backend 'coda' comes in a later release"):
        compiled(nn.Linear(4, 4), **{name: True})(torch.randn(2, 4))


def test_fallback_error_names_what_is_not_fused():
    with pytest.raises(Exception, match="nothing to fuse with it"):
        compiled(nn.Linear(4, 4), fallback="error")(torch.randn(2, 4))


def test_float64_is_left_alone(reports):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU()).double()
    x = torch.randn(3, 16).double()
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert not reports[-1].fused
