"""A1, A2, A3, B9, C11: what a kernel cannot read is refused with its reason, from sizes and strides alone."""

from __future__ import annotations

import pytest
import torch

from coda.runtime.library import Artifact
from coda.target.legality import can_lower
from coda.target.plan import TILES
from coda.target.requirements import View
from tests.abi import harness

BF16 = torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def refusal(name: str, args: list) -> str | None:
    """The sentence of ``NAME_check``, which must be that of ``can_lower``."""
    sentence = Artifact(harness.library(name)).check(args)
    answer = can_lower(harness.plan(name), args, TILES)
    assert (sentence or "") == ("" if answer else str(answer))
    return sentence


def stats(x: torch.Tensor) -> list[torch.Tensor]:
    """Arguments of `stats` with K = 64, D = 128 around this residual."""
    return [
        zeros(32, 64),
        zeros(128, 64),
        x,
        zeros(32, 128),
        zeros(32, dtype=torch.float32),
        zeros(1, 32, dtype=torch.float32),
    ]


def test_a1_full_tile_operand_must_have_the_shape_of_the_output() -> None:
    assert refusal("stats", stats(zeros(32, 128))) is None
    sentence = refusal("stats", stats(zeros(32, 64)))
    assert sentence == "operand 'x' has shape [32, 64]: dim 1 must be 128 (D, fixed by 'w')"


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.as_strided(zeros(65 * 64), (64, 64), (65, 1)), "rows 130 bytes apart"),
        (zeros(64 * 64 + 1)[1:].view(64, 64), "starts 2 bytes past a multiple of 16"),
        (zeros(64, 60).T.expand(60, 64), "stride 60 along K"),
        (zeros(64, 128)[:, ::2], "stride 2 along K"),
        (zeros(1, 64).expand(60, 64), "overlapping rows: 0 elements apart, 64 wide"),
    ],
)
def test_a2_strides_and_bases_that_tma_cannot_take(x: torch.Tensor, reason: str) -> None:
    sentence = refusal("plain", [x, zeros(96, 64), zeros(x.shape[0], 96)])
    assert sentence is not None
    assert reason in sentence
    assert "'x'" in sentence


def test_a2_one_row_may_have_any_stride() -> None:
    x = torch.as_strided(zeros(64), (1, 64), (3, 1))
    assert refusal("plain", [x, zeros(96, 64), zeros(1, 96)]) is None


def test_a3_misaligned_bias_is_taken() -> None:
    bias = zeros(97)[1:]
    record = harness.recorder("bias_scale")
    record.reset()
    args = [zeros(40, 64), zeros(96, 64), bias, zeros(40, dtype=torch.float32), None, zeros(40, 96)]
    assert record.run(args) == 0, record.error
    operand = record.parameters(harness.launch_type(0, 3, 1)).operands[0]
    assert (operand.data, operand.column) == (bias.data_ptr(), 1)


def test_b9_strides_are_64_bit() -> None:
    """Rows 2^33 elements apart are fine; rows of 2^40 bytes are beyond a tensor map. Nothing is allocated."""
    w, y = View((96, 64), (64, 1), (4, 16), 1 << 30), View((40, 96), (1 << 40, 1), (4, 16), 1 << 50)
    near, far = (View((40, 64), (stride, 1), (4, 16), 1 << 45) for stride in (1 << 33, 1 << 39))
    plan = harness.plan("plain")
    assert can_lower(plan, [near, w, y], TILES)
    assert "takes less than 1099511627776" in str(can_lower(plan, [far, w, y], TILES))
    record = harness.recorder("plain")
    record.reset()
    assert record.run_views([near, w, y]) == 0, record.error
    assert record.parameters(harness.launch_type(0, 0, 1)).outputs[0].row == 1 << 40
    assert next(c for c in record.calls() if c["call"] == "encode")["strides"] == [1 << 34]


@pytest.mark.parametrize("scale", [zeros(40, dtype=torch.float32), zeros(1, dtype=torch.float32), torch.tensor(1.0)])
def test_c11_one_element_stands_for_a_vector(scale: torch.Tensor) -> None:
    record = harness.recorder("bias_scale")
    record.reset()
    assert record.run([zeros(40, 64), zeros(96, 64), None, scale, None, zeros(40, 96)]) == 0, record.error
    operand = record.parameters(harness.launch_type(0, 3, 1)).operands[1]
    assert operand.row == (1 if scale.numel() > 1 else 0)


def test_expanded_vector_has_stride_zero() -> None:
    record = harness.recorder("bias_scale")
    record.reset()
    r = zeros(1, dtype=torch.float32).expand(40)
    assert record.run([zeros(40, 64), zeros(96, 64), None, r, None, zeros(40, 96)]) == 0, record.error
    assert record.parameters(harness.launch_type(0, 3, 1)).operands[1].row == 0


def test_outputs_may_not_overlap_what_is_read() -> None:
    x = zeros(64, 64)
    assert refusal("plain", [x, zeros(64, 64), x]) == "output 'out' shares memory with operand 'x'"
    args = stats(zeros(32, 128))
    args[3] = args[2]
    assert refusal("stats", args) is None  # the residual is read where the result is written
    args[3] = torch.as_strided(zeros(33 * 128), (32, 128), (0, 1))
    assert refusal("stats", args) == "output 'h' has overlapping elements"


def test_outputs_may_be_columns_of_one_buffer() -> None:
    both = zeros(64, 192)
    args = [zeros(64, 64), zeros(96, 64), zeros(96, 64), both[:, :96], zeros(64, 192)]
    args[2] = args[2].clone()
    assert refusal("gated", args) is None
    buffer = zeros(64, 288)
    assert refusal("gated", [*args[:3], buffer[:, :96], buffer[:, 96:]]) is None
    assert (
        refusal("gated", [*args[:3], buffer[:, :96], buffer[:, 95:287]])
        == "output 'z' shares memory with output 'out0'"
    )


def test_groups_of_axes_are_one_dim() -> None:
    assert refusal("tokens", [zeros(48, 64), zeros(96, 64), zeros(48, 96)]) is None
    assert refusal("tokens", [zeros(48, 64), zeros(96, 64), zeros(47, 96)]) == (
        "output 'out' has shape [47, 96]: dim 0 must be 48 (B*T, fixed by 'x')"
    )


def test_paired_columns_come_in_eights() -> None:
    args = [zeros(64, 64), zeros(20, 64), zeros(20, 64), zeros(64, 20), zeros(64, 40)]
    assert refusal("gated", args) == "F = 20 is not a multiple of 8, the columns paired at a time"
    assert refusal("halves", [zeros(64, 64), zeros(47, 64), zeros(64, 48), zeros(64, 24)]) == (
        "operand 'w' has shape [47, 64]: dim 0 must be 2*F, not 47"
    )
