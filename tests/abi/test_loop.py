"""Artifacts whose steps over an axis run chunk by chunk, over the fake CUDA runtime: parts, sizes, the workspace."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coda.frontend import load
from coda.target.chunks import NARROW, WIDE, lower_in_chunks
from coda.target.legality import can_lower
from coda.target.schedule import Schedule
from tests.abi import harness
from tests.abi.harness import Recorder
from tests.abi.test_steps import F32, WORKSPACE, launches, zeros

PROGRAM = """
program dlogits(x: bf16[M, D], w: bf16[V, D], bias: f32[V]?, label: i64[M], lse: f32[M]) {
    z = x @ w.T + bias
    dz = cast(exp(z - lse) - (index(V) == label), bf16)
    return d_x = dz @ w: bf16, d_w = dz.T @ x: bf16, d_bias = sum(dz, M): f32
}
"""
M, D = 130, 64


@lru_cache
def schedule() -> Schedule:
    return lower_in_chunks(load(PROGRAM).programs["dlogits"], "V").schedule


@lru_cache
def recorder() -> Recorder:
    return Recorder(harness.host_of(Path(harness._folder.name) / "loop", schedule(), fake=True))


def arguments(v: int, w: Tensor | None = None) -> list[Any]:
    label, lse = torch.zeros(M, dtype=torch.int64), zeros(M, dtype=F32)
    w = zeros(v, D) if w is None else w
    return [zeros(M, D), w, zeros(v, dtype=F32), label, lse, zeros(M, D), zeros(v, D), zeros(v, dtype=F32)]


def started() -> Recorder:
    record = recorder()
    record.reset()
    return record


def test_steps_before_inside_and_behind_the_loop() -> None:
    loop = schedule().loop
    assert loop is not None
    kinds = [step.kind for step in schedule().steps]
    assert kinds[: loop.first] == ["map"]  # zeros
    assert kinds[loop.first : loop.end] == ["gemm"] * 3
    assert kinds[loop.end :] == ["map"]  # the sum, rounded
    for v, rounds in ((1, 1), (NARROW, 1), (NARROW + 1, 2), (3 * NARROW - 7, 3)):
        record = started()
        assert record.run(arguments(v), workspace=WORKSPACE) == 0, record.error
        inside = [c["kernel"] for c in launches(record) if "chunk" in c["kernel"]]
        assert len(inside) == 4 * rounds  # three products, and the finish kernel of d_bias


def test_a_chunk_sees_its_part_of_each_tensor() -> None:
    """Also of a weight whose rows lie farther apart; the last chunk has what is left."""
    v = 2 * NARROW + 100
    wide = zeros(v, D + 8)[:, :D]
    args = arguments(v, wide)
    record = started()
    assert record.run(args, workspace=WORKSPACE) == 0, record.error
    maps = [c for c in record.calls() if c["call"] == "encode"]
    weights = [
        (c["base"], c["dims"], c["strides"]) for c in maps if c["dims"][0] == D and c["strides"] == [2 * (D + 8)]
    ]
    step = NARROW * (D + 8) * 2
    widths = (NARROW, NARROW, 100)
    wanted = [(wide.data_ptr() + i * step, [D, n], [2 * (D + 8)]) for i, n in enumerate(widths) for _ in range(2)]
    assert weights == wanted  # read by two products of each chunk
    kernels = [c["kernel"] for c in launches(record)]
    first, second, last = (i for i, kernel in enumerate(kernels) if "_1_gemm_" in kernel and "finish" not in kernel)
    plan = schedule().gemms[0]
    kind = harness.launch_type(*map(len, (plan.tile_operands, plan.operands, plan.stores, plan.terms)))
    assert [(p.m, p.n) for p in (record.parameters(kind, i) for i in (first, second))] == [(M, NARROW)] * 2
    p = record.parameters(kind, last)
    assert (p.m, p.n) == (M, 100)
    starts = [p.operands[i].integer for i, o in enumerate(plan.operands) if o.arg == "V_start"]
    biases = [p.operands[i].data for i, o in enumerate(plan.operands) if o.arg == "bias_chunk"]
    assert starts == [2 * NARROW]
    assert biases == [args[2].data_ptr() + 2 * NARROW * 4]


def test_the_workspace_holds_one_chunk() -> None:
    """d_z of one chunk, its rows padded for TMA; the f32 sum; what the finish kernel of d_bias reads."""
    record = started()

    def bytes_of(v: int) -> int:
        return record.artifact.workspace_bytes(arguments(v))

    assert bytes_of(3 * NARROW) == bytes_of(NARROW) == bytes_of(2 * NARROW - 1)
    assert bytes_of(NARROW) - bytes_of(NARROW - 8) >= M * 8 * 2
    total = M * NARROW * 2 + M * D * 4 + (-(-M // 16)) * NARROW * 4
    assert total <= bytes_of(NARROW) <= total + 4096


def test_checks_are_those_of_the_whole_axis() -> None:
    args = arguments(NARROW + 8)
    assert can_lower(schedule(), args)
    args[1] = zeros(NARROW + 8, D + 4)[:, :D]
    refusal = can_lower(schedule(), args)
    assert "'w' has rows" in str(refusal)
    record = started()
    assert record.run(args, workspace=WORKSPACE) == 1
    assert record.error == str(refusal)


def test_the_description_tells_of_the_loop() -> None:
    (program,) = recorder().artifact.describe["programs"]
    assert program["loop"] == {"kernels": [1, 4], "axis": "V", "chunk": "V_chunk", "width": NARROW}
    assert [k["rows"] for k in program["kernels"]] == ["M", "M", "M", "V_chunk", "M"]


def test_an_absent_operand_is_absent_in_each_chunk() -> None:
    args = arguments(NARROW + 1)
    args[2] = None
    record = started()
    assert record.run(args, workspace=WORKSPACE) == 0, record.error


def test_nothing_but_launches_and_maps() -> None:
    """A graph can be captured."""
    record = started()
    args = arguments(2 * NARROW)
    assert record.run(args, workspace=WORKSPACE) == 0, record.error
    record.reset()
    assert record.run(args, workspace=WORKSPACE) == 0
    assert {c["call"] for c in record.calls()} == {"encode", "launch"}


HEAD = """
program head_backward(w_o: bf16[D, A], o: bf16[M, A], w: bf16[V=80000, D], n: bf16[M, D], r: f32[M],
                      d_logits: bf16[M, V]) {
    d_n = d_logits @ w
    d_x = cast(d_n * r, bf16)
    return d_o = d_x @ w_o: bf16, d_w_o = d_x.T @ o: bf16, d_w = d_logits.T @ n: bf16
}
"""


def test_products_behind_a_loop_read_what_its_sums_became() -> None:
    """The gradient of logits that were returned is seen in parts: columns of a tensor whose rows lie farther apart."""
    lowered = lower_in_chunks(load(HEAD).programs["head_backward"], "V").schedule
    assert [s.kind for s in lowered.steps] == ["map", "gemm", "gemm", "map", "gemm", "gemm"]
    record = Recorder(harness.host_of(Path(harness._folder.name) / "head", lowered, fake=True))
    v, a = 80000, 32
    d_logits = zeros(M, v + 8)[:, :v]
    args = [zeros(D, a), zeros(M, a), zeros(v, D), zeros(M, D), zeros(M, dtype=F32), d_logits]
    args += [zeros(M, a), zeros(D, a), zeros(v, D)]
    assert record.run(args, workspace=WORKSPACE) == 0, record.error
    order = [c["kernel"].removeprefix("head_backward_") for c in launches(record)]
    chunk = ["chunk_1_gemm_128x128", "chunk_2_gemm_128x128"]
    assert [k for k in order if k.startswith("chunk")] == 3 * chunk
    assert order[0].startswith("zeros") and [k.split("_")[0] for k in order[-3:]] == ["after"] * 3
    maps = [c for c in record.calls() if c["call"] == "encode" and c["strides"] == [2 * (v + 8)]]
    parts = [(c["base"] - d_logits.data_ptr(), min(c["dims"][0], WIDE)) for c in maps]
    widths = [WIDE, WIDE, v - 2 * WIDE]
    assert parts == [(2 * i * WIDE, n) for i, n in enumerate(widths) for _ in range(2)]
