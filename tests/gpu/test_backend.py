"""torch.compile(model, backend="coda") on the device: kernels against float64, no build for a new length."""

from __future__ import annotations

import pytest
import torch

from coda.nn import functional
from coda.pytorch.block import block
from coda.pytorch.execute import steps
from coda.pytorch.op import bound_calls
from coda.pytorch.report import listening
from tests.pytorch.handwritten import WIDE
from tests.pytorch.models import check, exact, inputs, step, tiny

pytestmark = pytest.mark.gpu
OPTIONS = {"inductor": False}


def on_gpu(given: dict) -> dict:
    return {k: v.cuda() for k, v in given.items()}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_training_step_of_llama():
    """The programs of a block run as kernels; what is not lowered yet says why, and is right all the same."""
    model, given = tiny("llama_heads", torch.bfloat16).cuda(), on_gpu(inputs("llama", torch.bfloat16, 2, 40))
    want, eager = exact(model, given), step(model, model, given)
    with listening() as reports:
        got = step(torch.compile(model, backend="coda", options=OPTIONS), model, given)
    check(got, eager, want)
    assert sum(len(r.fused) for r in reports) == 15
    for report in reports:
        for text, options in zip(report.texts, report.options, strict=True):
            ran = steps(block(text, options).forward, "copy")
            assert all(s.reason is None for s in ran)
            assert all(s.compiled.last_route.kind in ("kernel", "copy") for s in ran)


OTHERS = (
    "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gptj", "opt", "bert", "vit", "t5", "t5_gated", "phi3",
    "titan", "nanogpt", "deepseek_dense", "deepseek_v3", "mixtral",
)  # fmt: skip
ROUTERS = {"deepseek_v3": 1}  # products in f32


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_training_step_of_other_models(name):
    dtype = torch.bfloat16
    model, given = tiny(name, dtype, WIDE, routed=False).cuda(), on_gpu(inputs(name, dtype, 2, 40))
    want, eager = exact(model, given), step(model, model, given)
    with listening() as reports:
        got = step(torch.compile(model, backend="coda", options=OPTIONS), model, given)
    check(got, eager, want)
    lines = [line for r in reports for line in r.lines]
    left = [str(line) for line in lines if line.reason and "a product by itself" not in line.reason]
    assert len(left) == ROUTERS.get(name, 0) < len(lines), left


def test_attention_reads_no_mask():
    """transformers writes the causal mask out here, or not: the kernel is that of causal attention."""
    model, given = tiny("llama_heads", torch.bfloat16).cuda(), on_gpu(inputs("llama", torch.bfloat16, 2, 40))
    call = torch.compile(model, backend="coda", options=OPTIONS)
    step(call, model, given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(call, model, given)
    names = {event.key for event in profile.key_averages()}
    kernels = {
        kind for kind in ("flash", "cudnn", "efficient") if f"aten::_scaled_dot_product_{kind}_attention" in names
    }
    assert kernels and "efficient" not in kernels


def test_repeated_steps_only_pass_addresses():
    """The second step runs on bound calls, forward and backward, with the same bits."""
    model, given = tiny("llama_heads", torch.bfloat16).cuda(), on_gpu(inputs("llama", torch.bfloat16, 2, 40))
    call = torch.compile(model, backend="coda", options=OPTIONS)
    with listening() as reports:
        first = step(call, model, given)
    second = step(call, model, given)
    assert torch.equal(first.logits, second.logits)
    assert all(torch.equal(first.gradients[n], second.gradients[n]) for n in first.gradients)
    for report in reports:
        for text, options in zip(report.texts, report.options, strict=True):
            assert any(bound is not None for bound in bound_calls(text, options).known.values())


def test_under_autocast():
    model, given = tiny("llama_heads", torch.float32).cuda(), on_gpu(inputs("llama", torch.float32, 2, 40))
    compiled = torch.compile(model, backend="coda", options=OPTIONS)

    def under(call):
        def run(**given):
            with torch.autocast("cuda", torch.bfloat16):
                return call(**given)

        return run

    want, eager = exact(model, given), step(under(model), model, given)
    with listening() as reports:
        check(step(under(compiled), model, given), eager, want)
    assert sum(len(r.fused) for r in reports) == 15


@pytest.mark.slow
def test_cuda_graphs():
    """Inductor records the steps; what is replayed gives the same as what ran."""
    model, given = tiny("llama_heads", torch.bfloat16).cuda(), on_gpu(inputs("llama", torch.bfloat16, 2, 40))
    plain = step(torch.compile(model, backend="coda"), model, given)
    torch._dynamo.reset()
    call = torch.compile(model, backend="coda", options={"mode": "reduce-overhead"})
    for _ in range(4):  # warm up, record, replay twice
        torch.compiler.cudagraph_mark_step_begin()
        got = step(call, model, given)
    torch.testing.assert_close(got.logits, plain.logits)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(got.gradients[name], gradient)


def test_a_new_length_builds_nothing():
    model = tiny("llama_heads", torch.bfloat16).cuda().eval()
    call = torch.compile(model, backend="coda", options=OPTIONS)
    artifacts = set()
    with torch.no_grad(), listening() as reports:
        for length in (40, 41, 64, 129):
            given = on_gpu(inputs("llama", torch.bfloat16, 2, length))
            want, eager = model.double()(**given).logits, model.bfloat16()(**given).logits
            assert (call(**given).logits - want).norm() <= 2 * (eager - want).norm()
            pairs = [(t, o) for r in reports for t, o in zip(r.texts, r.options, strict=True)]
            artifacts |= {id(s.compiled.artifact) for t, o in pairs for s in steps(block(t, o).forward, "copy")}
    assert len(reports) <= 2 and len(artifacts) == 3


def test_functional():
    torch.manual_seed(0)
    x, w, v = (torch.randn(s, device="cuda") for s in ((300, 256), (512, 256), (512, 256)))
    leaves = [t.div(16 if t is not x else 1).bfloat16().requires_grad_() for t in (x, w, v)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    y = functional.linear_swiglu(*leaves)
    want = torch.nn.functional.silu(doubles[0] @ doubles[1].T) * (doubles[0] @ doubles[2].T)
    seed = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, leaves, seed)]
    for got, true in zip(found, [want, *torch.autograd.grad(want, doubles, seed.double())], strict=True):
        assert (got.double() - true).norm() <= 1e-2 * true.norm()
