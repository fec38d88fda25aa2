"""What is reported of a model."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import coda
from coda.cli import main
from coda.errors import CodaError
from coda.pytorch.report import listening


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        n = self.norm(x)
        h = x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))
        return self.head(torch.cumsum(h, 0))


def factory():
    return Gated(), (torch.randn(3, 16),)


def factory_bf16():
    return Gated().bfloat16(), (torch.randn(3, 16).bfloat16(),)


def test_every_product_is_named():
    report = coda.explain(*(lambda m, i: (m, *i))(*factory()))
    assert (report.fused, report.total) == (3, 4)
    assert [x.name for x in report.lines] == ["gate", "up", "down", "head"]
    assert "rms_norm" in report.lines[0].fused_with
    assert report.lines[3].reason == "a product by itself: there is nothing to fuse with it"
    assert str(report).endswith("3 of 4 products fused")
    assert len(report.programs) == 1 and "silu" in report.programs[0]


def test_the_command(capsys):
    assert main(["explain", "--model", f"{__name__}:factory", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["fused"], document["total"]) == (3, 4)
    assert document["kernels"] == [] and "f32" in document["regions"][0]["reason"]
    assert main(["explain", "--model", f"{__name__}:factory"]) == 0
    assert "3 of 4 products fused" in capsys.readouterr().out


def test_the_kernels_of_a_model(tmp_path, capsys):
    picture = tmp_path / "model.svg"
    assert main(["explain", "--model", f"{__name__}:factory_bf16", "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "3 of 4 products fused" in out and "one kernel for each operation" in out
    assert "silu" in picture.read_text()
    assert main(["explain", "--model", f"{__name__}:factory_bf16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (region,) = document["regions"]
    assert document["kernels"] == region["kernels"]
    assert sum(k["kind"] == "gemm" for k in region["kernels"]) == 2


@pytest.mark.parametrize("name", ["nowhere:factory", "math:nothing", "math"])
def test_a_model_that_is_not_there(name, capsys):
    assert main(["explain", "--model", name]) == 1
    assert "name a function as module:factory" in capsys.readouterr().err


def test_optimize_lists_and_does():
    model, (x,) = factory()
    want = model(x)
    report = coda.optimize(model, x, dry=True)
    assert (report.fused, report.total) == (3, 4) and model._compiled_call_impl is None
    assert str(coda.optimize(model, x, options={"inductor": False})) == str(report)
    with listening() as graphs:
        torch.testing.assert_close(model(x), want)
    assert len(graphs) == 1 and len(graphs[0].fused) == 3


def test_optimize_wants_a_module_and_known_options():
    with pytest.raises(CodaError, match=r"takes a module, not a function"):
        coda.optimize(factory)
    with pytest.raises(CodaError, match=r"no option 'numeric'"):
        coda.optimize(*(lambda m, i: (m, *i))(*factory()), options={"numeric": "eager"})
