"""torch.export and AOTInductor: programs in exported graphs."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from coda.nn import functional
from tests.pytorch.handwritten import TitanBlock, frequencies
from tests.pytorch.models import compiled


class Gated(nn.Module):
    """A gated unit that calls a program."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.randn(32))
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(s) / 8) for s in ((48, 32), (48, 32), (32, 48)))

    def forward(self, x):
        h = functional.linear_swiglu(functional.rms_norm_linear(x, self.norm, self.up[:32]), self.gate, self.up)
        return x + h @ self.down.T


def test_export_with_a_dynamic_length(tmp_path):
    model, x = Gated(), torch.randn(2, 5, 32)
    with torch.no_grad():
        exported = export(model, (x,), dynamic_shapes=({1: Dim("length", min=2, max=64)},))
    assert "coda.block" in str(exported.graph)
    torch.export.save(exported, tmp_path / "gated.pt2")
    loaded = torch.export.load(tmp_path / "gated.pt2").module()
    for length in (5, 9):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(loaded(x), model(x))


def test_an_exported_model_is_compiled(reports):
    """What torch.export gives is a module like others."""
    model, given = TitanBlock().eval(), (torch.randn(2, 7, 64), frequencies(16))
    with torch.no_grad():
        exported = export(model, given).module()
        torch.testing.assert_close(compiled(exported)(*given), model(*given), rtol=1e-4, atol=1e-5)
    assert len(reports[-1].fused) == 7


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_aot_inductor(tmp_path):
    """The package calls the op by the dispatcher, so a process that runs it imports coda.pytorch."""
    model, x = Gated(), torch.randn(2, 5, 32)
    with torch.no_grad():
        exported = export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "gated.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), model(x))
