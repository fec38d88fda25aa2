"""What ``NAME_run`` asks of CUDA: tensor maps, kernel parameters, grids. Over a fake runtime, so no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coda.target import TILES, Tile
from coda.target.legality import as_schedule
from coda.target.tiles import orders_of
from tests.abi.harness import Recorder, finish_type, host_of, launch_type, plan, recorder

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALF = 6  # CUtensorMapDataType of f16
SWIZZLE = {64: 2, 128: 3}  # bytes of a box row -> CUtensorMapSwizzle


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def started(name: str) -> Recorder:
    record = recorder(name)
    record.reset()
    return record


def maps(record: Recorder) -> list[dict]:
    return [c for c in record.calls() if c["call"] == "encode"]


def launches(record: Recorder) -> list[dict]:
    return [c for c in record.calls() if c["call"] == "launch"]


def test_product_maps_and_grid() -> None:
    record = started("plain")
    x, w, y = zeros(300, 256), zeros(520, 256), zeros(300, 520)
    assert record.run([x, w, y], stream=77) == 0, record.error
    a, b = maps(record)
    assert (a["base"], a["dims"], a["strides"], a["box"], a["swizzle"]) == (
        x.data_ptr(),
        [256, 300],
        [512],
        [64, 128],
        3,
    )
    assert (b["base"], b["dims"], b["strides"], b["box"], b["swizzle"]) == (
        w.data_ptr(),
        [256, 520],
        [512],
        [64, 64],
        3,
    )
    (launch,) = launches(record)
    assert launch["kernel"] == "plain_gemm_128x128"
    assert (launch["grid"], launch["block"], launch["cluster"]) == ([2, 10, 1], [384, 1, 1], [2, 1, 1])
    assert (launch["shared"], launch["stream"]) == (232448, 77)
    p = record.parameters(launch_type(0, 0, 1))
    assert (p.m, p.n, p.k[0], p.swap_lanes, p.a[0][0], p.b[0][0]) == (300, 520, 256, 0, 1, 2)
    s = p.schedule
    assert (s.clusters_m, s.clusters_n, s.swizzle, s.along_n, s.grid_clusters) == (2, 5, 2, 1, 10)
    out = p.outputs[0]
    assert (out.data, out.row, out.column, out.lane, out.vector) == (y.data_ptr(), 520, 1, 0, 1)


def test_grid_is_what_is_resident() -> None:
    """64 clusters, not 132 / 2: some GPCs have an odd number of multiprocessors."""
    record = started("plain")
    assert record.run([zeros(8192, 64), zeros(4096, 64), zeros(8192, 4096)]) == 0
    (launch,) = launches(record)
    assert launch["grid"] == [2, 64, 1]
    s = record.parameters(launch_type(0, 0, 1)).schedule
    assert (s.clusters_m, s.swizzle) == (32, 8)


def test_variant_has_least_waves() -> None:
    record = started("plain")
    record.run([zeros(8192, 8), zeros(4096, 8), zeros(8192, 4096)])
    waves = {"128x128": 16, "128x160": 13, "128x192": 11, "128x256_coop": 8, "192x128": 11}
    cost = {tile.name: tile.cost * waves[tile.name] for tile in TILES}
    assert launches(record)[0]["kernel"] == "plain_gemm_" + min(cost, key=lambda t: cost[t])


@pytest.mark.parametrize("tile", orders_of(TILES[0]), ids=lambda t: t.name)
def test_the_order_of_the_tiles_is_the_variants_and_no_group_is_wider_than_the_grid(tile: Tile, tmp_path: Path) -> None:
    record = Recorder(host_of(tmp_path, as_schedule(plan("plain")), fake=True, tiles=[tile]))
    for m, n in ((8192, 4096), (600, 300)):
        record.reset()
        record.run([zeros(m, 8), zeros(n, 8), zeros(m, n)])
        (launch,) = launches(record)
        assert launch["kernel"] == "plain_gemm_128x128"  # whose device code knows no order
        s = record.parameters(launch_type(0, 0, 1)).schedule
        assert (s.clusters_m, s.clusters_n) == (-(-m // 256), -(-n // 128))
        assert s.along_n == (tile.along == "n")
        assert s.swizzle == min(tile.swizzle, s.clusters_m if tile.along == "n" else s.clusters_n)


def test_warm_calls_only_encode_and_launch() -> None:
    record = started("plain")
    args = [zeros(128, 64), zeros(64, 64), zeros(128, 64)]
    record.run(args)
    record.reset()
    record.run(args)
    assert [c["call"] for c in record.calls()] == ["encode", "encode", "launch"]


def test_operands_of_every_kind() -> None:
    record = started("bias_scale")
    x, w, bias, r, y = zeros(40, 64), zeros(96, 64), zeros(96), zeros(40, dtype=F32), zeros(40, 96)
    scale = torch.tensor(3.5)
    assert record.run([x, w, bias, r, scale, y], [0, 0, 0, 0, -1, 0]) == 0, record.error
    b, row, s = record.parameters(launch_type(0, 3, 1)).operands
    assert (b.data, b.row, b.column) == (bias.data_ptr(), 0, 1)
    assert (row.data, row.row, row.column) == (r.data_ptr(), 1, 0)
    assert (s.data or 0, s.value) == (0, 3.5)


def test_absent_operands_and_defaults() -> None:
    record = started("bias_scale")
    assert record.run([zeros(40, 64), zeros(96, 64), None, zeros(40, dtype=F32), None, zeros(40, 96)]) == 0
    bias, _, scale = record.parameters(launch_type(0, 3, 1)).operands
    assert (bias.data or 0, bias.value, scale.data or 0, scale.value) == (0, 0.0, 0, 2.0)


def test_scalar_in_device_memory() -> None:
    record = started("bias_scale")
    scale = torch.tensor(3.5)
    record.run([zeros(40, 64), zeros(96, 64), None, zeros(40, dtype=F32), scale, zeros(40, 96)])
    assert record.parameters(launch_type(0, 3, 1)).operands[2].data == scale.data_ptr()


def test_partial_results_of_another_program_are_read_as_they_lie() -> None:
    """Their number and pitch are those of the tensor; not more of them than columns, and as many rows as there are."""
    record = started("finished")
    m, d, n = 300, 520, 64
    buffer = zeros(5, m + 4, dtype=F32)
    stats, rest = buffer[:, :m], [zeros(n, d), None, zeros(m, n)]
    assert record.run([zeros(m, d), stats, *rest]) == 0, record.error
    read = record.parameters(launch_type(0, 3, 1)).operands[0]
    assert (read.data, read.extent, read.row, read.column) == (stats.data_ptr(), 5, 1, m + 4)
    for shape, reason in (
        ((m,), "operand 'stats' has 1 dims (shape [300]), the program declares f32[partials, M]"),
        ((m, 5), "operand 'stats' has shape [300, 5]: dim 1 must be 300 (M, fixed by 'h')"),
        ((0, m), "dim 0 counts partial results of partial[sum, D]: there are 1 to 520"),
        ((d + 1, m), "dim 0 counts partial results of partial[sum, D]: there are 1 to 520"),
    ):
        assert record.run([zeros(m, d), zeros(*shape, dtype=F32), *rest]) == 1
        assert record.error.endswith(reason), record.error


def test_statistics_go_through_the_workspace() -> None:
    record = started("stats")
    m, d, k = 300, 520, 256
    h, total, partial = zeros(m, d), zeros(m, dtype=F32), zeros(5, m, dtype=F32)
    args = [zeros(m, k), zeros(d, k), zeros(m, d), h, total, partial]
    assert record.artifact.workspace_bytes(args) == 5 * m * 4 // 256 * 256 + 256
    assert record.run(args, workspace=0x100000, size=1 << 20) == 0, record.error
    _, finish = launches(record)
    assert (finish["kernel"], finish["grid"], finish["block"]) == ("stats_finish_row", [10, 1, 1], [32, 16, 1])
    p = record.parameters(launch_type(1, 1, 3))
    assert [o.data for o in p.outputs] == [h.data_ptr(), partial.data_ptr(), 0x100000]
    assert [(o.row, o.column) for o in p.outputs[1:]] == [(1, m), (1, m)]
    f = record.parameters(finish_type(1, 1), 1)
    assert (f.length, f.operands[0].extent, f.extent) == (m, 5, d)
    assert (f.operands[0].data, f.outputs[0].data, f.outputs[0].row) == (0x100000, total.data_ptr(), 1)


def test_tile_operand_map() -> None:
    record = started("stats")
    m, d, k = 300, 520, 256
    x = zeros(m, d)
    record.run([zeros(m, k), zeros(d, k), x, zeros(m, d), zeros(m, dtype=F32), zeros(5, m, dtype=F32)])
    tile = maps(record)[2]
    assert (tile["base"], tile["dims"], tile["strides"], tile["box"]) == (x.data_ptr(), [d, m], [2 * d], [64, 64])


def test_column_reduction_counts_bands() -> None:
    record = started("columns")
    m, n, k = 300, 136, 64
    mean = zeros(n, dtype=F32)
    args = [zeros(m, k), zeros(n, k), zeros(m, n), mean]
    assert record.run(args) == 0, record.error
    p = record.parameters(launch_type(0, 0, 2))
    assert (p.outputs[1].row, p.outputs[1].column) == (n, 1)
    f = record.parameters(finish_type(1, 1), 1)
    assert (f.length, f.operands[0].extent, f.extent) == (n, 19, m)
    assert (f.outputs[0].row, f.outputs[0].column) == (0, 1)


def test_operands_whose_last_dim_is_not_contracted() -> None:
    """dy @ w and dy.T @ x: boxes of 64 x 64 over the matrix as it is stored."""
    record = started("dgrad")
    dy, w = zeros(300, 256), zeros(256, 520)
    assert record.run([dy, w, zeros(300, 520)]) == 0, record.error
    a, b = maps(record)
    assert (a["dims"], a["box"]) == ([256, 300], [64, 128])
    assert (b["base"], b["dims"], b["strides"], b["box"], b["swizzle"]) == (
        w.data_ptr(), [520, 256], [1040], [64, 64], 3,
    )  # fmt: skip
    record = started("wgrad")
    dy, x = zeros(300, 256, dtype=F16), zeros(300, 520, dtype=F16)
    assert record.run([dy, x, zeros(256, 520, dtype=F32)]) == 0, record.error
    a, b = maps(record)
    assert (a["dims"], a["strides"], a["box"], a["type"]) == ([256, 300], [512], [64, 64], HALF)
    assert (b["dims"], b["strides"], b["box"], b["type"]) == ([520, 300], [1040], [64, 64], HALF)
    p = record.parameters(launch_type(0, 0, 1))
    assert (p.m, p.n, p.k[0]) == (256, 520, 300)


def test_blocks_of_a_tile_that_has_no_whole_swizzles_are_narrow(tmp_path: Path) -> None:
    """160 columns are five blocks of 32, 64 bytes wide."""
    (tile,) = (t for t in TILES if t.n == 160)
    record = Recorder(host_of(tmp_path, as_schedule(plan("dgrad")), fake=True, tiles=[tile]))
    assert record.run([zeros(300, 256), zeros(256, 520), zeros(300, 520)]) == 0, record.error
    _, b = maps(record)
    assert (b["dims"], b["box"], b["swizzle"]) == ([520, 256], [32, 64], SWIZZLE[64])


def test_weights_of_strips_come_in_runs_in_the_order_of_threads() -> None:
    """Rows 4q + 2j + e of a run of 16 as rows 8j + 2q + e: where a thread's accumulators are neighbours in memory."""
    record = started("rotated")
    k, m = 256, 300
    wq, wv, table = zeros(288, k + 8)[:, :k], zeros(96, k), zeros(m, 48, dtype=F32)
    args = [zeros(m, k), wq, wv, table, table, zeros(m, 3, 96), zeros(m, 1, 96, dtype=F32)]
    assert record.run(args) == 0, record.error
    _, q, _, v = maps(record)
    for weight, b in ((wq, q), (wv, v)):
        row = 2 * weight.stride(0)
        assert (b["base"], b["dims"]) == (weight.data_ptr(), [k, 2, 4, 2, len(weight) // 16])
        assert (b["strides"], b["box"], b["swizzle"]) == ([row, 4 * row, 2 * row, 16 * row], [64, 2, 4, 2, 1], 3)


def test_an_accumulated_tensor_is_read_and_written() -> None:
    record = started("accumulated")
    dw, db = zeros(256, 520, dtype=F32), zeros(520, dtype=F32)
    assert record.run([zeros(300, 256), zeros(300, 520), dw, db]) == 0, record.error
    tile = maps(record)[2]
    assert (tile["base"], tile["dims"], tile["strides"], tile["box"]) == (dw.data_ptr(), [520, 256], [2080], [32, 64])
    p = record.parameters(launch_type(1, 1, 2))
    assert (p.operands[0].data, p.outputs[0].data) == (dw.data_ptr(), dw.data_ptr())
    f = record.parameters(finish_type(2, 1), 1)
    assert (f.operands[1].data, f.outputs[0].data) == (db.data_ptr(), db.data_ptr())


def test_an_accumulated_tensor_shares_no_memory() -> None:
    record = started("accumulated")
    both = zeros(600, 520)
    assert record.run(
        [zeros(600, 256), both, both.view(F32).view(-1)[: 256 * 520].view(256, 520), zeros(520, dtype=F32)]
    )
    assert record.error == "operand 'dw' shares memory with operand 'x'"


def test_a_sum_of_products_has_maps_for_each_term() -> None:
    record = started("summed")
    m, n, k, r = 300, 520, 256, 16
    assert record.run([zeros(m, k), zeros(n, k), zeros(m, r), zeros(n, r), zeros(m, n)]) == 0, record.error
    assert [t["dims"] for t in maps(record)] == [[k, m], [k, n], [r, m], [r, n]]
    p = record.parameters(launch_type(0, 0, 1, terms=2))
    assert ([t[0] for t in p.a], [t[0] for t in p.b], list(p.k)) == ([1, 3], [2, 4], [k, r])


@pytest.mark.parametrize("swapped", [False, True])
def test_two_weights_are_one_map(swapped: bool) -> None:
    record = started("gated")
    m, f, d = 64, 48, 128
    both = zeros(2 * f, d)
    low, high = both[:f], both[f:]
    gate, up = (high, low) if swapped else (low, high)
    out, z = zeros(m, f), zeros(m, 2 * f)
    assert record.run([zeros(m, d), gate, up, out, z]) == 0, record.error
    b = maps(record)[1]
    assert b["base"] == low.data_ptr()
    assert (b["dims"], b["strides"]) == ([d, 8, 2, f // 8], [2 * d, 2 * d * f, 16 * d])
    assert b["box"] == [64, 8, 2, 4]
    p = record.parameters(launch_type(0, 0, 2))
    assert (p.n, p.swap_lanes) == (2 * f, int(swapped))
    assert [(o.row, o.column, o.lane) for o in p.outputs] == [(f, 1, 0), (2 * f, 1, f)]


def test_concatenated_weight_and_tile_operand() -> None:
    record = started("halves")
    m, f, d = 64, 48, 128
    z0 = zeros(m, 2 * f)
    assert record.run([zeros(m, d), zeros(2 * f, d), z0, zeros(m, f)]) == 0, record.error
    _, b, tile = maps(record)
    assert (b["dims"], b["strides"]) == ([d, 8, 2, f // 8], [2 * d, 2 * d * f, 16 * d])
    assert (tile["dims"], tile["strides"], tile["box"]) == ([f, 2, m], [2 * f, 4 * f], [64, 1, 64])
    assert record.parameters(launch_type(1, 1, 1)).operands[0].lane == f


def test_interleaved_weight_and_output() -> None:
    record = started("interleaved")
    m, f, d = 64, 48, 128
    assert record.run([zeros(m, d), zeros(2 * f, d), zeros(m, f), zeros(m, 2 * f)]) == 0, record.error
    b = maps(record)[1]
    assert (b["dims"], b["strides"]) == ([d, 8, 2, f // 8], [4 * d, 2 * d, 32 * d])
    z = record.parameters(launch_type(0, 0, 2)).outputs[1]
    assert (z.row, z.column, z.lane, z.vector) == (2 * f, 2, 1, 1)


@pytest.mark.parametrize(
    ("output", "vector"),
    [
        (zeros(40, 96), 1),
        (zeros(40, 104)[:, :96], 1),
        (zeros(40, 98)[:, :96], 0),  # rows not a multiple of 16 bytes
        (zeros(40 * 96 + 1)[1:].view(40, 96), 0),  # base not aligned
        (zeros(96, 40).T, 0),  # column-major
    ],
)
def test_wide_stores_only_where_aligned(output: torch.Tensor, vector: int) -> None:
    record = started("plain")
    assert record.run([zeros(40, 64), zeros(96, 64), output]) == 0, record.error
    out = record.parameters(launch_type(0, 0, 1)).outputs[0]
    assert (out.row, out.column, out.vector) == (*output.stride(), vector)


def test_narrow_output_is_stored_by_element() -> None:
    record = started("plain")
    assert record.run([zeros(40, 64), zeros(82, 64), zeros(40, 82)]) == 0, record.error
    assert record.parameters(launch_type(0, 0, 1)).outputs[0].vector == 0


def test_one_row_has_a_legal_pitch_whatever_its_stride() -> None:
    record = started("plain")
    x = torch.as_strided(zeros(64), (1, 64), (7, 1))
    assert record.run([x, zeros(96, 64), zeros(1, 96)]) == 0, record.error
    assert maps(record)[0]["strides"] == [128]


@pytest.mark.parametrize("workspace", [(0x100000, 16), (0x100010, 1 << 20), (0, 1 << 20)])
def test_unfit_workspace_is_refused(workspace: tuple[int, int]) -> None:
    record = started("stats")
    args = [zeros(64, 64), zeros(64, 64), zeros(64, 64), zeros(64, 64), zeros(64, dtype=F32), zeros(1, 64, dtype=F32)]
    assert record.run(args, workspace=workspace[0], size=workspace[1]) == 1
    assert "workspace" in record.error
    assert not launches(record)


def test_no_rows_still_finish_column_reductions() -> None:
    """B1: no GEMM; the mean of nothing is what the finish kernel makes of no partials."""
    record = started("columns")
    assert record.run([zeros(0, 64), zeros(96, 64), zeros(0, 96), zeros(96, dtype=F32)]) == 0, record.error
    (launch,) = launches(record)
    assert launch["kernel"] == "columns_finish_column"
    f = record.parameters(finish_type(1, 1))
    assert (f.length, f.operands[0].extent, f.extent) == (96, 0, 0)


def test_no_rows_and_nothing_to_finish_launches_nothing() -> None:
    record = started("plain")
    assert record.run([zeros(0, 64), zeros(96, 64), zeros(0, 96)]) == 0
    assert not launches(record)


def test_empty_contraction_is_refused() -> None:
    record = started("plain")
    assert record.run([zeros(8, 0), zeros(16, 0), zeros(8, 16)]) == 1
    assert record.error == "the contracted axis K is empty: there is no product to compute"


def test_host_tensors_are_refused() -> None:
    record = started("plain")
    assert record.run([zeros(8, 64), zeros(16, 64), zeros(8, 16)], [0, -1, 0]) == 1
    assert record.error == "'w' is in host memory (DLPack device type 1); the kernel needs CUDA memory"


def test_totals_go_through_values_of_rows() -> None:
    """Slots of the workspace: two f32 for each row and tile, the logit picked, what each row adds to the totals."""
    record = started("loss")
    m, v, d = 300, 520, 256
    nll, mean = zeros(m, dtype=F32), torch.zeros((), dtype=F32)
    args = [zeros(m, d), zeros(v, d), zeros(m, dtype=torch.int64), None, nll, mean]
    round_up = lambda size: -(-size // 256) * 256  # noqa: E731
    sizes = [round_up(5 * m * 8), *[round_up(m * 4)] * 3]
    slots = [0x100000 + sum(sizes[:i]) for i in range(4)]
    assert record.artifact.workspace_bytes(args) == sum(sizes)
    assert record.run(args, workspace=0x100000, size=1 << 20) == 0, record.error
    _, row, total = launches(record)
    assert (row["kernel"], row["grid"]) == ("loss_finish_row", [10, 1, 1])
    assert (total["kernel"], total["grid"], total["block"]) == ("loss_finish_total", [1, 1, 1], [32, 16, 1])
    states, picked = record.parameters(launch_type(0, 1, 2)).outputs
    assert [(o.data, o.row, o.column) for o in (states, picked)] == [(slots[0], 1, m), (slots[1], 1, m)]
    f = record.parameters(finish_type(4, 3), 1)
    assert (f.length, f.operands[0].extent, f.extent) == (m, 5, v)
    assert [o.data for o in f.operands[:3]] == [slots[0], slots[1], args[2].data_ptr()]
    assert (f.operands[3].data or 0, f.operands[3].integer) == (0, -100)
    assert [o.data for o in f.outputs] == [nll.data_ptr(), slots[2], slots[3]]
    t = record.parameters(finish_type(2, 1), 2)
    assert (t.length, t.operands[0].extent, t.extent) == (1, m, m)
    assert ([o.data for o in t.operands], t.outputs[0].data) == (slots[2:], mean.data_ptr())


def test_integer_scalars_are_exact() -> None:
    record = started("loss")
    m, v, d = 40, 96, 64
    ignore = torch.tensor(2**60 + 1)
    args = [zeros(m, d), zeros(v, d), zeros(m, dtype=torch.int64), ignore, zeros(m, dtype=F32), torch.zeros(())]
    assert record.run(args, [0, 0, 0, -1, 0, 0]) == 0, record.error
    assert record.parameters(finish_type(4, 3), 1).operands[3].integer == 2**60 + 1
