"""Activations, gated units and their backwards on the device: every tile, ragged sizes, against float64."""

from __future__ import annotations

import pytest

from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs
from tests.gpu.test_examples import compiled, kernels, run

# The axes of rows, columns (of one half) and contraction.
NAMES = {
    **dict.fromkeys(("geglu_tanh", "geglu_erf", "reglu", "swiglu_concatenated", "swiglu_interleaved", "gpt_oss_glu",
                     "relu2_mlp_up", "quick_gelu_mlp_up", "dswiglu", "dgeglu", "dgelu", "drelu2"), ("M", "F", "D")),
    **dict.fromkeys(("layer_scale", "residual_multiplier"), ("M", "D", "A")),
    "softcap_logits": ("M", "V", "D"),
}  # fmt: skip
RAGGED = ((1, 8, 8), (7, 16, 64), (128, 128, 64), (129, 136, 72), (300, 72, 200), (257, 264, 1032), (2049, 192, 128))


@pytest.mark.parametrize(("name", "tile"), kernels(NAMES))
def test_ragged_sizes(name: str, tile: str) -> None:
    call = compiled(name, tile)
    for seed, shape in enumerate(RAGGED):
        inputs = random_inputs(call.program, dict(zip(NAMES[name], shape, strict=True)), seed, "cuda")
        result = compare(call.program, inputs, run(call, inputs, shape[0]))
        assert result.ok, f"{name} {tile} {shape}\n{result}"


@pytest.mark.parametrize("name", NAMES)
def test_without_optional_operands(name: str) -> None:
    call = compiled(name, "128x128")
    if not any(p.optional for p in call.program.params):
        pytest.skip("it has none")
    inputs = random_inputs(
        call.program, dict(zip(NAMES[name], (300, 136, 200), strict=True)), 0, "cuda", optional=False
    )
    result = compare(call.program, inputs, run(call, inputs, 300))
    assert result.ok, str(result)
