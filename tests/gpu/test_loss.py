"""Linear layer with cross entropy on the device: every tile, ragged and real vocabularies, labels of all kinds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs
from tests.gpu.test_examples import TILE_NAMES, compiled, run
from tests.support import same_bits

FORWARD = ("cross_entropy", "cross_entropy_smooth", "cross_entropy_weighted")
RAGGED = ((1, 1, 8), (7, 9, 64), (128, 128, 64), (129, 257, 72), (300, 1001, 200), (257, 520, 1032))  # M, V, D
VOCABULARIES = (50257, 128256, 151936, 262144)


def operands(name: str, m: int, v: int, d: int, seed: int = 0) -> dict:
    """Random operands with labels inside, ignored, and at both ends of the axis."""
    call = compiled(name, TILE_NAMES[0])
    inputs = random_inputs(call.program, {"M": m, "V": v, "D": d}, seed, "cuda")
    inputs["label"][::5] = -100
    inputs["label"][1::7], inputs["label"][2::7] = v - 1, 0
    if "class_weight" in inputs:
        inputs["class_weight"] = inputs["class_weight"].abs() + 0.1
    if "lse" in inputs:
        inputs["lse"] = (inputs["x"].float() @ inputs["w"].float().T).logsumexp(1)
    return inputs


@pytest.mark.parametrize("tile", TILE_NAMES)
@pytest.mark.parametrize("name", [*FORWARD, "cross_entropy_dlogits"])
def test_ragged_sizes(name: str, tile: str) -> None:
    call = compiled(name, tile)
    for seed, shape in enumerate(RAGGED):
        inputs = operands(name, *shape, seed)
        result = compare(call.program, inputs, run(call, inputs, shape[0]))
        assert result.ok, f"{name} {tile} {shape}\n{result}"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", FORWARD)
def test_real_vocabularies_and_equal_bits_over_runs(name: str, vocabulary: int) -> None:
    call = compiled(name, "128x128")
    inputs = operands(name, 1000, vocabulary, 256)
    first = run(call, inputs, 1000)
    result = compare(call.program, inputs, first)
    assert result.ok, f"{vocabulary}\n{result}"
    for _ in range(20):
        again = run(call, inputs, 1000)
        assert all(same_bits(first[o], again[o]) for o in first)


@pytest.mark.parametrize("tile", TILE_NAMES)
@pytest.mark.parametrize("logit", [20.0, -20.0, -1e4])
def test_h1_no_padded_column_counts(tile: str, logit: float) -> None:
    """One class more than a tile, all logits equal: lse is that logit plus log(V)."""
    call = compiled("cross_entropy", tile)
    for v in (1, 129, 193, 257):
        inputs = operands("cross_entropy", 130, v, 64)
        inputs["x"].fill_(1.0), inputs["w"].fill_(logit / 64)
        out = run(call, inputs, 130)
        want = (inputs["x"].double() @ inputs["w"].double().T).logsumexp(1)
        torch.testing.assert_close(out["lse"].double(), want, rtol=1e-6, atol=1e-6)


def test_labels_outside_and_all_ignored() -> None:
    call = compiled("cross_entropy", "128x128")
    inputs = operands("cross_entropy", 200, 300, 64)
    inputs["label"][:] = torch.tensor([5, 300, -5, -100, 1 << 40]).cuda().repeat(40)
    out = run(call, inputs, 200)
    assert out["nll"].isnan().view(40, 5).all(0).tolist() == [False, True, True, False, True]
    assert out["lse"].isfinite().all()
    inputs["label"].fill_(-100)
    out = run(call, inputs, 200)
    assert out["nll"].abs().sum() == 0
    assert out["mean"].isnan()  # as torch


def test_against_torch_in_float64() -> None:
    m, v, d = 512, 50257, 512
    inputs = operands("cross_entropy", m, v, d)
    inputs["weight"] = None
    out = run(compiled("cross_entropy", "128x192"), inputs, m)
    z, label = inputs["x"].double() @ inputs["w"].double().T, inputs["label"]
    torch.testing.assert_close(out["nll"].double(), F.cross_entropy(z, label, reduction="none"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["mean"].double(), F.cross_entropy(z, label), rtol=1e-6, atol=1e-6)
