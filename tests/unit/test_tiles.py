"""Tiles: what is offered, by name and in which order, and what a tuner measures of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import coda
from coda.errors import CodaError
from coda.target import TILES, Tile, candidates, parse_tile, rank_in, rank_tiles, variants
from coda.target.blocks import lower_program
from coda.target.emit import device_source
from coda.target.legality import legal_tile
from coda.target.plan import ORDERS, Major, Plan
from coda.target.tiles import orders_of

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.coda"))
SIZES = (1, 64, 520, 8192)


def gemms() -> list[Plan]:
    """The products of all examples that are lowered."""
    found = []
    for path in EXAMPLES:
        for program in coda.parse(path).programs.values():
            try:
                found += lower_program(program).gemms
            except CodaError:
                continue
    assert len(found) > 30
    return found


GEMMS = gemms()


def sizes_of(plan: Plan, m: int) -> dict[str, int]:
    """``m`` rows; every other axis 4096."""
    rows = {axis.name for axis in plan.rows}
    symbols = {s.name for axis in plan.program.axes for s in axis.size.free_symbols}
    return {name: m if name in rows else 4096 for name in symbols}


@pytest.mark.parametrize("m", SIZES)
def test_every_candidate_is_legal_and_fits_whole(m: int) -> None:
    """Cases B7 and B10: what divides is proved here; that it computes is tests/gpu, at every tile."""
    for plan in GEMMS:
        found = candidates(plan, sizes_of(plan, m))
        assert 1 <= len(found) <= len(TILES) * len(ORDERS)
        assert len(set(found)) == len(found)
        for tile in found:
            assert legal_tile(tile, plan), plan.name
            (variant,) = variants(plan, [tile])
            assert tile.n % (8 * plan.lanes) == 0
            assert variant.columns % 16 == 0  # the epilogue's last step
            assert tile.m % tile.slab_rows == 0
            assert tile.m * tile.n <= 128 * (192 if tile.schedule == "pingpong" else 256)  # accumulators
            if plan.heads is not None:
                assert tile.n % plan.heads.unit == 0
            if plan.b_major is Major.MN:
                assert tile.n % 32 == 0


def test_the_first_candidate_is_what_the_formula_chooses() -> None:
    for plan in GEMMS:
        sizes = sizes_of(plan, 8192)
        assert candidates(plan, sizes)[0] == rank_tiles(plan, sizes)[0]


@pytest.mark.parametrize(
    ("m", "n", "k", "rounds", "tile"),
    [
        (8192, 4096, 4096, 1, "128x128"),  # the others waste too much of the last wave
        (8192, 6144, 4096, 1, "128x160"),  # about as much work as 128x128, fewer reads
        (4096, 14336, 4096, 1, "128x160"),
        (8192, 4096, 28672, 1, "128x256_coop"),  # busy for long
        (8192, 2048, 16384, 1, "128x128"),  # not that long
        (8192, 4096, 8448, 1, "128x128"),
        (8192, 4096, 8448, 16, "128x256_coop"),  # together they are
        (8192, 128256, 4096, 1, "128x192"),  # an exposed epilogue would be too large a part
        (2048, 2048, 64, 1, "128x256_coop"),  # two tiles a multiprocessor: nothing hides anyway
    ],
)
def test_the_formula_chooses_what_was_measured_to_be_fastest(m: int, n: int, k: int, rounds: int, tile: str) -> None:
    """benchmarks/results/2026-12-01-032539 and docs/performance.md; chunks of a loss by their number."""
    plan = next(p for p in GEMMS if p.name.startswith("linear"))
    assert rank_tiles(plan, {"M": m, "N": n, "K": k}, rounds=rounds)[0].name == tile


def test_products_of_one_launch_share_the_tile_that_suits_all() -> None:
    """Gradients of the weights of q, k and v: 2048, 512 and 512 rows. The first alone would take two tiles of 128x256 a
    multiprocessor."""
    text = """program grads(dq: bf16[M, (H d=64)], dk: bf16[M, (G d)], dv: bf16[M, (G d)], x: bf16[M, D]) {
        return q = dq.T @ x: bf16, k = dk.T @ x: bf16, v = dv.T @ x: bf16
    }"""
    (program,) = coda.parse(text).programs.values()
    schedule, sizes = lower_program(program), {"M": 8192, "D": 2048, "H": 32, "G": 8}
    first = schedule.gemms[0]
    assert schedule.members == (3, 0, 0)
    assert rank_tiles(first, sizes)[0].name == "128x256_coop"
    assert rank_in(schedule, first, sizes)[0].name == "128x192"  # 24 x 11 tiles, two for each of 132


def test_orders_that_make_no_difference_are_left_out() -> None:
    plan = next(p for p in GEMMS if p.name.startswith("linear"))
    names = [t.name for t in candidates(plan, {"M": 8192, "N": 4096, "K": 64})]
    assert {"128x128", "128x128_s4", "128x128_s8m"} <= set(names)
    assert len(names) == len(TILES) * len(ORDERS)
    few_rows = [t.name for t in candidates(plan, {"M": 512, "N": 65536, "K": 64})]  # two clusters along M
    assert "128x128_s8m" in few_rows
    assert "128x128_s4" not in few_rows
    assert candidates(plan, {"M": 64, "N": 1024, "K": 64}) == rank_tiles(plan, {"M": 64, "N": 1024})  # all at once


def test_candidates_need_sizes() -> None:
    plan = next(p for p in GEMMS if p.name.startswith("linear"))
    with pytest.raises(CodaError, match="the sizes of N are not known"):
        candidates(plan, {"M": 8192, "K": 64})


def test_names_are_read_back() -> None:
    alone = [replace(t, cluster_m=1) for t in TILES]
    for tile in (ordered for t in (*TILES, *alone) for ordered in orders_of(t)):
        assert parse_tile(tile.name) == tile
        assert legal_tile(tile)
    with pytest.raises(CodaError, match="tile 128x128_s2 is not offered"):
        parse_tile("128x128_s2")
    with pytest.raises(CodaError, match=r"with _s4 or _s8m behind it, in another order"):
        parse_tile("128x128_wide")
    assert str(legal_tile(Tile(128, 128, swizzle=3))).startswith("tiles in groups of 3 along N: not one of 8 along N")


def test_the_order_is_no_part_of_the_device_code() -> None:
    plan = next(p for p in GEMMS if p.name.startswith("linear"))
    texts = {device_source(plan, variants(plan, [tile])) for tile in orders_of(TILES[0])}
    assert len(texts) == 1
