"""C12: which of C, D and aux an architecture treats specially is no concern of a program: operands and results have
names, and no name means anything."""

from __future__ import annotations

import re

from coda.target import TILES, lower
from coda.target.emit import device_source
from coda.target.tiles import variants
from tests.support import program

TEXT = """
program p({a}: bf16[M, K], {b}: bf16[N, K], {c}: bf16[M, N], {d}: f32[N]) {{
    {e} = {d} * ({a} @ {b}.T) + {c}
    return {e}: bf16, {f} = relu({e}): bf16
}}
"""
PLAIN = {"a": "x", "b": "w", "c": "residual", "d": "scale", "e": "y", "f": "z"}
SPECIAL = {"a": "B", "b": "A", "c": "D", "d": "C", "e": "aux", "f": "acc"}


def text(names: dict[str, str]) -> str:
    return TEXT.format(**names)


def test_names_make_no_difference_to_the_kernel() -> None:
    sources = []
    for names in (PLAIN, SPECIAL):
        plan = lower(program(text(names)))
        (variant,) = variants(plan, [TILES[0]])
        source = device_source(plan, [variant])
        sources.append(re.sub(rf"\b{names['c']}_", "tile_", source))  # a tile operand is named after its parameter
    assert sources[0] == sources[1]


def test_results_of_any_number_come_in_the_order_they_are_returned() -> None:
    assert [o.name for o in program(text(SPECIAL)).outputs] == ["aux", "acc"]
