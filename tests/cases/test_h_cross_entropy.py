"""Cases H1, H2, H3, H6, H9, H10: a linear layer with cross entropy, forward and gradient.

The interpreter is compared with torch in float64; generated code, run by the host compiler, with the interpreter. What
only a GPU can show (tiles, masked columns) is in tests/gpu/test_loss.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import coda
from coda.ir import Program
from coda.runtime.reference import evaluate
from coda.target import TILES, lower, variants
from coda.target.emit import device_source
from tests.hostmath import compile_plan
from tests.support import bf16

EXAMPLES = Path(__file__).parents[2] / "examples"
LABELS = torch.tensor([0, 10, -100, 3, 3, -100, 7])


def example(name: str) -> Program:
    return coda.parse(EXAMPLES / f"{name}.coda").programs[name]


def both(name: str, **inputs: Tensor | float | int) -> dict[str, Tensor]:
    """The results of the interpreter, after generated code has given the same."""
    program = example(name)
    want = evaluate(program, inputs)
    got = compile_plan(lower(program))(inputs)
    for output, value in want.items():
        torch.testing.assert_close(got[output], value, rtol=2e-6, atol=2e-6, equal_nan=True)
    return want


def exact(name: str, **inputs: Tensor | float | int) -> dict[str, Tensor]:
    return evaluate(example(name), inputs, exact=True)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.double(), rtol=1e-7, atol=1e-9, equal_nan=True)  # scalars are stored in f32


def logits(x: Tensor, w: Tensor) -> Tensor:
    return x.double() @ w.double().T


def test_nll_lse_and_mean_are_those_of_torch():
    x, w = bf16(7, 8), bf16(11, 8)
    got = exact("cross_entropy", x=x, w=w, label=LABELS)
    close(got["nll"], F.cross_entropy(logits(x, w), LABELS, reduction="none"))
    close(got["mean"], F.cross_entropy(logits(x, w), LABELS))
    close(got["lse"], logits(x, w).logsumexp(1))
    both("cross_entropy", x=x, w=w, label=LABELS)


@pytest.mark.parametrize("logit", [20.0, -20.0, -1e4])
@pytest.mark.parametrize("classes", [1, 7, 129])
def test_h1_vocabulary_tail(classes: int, logit: float):
    """Peaked logits, and none above zero: a padded column that counted would show. No label lies there."""
    x, w = torch.full((4, 8), 1.0).bfloat16(), torch.full((classes, 8), logit / 8).bfloat16()
    label = torch.tensor([0, classes - 1, -100, 0])
    got = both("cross_entropy", x=x, w=w, label=label)
    close(got["lse"].double(), (logits(x, w).logsumexp(1)).float())
    assert got["nll"][0] == pytest.approx(math.log(classes), abs=1e-4 * abs(logit))


def test_h2_all_labels_ignored():
    """The loss as torch gives it: a mean of nothing. Nothing of it reaches the gradient."""
    x, w, label = bf16(3, 8), bf16(5, 8), torch.full((3,), -100)
    got = both("cross_entropy", x=x, w=w, label=label)
    assert got["nll"].tolist() == [0.0] * 3
    assert got["mean"].isnan()
    assert F.cross_entropy(logits(x, w), label).isnan()
    g = torch.full((3,), math.nan)  # 1 / number of rows
    dz = both("cross_entropy_dlogits", x=x, w=w, label=label, lse=got["lse"], g=g)["dz"]
    assert dz.float().abs().sum() == 0


@pytest.mark.parametrize("upstream", ["none", "mean"])
def test_h3_gradient_of_every_reduction(upstream: str):
    x, w = bf16(7, 8), bf16(11, 8)
    z = logits(x, w).requires_grad_()
    g = torch.rand(7) if upstream == "none" else torch.full((7,), 1 / 5)
    nll = F.cross_entropy(z, LABELS, reduction="none")
    (nll * g).sum().backward() if upstream == "none" else F.cross_entropy(z, LABELS).backward()
    got = exact("cross_entropy_dlogits", x=x, w=w, label=LABELS, lse=z.detach().logsumexp(1).float(), g=g)["dz"]
    torch.testing.assert_close(got, z.grad, rtol=1e-6, atol=1e-6)  # lse and g are f32
    both("cross_entropy_dlogits", x=x, w=w, label=LABELS, lse=z.detach().logsumexp(1).float(), g=g)


def test_h3_gradient_with_z_loss():
    x, w, zl = bf16(7, 8), bf16(11, 8), 2.0**-7
    z = logits(x, w).requires_grad_()
    lse = z.logsumexp(1)
    valid = LABELS != -100
    ((F.cross_entropy(z, LABELS, reduction="none") + zl * lse * lse) * valid).sum().backward()
    inputs = {"x": x, "w": w, "label": LABELS, "lse": lse.detach().float(), "g": torch.ones(7), "zl": zl}
    torch.testing.assert_close(exact("cross_entropy_dlogits", **inputs)["dz"], z.grad, rtol=1e-6, atol=1e-6)
    nll = exact("cross_entropy", x=x, w=w, label=LABELS, zl=zl)["nll"]
    close(nll, (F.cross_entropy(z, LABELS, reduction="none") + zl * lse * lse).detach() * valid)


@pytest.mark.parametrize("label", [11, -5, 1 << 40])
def test_h6_a_label_that_is_no_class_gives_nan(label: int):
    labels = torch.tensor([2, label, -100])
    got = both("cross_entropy", x=bf16(3, 8), w=bf16(11, 8), label=labels)
    assert got["nll"].isnan().tolist() == [False, True, False]
    assert got["lse"].isfinite().all()


@pytest.mark.parametrize("classes", [50257, 128256, 151936, 262144])
def test_h9_vocabularies_that_are_no_multiple_of_a_tile(classes: int):
    """Any V lowers to one kernel, which stores no logits: two f32 and a label's logit for each row and tile."""
    plan = lower(example("cross_entropy"))
    assert [s.kind for s in plan.stores] == ["row", "pick"]
    (variant,) = variants(plan, TILES[:1])
    assert variant.row_partials(classes) == -(-classes // 128)


def test_h9_int32_labels_and_odd_sizes():
    x, w = bf16(7, 8), bf16(13, 8)
    label = torch.tensor([0, 12, -100, 3, 3, -100, 7], dtype=torch.int32)
    weight = torch.rand(13) + 0.5
    got = exact("cross_entropy_weighted", x=x, w=w, label=label, class_weight=weight, cap=4.0)
    z = 4 * (logits(x, w) / 4).tanh()
    close(got["nll"], F.cross_entropy(z, label.long(), weight.double(), reduction="none"))
    close(got["mean"], F.cross_entropy(z, label.long(), weight.double()))
    both("cross_entropy_weighted", x=x, w=w, label=label, class_weight=weight, cap=4.0)


def test_h10_token_weights():
    x, w, weight = bf16(7, 8), bf16(11, 8), torch.rand(7)
    got = exact("cross_entropy", x=x, w=w, label=LABELS, weight=weight)
    close(got["nll"], F.cross_entropy(logits(x, w), LABELS, reduction="none") * weight.double())
    both("cross_entropy", x=x, w=w, label=LABELS, weight=weight)


@pytest.mark.parametrize("smoothing", [0.0, 0.125])
def test_label_smoothing(smoothing: float):
    x, w = bf16(7, 8), bf16(11, 8)
    got = exact("cross_entropy_smooth", x=x, w=w, label=LABELS, smoothing=smoothing)
    z = logits(x, w)
    close(got["nll"], F.cross_entropy(z, LABELS, reduction="none", label_smoothing=smoothing))
    close(got["mean"], F.cross_entropy(z, LABELS, label_smoothing=smoothing))
    both("cross_entropy_smooth", x=x, w=w, label=LABELS, smoothing=smoothing)


def test_the_kernels_read_nothing_for_a_label_outside():
    """The one place where a label is used as an address checks it first."""
    source = device_source(lower(example("cross_entropy_weighted")), [])
    assert "coda::load_at<float>" in source
    assert "load_element<float>" not in source
