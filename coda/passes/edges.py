"""What lies in memory between kernels: the cheapest values from which later stages can compute what they read."""

from __future__ import annotations

from collections.abc import Collection

from coda.ir import Node, Program, nominal
from coda.ops import OPS
from coda.passes.merge import ANCHORS
from coda.passes.mincut import INFINITE, vertex_cut
from coda.passes.schedule import LEAVES, Schedule, in_memory


def crosses(schedule: Schedule, operand: Node, node: Node) -> bool:
    """Whether an operand of an operation comes from an earlier stage."""
    return operand.op not in LEAVES and schedule.stage[operand] < schedule.stage[node]


def stored_values(program: Program, schedule: Schedule, free: Collection[Node] = ()) -> set[Node]:
    """The values that some kernel stores: a minimum cut in bytes, in which products and reductions are never computed
    again and anything else may be. ``free`` are values that cost nothing to store."""
    nodes, stored = program.nodes(), in_memory(program) | set(free)
    across = [a for n in nodes for a in n.args if n.op not in ANCHORS and crosses(schedule, a, n)]
    around = [n for n in nodes if n not in stored and n.op not in LEAVES]
    edges = [(a, n) for n in around if not _is_never_again(n) for a in n.args if a in around]
    costs = {n: _bytes(n) for n in around}
    sources = {n: INFINITE for n in around if _is_never_again(n)}
    return stored | set(vertex_cut(costs, edges, sources, [n for n in dict.fromkeys(across) if n in costs]))


def _is_never_again(node: Node) -> bool:
    """Whether a value is stored rather than computed a second time."""
    return node.op in ANCHORS or OPS[node.op].family == "reduce"


def _bytes(node: Node) -> int:
    return max(1, nominal(node.type.elements)) * node.dtype.bytes
