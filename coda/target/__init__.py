"""sm_90a: what can be lowered, the visitor plan, tiles, and C++ emission."""

from coda.target.lower import lower
from coda.target.plan import TILES, Plan, Tile, Variant
from coda.target.tiles import candidates, choose_tile, parse_tile, rank_in, rank_tiles, variants

__all__ = [
    "TILES", "Plan", "Tile", "Variant", "candidates", "choose_tile", "lower", "parse_tile", "rank_in", "rank_tiles",
    "variants",
]  # fmt: skip
