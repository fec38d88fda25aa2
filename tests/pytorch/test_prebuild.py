"""What a graph runs on a GPU is built when it is compiled: forward and backward, at the sizes it was compiled with."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from coda.errors import CodaError
from coda.pytorch import op, prebuild
from coda.pytorch.execute import execute, steps
from coda.runtime.callable import CompiledProgram
from tests.pytorch.models import inputs, tiny

Asked = list[tuple[CompiledProgram, Mapping[str, int]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The builds that were asked for, which all fail."""
    found: Asked = []

    def built(self: CompiledProgram, sizes: Mapping[str, int] | None = None) -> None:
        found.append((self, dict(sizes or {})))
        raise CodaError.of("there is no compiler")

    monkeypatch.setattr(prebuild, "_is_on_gpu", lambda call: True)
    monkeypatch.setattr(CompiledProgram, "built", built)
    torch._dynamo.reset()
    return found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[CompiledProgram | None]:
    """What calls of the op would run on a GPU."""
    found: list[CompiledProgram | None] = []

    def noting(program, inputs, sizes, layout, chunk, tune):
        found.extend(step.compiled for step in steps(program, layout, chunk, tune))
        return execute(program, inputs, sizes, layout, chunk, tune)

    monkeypatch.setattr(op, "execute", noting)
    return found


def check(asked: Asked, ran: list[CompiledProgram | None]) -> None:
    """All that ran was asked for, at the sizes that it has; forward and backward."""
    built = {id(call) for call, _ in asked}
    assert ran and all(id(call) in built for call in ran)
    names = {call.program.name for call, _ in asked}
    assert any("backward" in n for n in names) and any("backward" not in n for n in names)
    assert all(set(sizes) == {s.name for a in call.program.axes for s in a.size.free_symbols} for call, sizes in asked)


def test_forward_and_backward_are_built_before_the_first_call(asked, ran) -> None:
    model, given = tiny("llama_heads", torch.bfloat16), inputs("llama", torch.bfloat16, 2, 40)
    loss = torch.compile(model, backend="coda", options={"inductor": False}, dynamic=True)(**given).logits.sum()
    assert {40} <= {s for _, sizes in asked for s in sizes.values()}
    before = len(asked)
    loss.backward()
    assert len(asked) == before
    check(asked, ran)


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_fused_losses_are_built_before_the_first_call(memory, asked, ran) -> None:
    """Nothing is left to build inside of a backward, whose time is that of a training step."""
    head = torch.nn.Linear(64, 96, bias=False).bfloat16()

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(x).float(), target)

    x = torch.randn(48, 64).bfloat16().requires_grad_()
    options = {"inductor": False, "fuse_loss": memory}
    torch.compile(loss, backend="coda", options=options)(x, torch.randint(96, (48,))).backward()
    assert {call.program.name for call, _ in asked} == {"linear_cross_entropy", "linear_cross_entropy_backward"}
    assert all(sizes["M"] == 48 for _, sizes in asked)
    check(asked, ran)


def test_functions_that_a_model_calls_are_built_before_the_first_call(asked, ran) -> None:
    from coda.nn.functional import linear_swiglu

    gate, up = (torch.randn(96, 64).bfloat16().requires_grad_() for _ in range(2))
    call = torch.compile(lambda x: linear_swiglu(x, gate, up).sum(), backend="coda", options={"inductor": False})
    call(torch.randn(48, 64).bfloat16()).backward()
    check(asked, ran)


def test_a_program_has_its_steps_once() -> None:
    """However its defaults are written: what was built for one is what the other runs."""
    from tests.support import program

    p = program("program p(x: bf16[M, K], w: bf16[N, K]) { return relu(x @ w.T): bf16 }")
    assert steps(p, "copy") is steps(p, "copy", None) is steps(p, layout="copy")
