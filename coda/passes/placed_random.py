"""Random numbers as functions of their position: ``rand(seed, offset, [M, D])`` of row m and column d is that of number
m * |D| + d, whichever kernel and thread computes it. Label: bitwise.
"""

from __future__ import annotations

from coda.dtypes import I64
from coda.ir import Node
from coda.ops import build


def placed_random(rand: Node, seed: Node, offset: Node) -> Node:
    """A random number from its linear position over its axes."""
    position = build("const", value=0, dtype=I64)
    for axis in rand.attr("axes"):
        step = build("index", axis=axis)
        ahead = build("mul", position, build("size", expr=axis.size))
        position = step if position.op == "const" else build("add", ahead, step)
    return build("rand_at", seed, offset, position, span=rand.span)
