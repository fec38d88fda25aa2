"""The cheapest set of nodes that separates sources from sinks (Ford and Fulkerson 1956), for some hundred nodes.

Among the cheapest sets the one closest to the sinks is returned.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

INFINITE = 1 << 80
_SOURCE, _SINK = ("source",), ("sink",)

Capacities = dict[Any, dict[Any, int]]


def vertex_cut(
    costs: Mapping[Any, int], edges: Iterable[tuple[Any, Any]], sources: Mapping[Any, int], sinks: Iterable[Any]
) -> list[Any]:
    """The nodes to cut, in the order of ``costs``, so that no path leads from a source to a sink. ``costs`` has every
    node; sources and sinks may themselves be cut. What it costs to leave a source uncut is up to the source:
    ``INFINITE`` where it must not be."""
    capacity: Capacities = defaultdict(dict)

    def connect(a: Hashable, b: Hashable, limit: int) -> None:
        capacity[a][b] = limit
        capacity[b].setdefault(a, 0)

    for node, cost in costs.items():
        connect((node, "in"), (node, "out"), cost)
    for a, b in edges:
        connect((a, "out"), (b, "in"), INFINITE)
    for node, limit in sources.items():
        connect(_SOURCE, (node, "in"), limit)
    for node in sinks:
        connect((node, "out"), _SINK, INFINITE)
    while path := _path(capacity):
        amount = min(capacity[a][b] for a, b in path)
        for a, b in path:
            capacity[a][b] -= amount
            capacity[b][a] += amount
    reaching = _reaching_sink(capacity)
    return [n for n in costs if (n, "out") in reaching and (n, "in") not in reaching]


def _path(capacity: Capacities) -> list[tuple[Any, Any]]:
    """A shortest path with capacity left, as edges; empty where there is none."""
    before: dict[Any, Any] = {_SOURCE: None}
    queue = deque([_SOURCE])
    while queue and _SINK not in before:
        a = queue.popleft()
        for b, left in capacity[a].items():
            if left and b not in before:
                before[b] = a
                queue.append(b)
    path, b = [], _SINK
    while before.get(b) is not None:
        path.append((before[b], b))
        b = before[b]
    return path


def _reaching_sink(capacity: Capacities) -> set[Any]:
    seen, queue = {_SINK}, deque([_SINK])
    while queue:
        b = queue.popleft()
        for a in capacity[b]:
            if capacity[a].get(b, 0) and a not in seen:
                seen.add(a)
                queue.append(a)
    return seen
