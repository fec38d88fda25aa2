"""Where the checker rounds: ``@`` takes storage dtypes, so a computed f32 operand gets a visible cast."""

from __future__ import annotations

from coda.dtypes import F32, DType
from coda.ir import Node, written_at
from coda.ops import build

# Operations that move values without arithmetic: their result is stored if their operands are.
MOVES = {"transpose", "layout", "slice", "part", "stack", "concat", "gather", "default"}


def is_stored(node: Node) -> bool:
    """Whether the value has the rounding of a storage dtype already: read from memory, cast, or given by a call."""
    if node.dtype != F32 or node.op in ("input", "cast", "call"):
        return True
    return node.op in MOVES and all(is_stored(a) for a in node.args if a.dtype.kind == "float")


def nearest_storage(*roots: Node) -> DType:
    """The dtype of the stored float matrix closest to the roots (breadth first), f32 where there is none."""
    frontier, seen = list(roots), set(roots)
    while frontier:
        for node in frontier:
            if len(node.type.axes) > 1 and node.dtype.kind == "float" and is_stored(node):
                return node.dtype
        frontier = list(dict.fromkeys(a for node in frontier for a in node.args if a not in seen))
        seen.update(frontier)
    return F32


def round_operands(left: Node, right: Node) -> tuple[Node, Node]:
    """The operands of a product in storage dtypes: a computed one is cast to the other's dtype."""
    computed = [not is_stored(left), not is_stored(right)]
    if not any(computed):
        return left, right
    dtype = nearest_storage(left, right) if all(computed) else (right if computed[0] else left).dtype
    return tuple(round_to(n, dtype) if c else n for n, c in zip((left, right), computed, strict=True))  # type: ignore[return-value]


def round_to(node: Node, dtype: DType) -> Node:
    """The value in a storage dtype; a cast only where the dtype differs."""
    if node.dtype == dtype:
        return node
    return written_at(build("cast", node, dtype=dtype, saturate=False), node.span)
