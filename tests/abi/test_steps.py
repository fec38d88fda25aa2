"""Row kernels and artifacts of several kernels over the fake CUDA runtime: launches, strides, and the workspace."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.frontend import load, load_path
from coda.ir import Program
from coda.resources import templates_dir
from coda.target.blocks import lower_program
from coda.target.emit import finish_kernel
from coda.target.legality import can_lower
from coda.target.plan import Plan
from coda.target.rowplan import RowPart
from coda.target.schedule import Schedule, Temporary, schedule_steps, share
from tests.abi import harness
from tests.abi.harness import Recorder
from tests.rowmath import launch_type

EXAMPLES = Path(__file__).parents[2] / "examples"
BF16, F32 = torch.bfloat16, torch.float32
WORKSPACE = 0x100000

PROGRAMS = """
program chain(x: bf16[M, K], w: bf16[N, K], v: bf16[L, N], u: bf16[P, L], t: bf16[Q, P]) {
    a = x @ w.T
    b = a @ v.T
    c = b @ u.T
    return c @ t.T: bf16
}
program normed(x: bf16[M, K], w: bf16[D, K], gamma: bf16[D], v: bf16[N, D], eps: f32 = 1e-5) {
    h = cast(x @ w.T, bf16)
    r = rsqrt(mean(h * h, D) + eps)
    return y = cast(h * r * gamma, bf16) @ v.T: bf16, r: f32
}
program scaled(x: f32[M, N]) {
    return 2 * x: bf16
}
program positions(x: bf16[(B T), N], e: bf16[T, N]) {
    return y = x + e: bf16
}
program gradients(a: bf16[T, M], b: bf16[T, N], x: bf16[T, K], g: bf16[K]) {
    return g * (a.T @ x): bf16, db = g * (b.T @ x): bf16
}
"""


@lru_cache
def schedule(name: str) -> Schedule:
    return lower_program(program(name))


def program(name: str) -> Program:
    path = EXAMPLES / f"{name}.coda"
    programs = load_path(path).programs if path.exists() else load(PROGRAMS).programs
    return programs[name] if name in programs else next(iter(programs.values()))


@lru_cache
def recorder(name: str) -> Recorder:
    return Recorder(harness.host_of(Path(harness._folder.name) / "steps" / name, schedule(name), fake=True))


def started(name: str) -> Recorder:
    record = recorder(name)
    record.reset()
    return record


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def launches(record: Recorder) -> list[dict[str, Any]]:
    return [c for c in record.calls() if c["call"] == "launch"]


def shapes(record: Recorder) -> list[tuple[str, list[int], list[int]]]:
    return [(c["kernel"], c["grid"], c["block"]) for c in launches(record)]


# -- row kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "kernel", "threads", "teams"),
    [
        (64, "1", 8, 32), (128, "1", 16, 16), (2048, "1", 256, 1), (2056, "2", 256, 1), (4096, "2", 256, 1),
        (8192, "2", 512, 1), (11008, "4", 512, 1), (16384, "4", 512, 1), (20480, "any", 512, 1), (37, "any", 8, 32),
        (4095, "any", 512, 1),
    ],
)  # fmt: skip
def test_variant_by_the_length_of_a_row(width: int, kernel: str, threads: int, teams: int) -> None:
    record = started("softmax")
    x, y, lse = zeros(40, width), zeros(40, width), zeros(40, dtype=F32)
    assert record.run([x, y, lse]) == 0, record.error
    blocks = -(-40 // teams)
    assert shapes(record) == [(f"softmax_row_{kernel}", [blocks, 1, 1], [threads * teams, 1, 1])]
    p = record.parameters(launch_type(schedule("softmax").steps[0])).part0
    assert (p.rows, p.threads, p.groups, p.blocks, p.chunks) == (40, threads, 1, blocks, 1)


def test_unaligned_rows_take_the_kernel_for_any_layout() -> None:
    record = started("softmax")
    wide = zeros(40, 136)
    assert record.run([wide[:, 1:129], zeros(40, 128), zeros(40, dtype=F32)]) == 0, record.error
    assert launches(record)[0]["kernel"] == "softmax_row_any"


def test_strides_of_rows_and_tables() -> None:
    record = started("drope")
    b, h, t = 2, 3, 5
    dq, pos, cos, sin, dz = zeros(b, h, t, 128), zeros(10, dtype=torch.int32), *_tables(7), zeros(b * t, h * 128)
    assert record.run([dq, pos, cos, sin, dz]) == 0, record.error
    plan = schedule("drope").steps[0]
    p = record.parameters(launch_type(plan)).part0
    assert (p.rows, list(p.sizes), list(p.columns)) == (30, [2, 5, 3], [64])
    at = {(a.arg, len(a.offsets)): p.tensors[i] for i, a in enumerate(plan.parts[0].accesses)}
    first, second = at["dq", 0], at["dq", 1]
    assert list(first.level)[:3] == [h * t * 128, 128, t * 128]
    assert (first.data, second.data - first.data, first.column, first.vector) == (dq.data_ptr(), 128, 1, 1)
    assert list(at["pos", 0].level)[:3] == [t, 1, 0]
    assert (at["cos", 0].gather, at["cos", 0].extent, list(at["cos", 0].level)) == (64, 7, [0, 0, 0, 0])
    assert list(at["dz", 0].level)[:3] == [t * h * 128, h * 128, 128]


def _tables(positions: int) -> tuple[Tensor, Tensor]:
    return zeros(positions, 64, dtype=F32), zeros(positions, 64, dtype=F32)


def test_sums_over_rows_have_a_fixed_number_of_blocks() -> None:
    record = started("drms_norm")
    for rows, blocks in ((8192, 264), (100, 100), (0, 0)):
        record.reset()
        args = [zeros(rows, 4096), zeros(rows, 4096), zeros(4096), zeros(rows, dtype=F32), zeros(rows, 4096)]
        args.append(zeros(4096, dtype=F32))
        assert record.artifact.workspace_bytes(args) == blocks * 4096 * 4
        assert record.run(args, workspace=WORKSPACE) == 0, record.error
        *row, finish = launches(record)
        assert [c["grid"] for c in row] == ([[blocks, 1, 1]] if rows else [])
        assert (finish["kernel"], finish["grid"]) == ("drms_norm_finish_column", [128, 1, 1])
        f = record.parameters(harness.finish_type(1, 1), len(row))
        assert (f.length, f.operands[0].extent, f.operands[0].data) == (4096, blocks, WORKSPACE)


def test_partial_results_are_read_where_they_were_left() -> None:
    """Each in its place, as many as there were blocks."""
    record = started("dlayer_norm")
    rows, width = 100, 64
    args = [zeros(rows, width), zeros(rows, width), zeros(width), *(zeros(rows, dtype=F32) for _ in range(2))]
    args += [zeros(rows, width), zeros(width, dtype=F32), zeros(width, dtype=F32)]
    assert record.run(args, workspace=WORKSPACE) == 0, record.error
    plan = schedule("dlayer_norm").steps[0]
    p = record.parameters(launch_type(plan), 0).part0
    written = [p.tensors[i].data for i, access in enumerate(plan.parts[0].accesses) if access.slot is not None]
    f = record.parameters(harness.finish_type(2, 2), 1)
    assert [f.operands[i].data for i in range(2)] == written
    assert len(set(written)) == 2
    assert f.operands[0].extent == launches(record)[0]["grid"][0] == p.blocks


def test_parts_of_a_kernel_share_a_launch() -> None:
    """Heads of q beside those of k and v: blocks for each, partials for each head of a row, and one finish kernel."""
    record = started("dqkv")
    b, t, hq, hk, d = 2, 5, 32, 8, 128
    heads = [zeros(b, h, t, d) for h in (hq, hk, hk)]
    z, d_acc = zeros(b * t, (hq + 2 * hk) * d), zeros(b * t, (hq + 2 * hk) * d)
    args = [*heads, z, zeros(b * t, dtype=F32), zeros(b * t, dtype=torch.int32), *_tables(9)]
    assert record.run([*args, d_acc, zeros(b * t, dtype=F32)], workspace=WORKSPACE) == 0, record.error
    (row, finish), plan = launches(record), schedule("dqkv").steps[0]
    assert finish["kernel"] == "dqkv_finish_row"
    p = record.parameters(launch_type(plan))
    assert (p.part0.rows, p.part1.rows, p.part0.threads, p.part1.threads) == (b * t * hq, b * t * hk, 8, 8)
    assert (row["grid"], row["block"]) == ([p.part0.blocks + p.part1.blocks, 1, 1], [256, 1, 1])
    written = {x.data - d_acc.data_ptr() for i in range(2) for x in _written(plan.parts[i], getattr(p, f"part{i}"))}
    heads_begin = (0, 2 * hq * d, 2 * (hq + hk) * d)
    assert written == {first + half for first in heads_begin for half in (0, d)}
    left = [(getattr(p, f"part{i}").tensors[k].data, (hq, hk)[i]) for i, part in enumerate(plan.parts)
            for k, access in enumerate(part.accesses) if access.slot is not None]  # fmt: skip
    f = record.parameters(harness.finish_type(len(left) + 1, 1), 1)
    found = [f.operands[i] for i in range(len(left))]
    assert sorted((o.data, o.extent) for o in found) == sorted(left)
    assert f.length == b * t


def _written(part: RowPart, p: Any) -> list[Any]:
    """Where the halves of its first heads' gradients go."""
    return [p.tensors[w.access] for w in part.writings if part.accesses[w.access].arg == "d_acc"]


def test_a_map_cuts_long_rows_into_parts() -> None:
    record = started("scaled")
    assert record.artifact.describe["programs"][0]["kernels"][0]["kind"] == "map"
    expected = ((2048, "1", 1, 1), (2056, "4", 1, 2), (40000, "4", 5, 1), (40001, "any", 20, 1))
    for width, kernel, parts, teams in expected:
        record.reset()
        assert record.run([zeros(4, width, dtype=F32), zeros(4, width)]) == 0, record.error
        assert shapes(record) == [(f"scaled_map_{kernel}", [4 * parts // teams, 1, 1], [256, 1, 1])]
        assert record.parameters(launch_type(schedule("scaled").steps[0])).part0.chunks == parts


def test_rows_in_place() -> None:
    """A row is read before it is written, by the threads that write it."""
    record = started("gemma_post_norm")
    y, x = zeros(8, 64), zeros(8, 64)
    args: list[Any] = [y, x, zeros(64), None, x, zeros(8, dtype=F32)]
    assert record.run(args) == 0, record.error
    assert record.run([y, x, zeros(64), None, x.as_strided((8, 64), (64, 1), 0)[:, :], y.view(F32).flatten()[:8]]) == 1
    assert "shares memory" in record.error
    plan = schedule("gemma_post_norm")
    assert can_lower(plan, args)


# -- several kernels -------------------------------------------------------------------------------------------------


def block_args(m: int, d: int, f: int) -> list[Any]:
    return [zeros(m, d), zeros(d), zeros(f, d), zeros(f, d), zeros(d, f), None, zeros(m, d)]


def test_steps_run_in_order_on_one_stream() -> None:
    record = started("mlp_block")
    args = block_args(300, 64, 136)
    assert record.run(args, workspace=WORKSPACE, stream=0x77) == 0, record.error
    kernels = [c["kernel"] for c in launches(record)]
    assert [k.split("_")[3] for k in kernels] == ["row", "gemm", "gemm"]
    assert {c["stream"] for c in launches(record)} == {0x77}
    record.reset()
    assert record.run(args, workspace=WORKSPACE) == 0
    assert {c["call"] for c in record.calls()} == {"encode", "launch"}  # a graph can be captured


def test_only_what_follows_a_kernel_of_its_call_begins_early() -> None:
    """The first kernel waits for all that is in the stream: what the caller has there may wait for less."""
    record = started("chain")
    args = [zeros(5, 64), zeros(128, 64), zeros(64, 128), zeros(8, 64), zeros(8, 8), zeros(5, 8)]
    for _ in range(2):
        record.reset()
        assert record.run(args, workspace=WORKSPACE) == 0, record.error
        assert [c["follows"] for c in launches(record)] == [0, 1, 1, 1]
        assert {c["cluster"][2] for c in launches(record)} == {1}
    record = started("drms_norm")
    sizes = {"M": 40, "D": 64}
    args = [zeros(*(sizes[n] for n in a.axes), dtype=torch_dtype(a.dtype)) for a in schedule("drms_norm").args]
    assert record.run(args, workspace=WORKSPACE) == 0, record.error
    assert [(c["kernel"].split("_")[2], c["follows"]) for c in launches(record)] == [("row", 0), ("finish", 1)]


def test_every_kernel_waits_before_it_touches_memory() -> None:
    """A kernel that did not would not have to wait for its predecessor, nor, through it, for those before."""
    files = {f.name: f.read_text() for f in templates_dir().glob("*.h")}
    for name, before in (("row.h", "__shared__ float2 slots"), ("mainloop.h", "constexpr int kLast")):
        at = files[name].index("follow_predecessor();")
        assert files[name][at:].split("\n")[1].strip().startswith(before)
    for plan in (schedule("drms_norm").steps[0], schedule("residual_rstd").steps[0]):
        for finishing in plan.finishings:
            first = finish_kernel(plan, finishing).split("\n")[1]
            assert first.strip() == "coda::follow_predecessor();"
    code = "".join(line.split("//")[0] for text in files.values() for line in text.splitlines())
    assert "__ldg" not in code and "__restrict" not in code and ".nc" not in code


def test_a_product_reads_the_partials_that_the_one_before_has_left() -> None:
    """[count, rows], as many as that has tile columns at these sizes; and no finish kernel between."""
    record = started("normed")
    first, second = schedule("normed").steps
    assert isinstance(first, Plan) and isinstance(second, Plan)
    for m, d in ((300, 520), (129, 264)):
        args = [zeros(m, 64), zeros(d, 64), zeros(d), zeros(136, d), torch.tensor(1e-6), zeros(m, 136)]
        args.append(zeros(m, dtype=F32))
        record.reset()
        assert record.run(args, workspace=WORKSPACE) == 0, record.error
        one, _ = launches(record)
        width = int(one["kernel"].rsplit("x", 1)[1].split("_")[0])
        outputs, operands = len(first.stores), len(second.operands)
        p = record.parameters(harness.launch_type(len(first.tile_operands), len(first.operands), outputs), 0)
        q = record.parameters(harness.launch_type(len(second.tile_operands), operands, len(second.stores)), 1)
        left = p.outputs[next(i for i, s in enumerate(first.stores) if s.kind == "row")]
        read = q.operands[next(i for i, o in enumerate(second.operands) if o.partial)]
        assert (left.row, left.column) == (read.row, read.column) == (1, m)
        assert (read.data, read.extent) == (left.data, -(-d // width))
        told = q.operands[next(i for i, o in enumerate(second.operands) if o.size is not None)]
        assert told.integer == d
        stored = q.outputs[next(i for i, s in enumerate(second.stores) if s.kind == "each")]
        assert (stored.data, stored.row) == (args[-1].data_ptr(), 1)
        assert record.artifact.workspace_bytes(args) >= 2 * m * d + 4 * m * read.extent


def test_temporaries_lie_in_the_workspace() -> None:
    m, d, f = 300, 64, 136
    record = started("mlp_block")
    args = block_args(m, d, f)
    sizes = {"r": m * 4, "t": m * d * 2, "y": m * f * 2}
    need = sum(-(-size // 256) * 256 for size in sizes.values())
    assert record.artifact.workspace_bytes(args) == need
    assert record.run(args, workspace=WORKSPACE, size=need - 1) == 1
    assert "this call needs" in record.error
    assert record.run(args, workspace=WORKSPACE, size=need) == 0
    bases = {c["base"] for c in record.calls() if c["call"] == "encode"} - {x.data_ptr() for x in args if x is not None}
    assert len(bases) == 2 and all(WORKSPACE <= at < WORKSPACE + need for at in bases)  # t and y


def test_rows_of_temporaries_are_padded_for_tma() -> None:
    """N = 132: rows of a are 264 bytes, and the next product reads them 272 bytes apart."""
    record = started("chain")
    args = [zeros(5, 64), zeros(132, 64), zeros(64, 136)[:, :132], zeros(8, 64), zeros(8, 8), zeros(5, 8)]
    assert record.run(args, workspace=WORKSPACE) == 0, record.error
    assert [c["strides"] for c in record.calls() if c["call"] == "encode" and c["dims"] == [132, 5]] == [[272]]


def test_buffers_are_shared_by_tensors_that_do_not_meet() -> None:
    a, b, c = schedule("chain").temporaries
    assert (a.buffer, b.buffer, c.buffer) == (0, 1, 0)
    record = started("chain")
    m, k, n, l, p = 300, 64, 128, 32, 256
    args = [zeros(m, k), zeros(n, k), zeros(l, n), zeros(p, l), zeros(8, p), zeros(m, 8)]
    first, second = (-(-m * width * 2 // 256) * 256 for width in (max(n, p), l))
    assert record.artifact.workspace_bytes(args) == first + second
    assert record.run(args, workspace=WORKSPACE) == 0, record.error
    read = [call["base"] for call in record.calls() if call["call"] == "encode"][::2]
    assert read == [args[0].data_ptr(), WORKSPACE, WORKSPACE + first, WORKSPACE]


LIVES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([1, 2, 4, 7])), max_size=12)


@given(LIVES)
def test_no_two_lives_meet_in_a_buffer(drawn: list[tuple[int, int, int]]) -> None:
    """And tensors of one size take no more memory than the most that are alive at a time."""
    lives = {str(i): (min(a, b), max(a, b), size) for i, (a, b, size) in enumerate(drawn)}
    chosen = share(lives)
    for one, (first, last, _) in lives.items():
        for other, (begin, end, _) in lives.items():
            assert one == other or chosen[one] != chosen[other] or last < begin or end < first
    at_once = [sum(first <= step <= last for first, last, _ in lives.values()) for step in range(10)]
    assert len(set(chosen.values())) == max(at_once, default=0)


def test_a_schedule_by_hand() -> None:
    """Kernels of programs that share names; what is no argument of the whole is a temporary."""
    whole = schedule("mlp_block")
    again = schedule_steps(whole.program, whole.args, whole.steps)
    assert again == whole
    assert [type(t) for t in again.temporaries] == [Temporary] * 3


def test_checks_are_those_of_the_arguments() -> None:
    plan = schedule("mlp_block")
    args = block_args(300, 64, 136)
    assert can_lower(plan, args)
    args[2] = zeros(136, 72)[:, :64].T.contiguous().T
    refusal = can_lower(plan, args)
    assert "w_gate" in str(refusal)
    record = started("mlp_block")
    assert record.run(args, workspace=WORKSPACE) == 1
    assert record.error == str(refusal)


# -- launches of several products ----------------------------------------------------------------------------------


def test_products_with_one_right_operand_are_one_launch() -> None:
    """Their tiles lie below each other; each member has its own operand, rows and output."""
    plan = schedule("gradients")
    assert [step.kind for step in plan.steps] == ["gemm", "gemm"] and plan.members == (2, 0)
    record = started("gradients")
    t, k, m, n = 64, 136, 200, 520
    a, b, x = zeros(t, m), zeros(t, n), zeros(t, k)
    da, db = zeros(m, k), zeros(n, k)
    assert record.run([a, b, x, zeros(k), da, db], workspace=WORKSPACE) == 0, record.error
    (launch,) = launches(record)
    tile = harness.TILES[0]
    rows = [-(-size // (tile.m * tile.cluster_m)) * tile.cluster_m for size in (m, n)]
    clusters = sum(rows) // tile.cluster_m * -(-k // (tile.n * tile.cluster_n))
    assert launch["grid"] == [tile.cluster_m, tile.cluster_n * min(clusters, 64), 1]
    p = record.parameters(harness.launches_type(2, 0, 1, 1, 1))
    assert [(each.m, each.n, each.k[0]) for each in p.each] == [(m, k, t), (n, k, t)]
    assert list(p.first) == [0, rows[0]]
    assert [each.outputs[0].data for each in p.each] == [da.data_ptr(), db.data_ptr()]
    assert p.each[0].schedule.clusters_m == sum(rows) // tile.cluster_m
    encoded = [c["base"] for c in record.calls() if c["call"] == "encode"]
    assert encoded == [a.data_ptr(), x.data_ptr(), b.data_ptr(), x.data_ptr()]


def test_products_that_go_on_differently_are_launches_of_their_own() -> None:
    text = "program other" + PROGRAMS.split("program gradients")[1].replace("g * (b.T @ x)", "2 * (b.T @ x)")
    assert lower_program(load(text).programs["other"]).members == (1, 1)


@pytest.mark.parametrize(
    ("rows", "positions", "error"),
    [
        *((rows, positions, None) for rows, positions in ((6, 3), (3, 3), (0, 3), (0, 0))),
        (7, 3, "B*T = 7 is not a multiple of T = 3"),
        (2, 3, "B*T = 2 is not a multiple of T = 3"),
        (6, 0, "B*T = 6 is not a multiple of T = 0"),
    ],
)
def test_a_size_that_is_a_quotient(rows: int, positions: int, error: str | None) -> None:
    """B is no dim of any argument: it is that of x over that of e, on the host as in ``can_lower``."""
    record = started("positions")
    args = [zeros(rows, 8), zeros(positions, 8), zeros(rows, 8)]
    status = record.run(args)
    assert (status == 0) == (error is None), record.error
    reason = can_lower(schedule("positions"), args)
    assert bool(reason) == (error is None)
    if error is not None:
        assert record.error == str(reason) == error
    elif rows:
        (launch,) = launches(record)
        assert launch["kernel"].startswith("positions")
