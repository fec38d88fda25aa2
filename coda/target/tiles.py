"""Tiles: which are offered, and the default for given sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from coda.errors import CodaError
from coda.ir import Dim, Size, dim_size
from coda.target.legality import DESIGN_SMS, legal_tile
from coda.target.plan import ORDERS, TILES, Plan, Tile, Variant
from coda.target.schedule import Schedule

# The cooperative tile reads the fewest rows for its results, so it needs the least power. Where the chip is limited by
# that for long, this is worth 3 %, and more than an epilogue that hides (docs/performance.md). SUSTAINED is in tiles a
# multiprocessor, of SHORTEST along K: that long, an exposed epilogue is a small part.
SHORTEST, SUSTAINED, SAVED = 8192, 12, 0.03
MOST_WASTED = 0.1  # of the tiles, where the last cluster of each batch is not full


def choose_tile(plan: Plan, dims: Mapping[str, int] | None = None, sms: int = DESIGN_SMS) -> Tile:
    """The tile for given axis sizes (axes that are not given: the default tile): the first of ``rank_tiles``."""
    return rank_tiles(plan, dims, sms)[0]


def rank_tiles(
    plan: Plan,
    dims: Mapping[str, int] | None = None,
    sms: int = DESIGN_SMS,
    rounds: int = 1,
    others: Sequence[Plan] = (),
) -> list[Tile]:
    """The tiles that take a plan, the most promising first; a build may still find that one spills registers.

    Least work on the busiest multiprocessor, ``ceil(tiles / SMs)`` times the cost of a tile; among equals the one
    listed first. Cooperative tiles expose their epilogue, which ping-pong hides under the next tile: only where there
    are at most two tiles a multiprocessor, or where the kernel, run ``rounds`` times, keeps the chip busy for long.
    Tiles of a batch are in clusters of two only where that wastes little. ``others`` run in the same launch.
    """
    fitting = [t for t in TILES if legal_tile(t, plan)]
    if (sizes := _sizes(plan, dims)) is None:
        return fitting
    if plan.batch:
        fitting = [_clustered(tile, sizes[1]) for tile in fitting]

    launched = [sizes, *(s for other in others if (s := _sizes(other, dims)) is not None)]

    def tiles(tile: Tile) -> int:
        return sum(b * -(-m // tile.m) * -(-n * plan.lanes // tile.n) for b, m, n in launched)

    contracted = _contracted(plan, dims)

    def rank(tile: Tile) -> tuple[bool, float]:
        cooperative = tile.schedule == "cooperative"
        work = tiles(tile) * contracted * rounds
        sustained = contracted >= SHORTEST and work >= SUSTAINED * SHORTEST * sms
        exposed = cooperative and tiles(tile) > 2 * sms and not sustained
        return exposed, -(-tiles(tile) // sms) * tile.cost * (1 - SAVED * (cooperative and sustained))

    return sorted(fitting, key=rank)


def _clustered(tile: Tile, rows: int) -> Tile:
    """The tile by itself where clusters of two would compute too many tiles beyond the last row of each batch: 128 rows
    would cost what 256 do."""
    count = -(-rows // tile.m)
    return replace(tile, cluster_m=1) if -count % tile.cluster_m > MOST_WASTED * count else tile


def rank_in(schedule: Schedule, step: Plan, dims: Mapping[str, int] | None = None) -> list[Tile]:
    """``rank_tiles`` of a kernel where it is: how often it runs, and what its launch also runs."""
    others = [other for other in schedule.launched_with(step) if isinstance(other, Plan)]
    return rank_tiles(step, schedule.with_chunk(dims), rounds=schedule.rounds(step, dims), others=others)


def orders_of(tile: Tile) -> list[Tile]:
    """The tile in each order in which its like may be computed, the default first."""
    return [replace(tile, swizzle=swizzle, along=along) for swizzle, along in ORDERS]


def candidates(plan: Plan, dims: Mapping[str, int], sms: int = DESIGN_SMS) -> list[Tile]:
    """What is worth measuring at these sizes: each tile that takes the plan, the most promising first, in each order
    that makes a difference: none does where all tiles run at once, nor does a group wider than the grid."""
    if (sizes := _sizes(plan, dims)) is None:
        missing = sorted({s.name for dim in _dims(plan) for s in dim_size(dim).free_symbols} - set(dims))
        raise CodaError.of(f"the sizes of {', '.join(missing)} are not known", "give them with --dims")
    batches, rows, columns = sizes
    found = []
    for tile in rank_tiles(plan, dims, sms):
        clusters_m = -(-rows // (tile.m * tile.cluster_m))
        clusters_n = -(-columns * plan.lanes // (tile.n * tile.cluster_n))
        at_once = batches * clusters_m * clusters_n * tile.cluster_m * tile.cluster_n <= sms
        seen: set[tuple[str, int]] = set()
        for ordered in orders_of(tile):
            across = clusters_m if ordered.along == "n" else clusters_n
            order = (ordered.along, min(ordered.swizzle, across))
            if order not in seen and not (seen and at_once):
                seen.add(order)
                found.append(ordered)
    return found


def _dims(plan: Plan) -> tuple[Dim, Dim, Dim]:
    return plan.batch, plan.rows, plan.columns


def _sizes(plan: Plan, dims: Mapping[str, int] | None) -> tuple[int, ...] | None:
    """The sizes of batch (1 where there is none), rows and columns, if all are known."""
    known = [_at(dim_size(dim), dims) for dim in _dims(plan)]
    return tuple(map(int, known)) if all(size.is_Integer for size in known) else None


def _contracted(plan: Plan, dims: Mapping[str, int] | None) -> int:
    """How far a tile is contracted; 0 where that is not known."""
    terms = plan.terms[:1] if plan.joined else plan.terms
    total = _at(sympy.Add(*(dim_size(term.contraction) for term in terms)), dims)
    return int(total) if total.is_Integer else 0


def _at(size: Size, dims: Mapping[str, int] | None) -> sympy.Expr:
    """A size, with the numbers that are known."""
    expression = sympy.sympify(size)
    return expression.subs({s: (dims or {}).get(s.name, s) for s in expression.free_symbols})


def parse_tile(text: str) -> Tile:
    """'128x192', '128x256_coop' or '128x192_s4' to a tile that is offered. Raises CodaError naming those that are."""
    alone = [replace(t, cluster_m=1) for t in TILES]
    names = {ordered.name: ordered for t in (*TILES, *alone) for ordered in orders_of(t)}
    if text in names:
        return names[text]
    others = " or ".join(t.name.removeprefix(t.kernel) for t in orders_of(TILES[0])[1:])
    hint = f"tiles to choose from: {', '.join(t.name for t in TILES)}; with {others} behind it, in another order"
    if not re.fullmatch(r"\d+x\d+(_coop)?(_c1)?(_s\d+m?)?", text):
        raise CodaError.of(f"'{text}' is not a tile; write TileM x TileN as in 128x192", hint)
    raise CodaError.of(f"tile {text} is not offered", hint)


def variants(plan: Plan, tiles: Sequence[Tile]) -> list[Variant]:
    """The plan at each tile, with its kernel's symbol."""
    stem = plan.name.removesuffix("_gemm")  # kernels of a block are called so
    return [Variant(plan, t, f"{stem}_gemm_{t.kernel}") for t in tiles]
