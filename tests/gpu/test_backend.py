"""torch.compile(model, backend="coda") on the device: kernels against float64, no build for a new length."""

from __future__ import annotations

import pytest
import torch

from coda.nn import functional
from coda.pytorch.block import block
from coda.pytorch.execute import steps
from coda.pytorch.report import listening
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
