"""What a graph runs on a GPU is built when it is compiled: forward and backward, at the sizes it was compiled with."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from coda.errors import CodaError
from coda.pytorch import prebuild
from coda.pytorch.execute import steps
from coda.runtime.callable import CompiledProgram
from tests.pytorch.models import inputs, tiny


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[CompiledProgram, Mapping[str, int]]]:
    """The builds that were asked for, which all fail."""
    found: list[tuple[CompiledProgram, Mapping[str, int]]] = []

    def built(self: CompiledProgram, sizes: Mapping[str, int] | None = None) -> None:
        found.append((self, dict(sizes or {})))
        raise CodaError.of("there is no compiler")

    monkeypatch.setattr(prebuild, "_is_on_gpu", lambda fused: True)
    monkeypatch.setattr(CompiledProgram, "built", built)
    torch._dynamo.reset()
    return found


def test_forward_and_backward_are_built_before_the_first_call(asked) -> None:
    model, given = tiny("llama_heads", torch.bfloat16), inputs("llama", torch.bfloat16, 2, 40)
    loss = torch.compile(model, backend="coda", options={"inductor": False}, dynamic=True)(**given).logits.sum()
    names = {call.program.name for call, _ in asked}
    assert any("backward" in n for n in names) and any("backward" not in n for n in names)
    assert all(set(sizes) == {s.name for a in call.program.axes for s in a.size.free_symbols} for call, sizes in asked)
    assert {40} <= {s for _, sizes in asked for s in sizes.values()}
    asked.clear()
    loss.backward()
    assert not asked


def test_a_program_has_its_steps_once() -> None:
    """However its defaults are written: what was built for one is what the other runs."""
    from tests.support import program

    p = program("program p(x: bf16[M, K], w: bf16[N, K]) { return relu(x @ w.T): bf16 }")
    assert steps(p, "copy") is steps(p, "copy", None) is steps(p, layout="copy")
