"""Tiles: which are offered, and the default for given sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import sympy

from coda.errors import CodaError
from coda.ir import Dim, dim_size
from coda.target.legality import legal_tile
from coda.target.plan import TILES, Plan, Tile, Variant


def choose_tile(plan: Plan, dims: Mapping[str, int] | None = None, sms: int = 132) -> Tile:
    """The tile for given axis sizes (axes that are not given: the default tile): the first of ``rank_tiles``."""
    return rank_tiles(plan, dims, sms)[0]


def rank_tiles(plan: Plan, dims: Mapping[str, int] | None = None, sms: int = 132) -> list[Tile]:
    """The tiles that take a plan, the most promising first; a build may still find that one spills registers.

    Least work on the busiest multiprocessor, ``ceil(tiles / SMs) * TileM * TileN``; among equals the one listed
    first. Cooperative tiles only where there are at most two tiles a multiprocessor: they expose their epilogue,
    ping-pong hides it under the next tile.
    """
    rows, columns = _evaluate(plan.rows, dims), _evaluate(plan.columns, dims)
    fitting = [t for t in TILES if legal_tile(t, plan)]
    if rows is None or columns is None:
        return fitting

    def tiles(tile: Tile) -> int:
        return -(-rows // tile.m) * -(-columns * plan.lanes // tile.n)

    def rank(tile: Tile) -> tuple[bool, int]:
        exposed = tile.schedule == "cooperative" and tiles(tile) > 2 * sms
        return exposed, -(-tiles(tile) // sms) * tile.m * tile.n

    return sorted(fitting, key=rank)


def _evaluate(dim: Dim, dims: Mapping[str, int] | None) -> int | None:
    size = sympy.sympify(dim_size(dim)).subs({s: (dims or {}).get(s.name, s) for s in dim_size(dim).free_symbols})
    return int(size) if size.is_Integer else None


def parse_tile(text: str) -> Tile:
    """'128x192' or '128x256_coop' to a tile that is offered. Raises CodaError naming those that are."""
    names = {t.name: t for t in TILES}
    if text in names:
        return names[text]
    hint = "tiles to choose from: " + ", ".join(names)
    if not re.fullmatch(r"\d+x\d+(_coop)?", text):
        raise CodaError.of(f"'{text}' is not a tile; write TileM x TileN as in 128x192", hint)
    raise CodaError.of(f"tile {text} is not offered", hint)


def variants(plan: Plan, tiles: Sequence[Tile]) -> list[Variant]:
    """The plan at each tile, with its kernel's symbol."""
    stem = plan.name.removesuffix("_gemm")  # kernels of a block are called so
    return [Variant(plan, t, f"{stem}_gemm_{t.name}") for t in tiles]
