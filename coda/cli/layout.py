"""A layered drawing of a directed acyclic graph, as numbers (Sugiyama, Tagawa and Toda 1981).

Every node has a width and a height. Nodes get layers so that arrows run down; an arrow that passes layers gets a bend
in each, so that it runs between the nodes. Within a layer nodes are put in the order of the means of their neighbours,
down and up by turns, and then as close to these means as their widths allow (least squares, by pooling neighbours that
would overlap).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
SWEEPS = 24
GAP = 18.0  # between neighbours of a layer
LAYER_GAP = 26.0


@dataclass
class Box:
    """A node, with its middle once it is placed. A bend has no extent."""

    width: float
    height: float
    layer: int = 0
    x: float = 0.0
    y: float = 0.0
    above: list[Box] = field(default_factory=list, repr=False)
    below: list[Box] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Layout(Generic[Key]):
    """Middles of the nodes, the points of each arrow, and the extent of it all."""

    places: Mapping[Key, tuple[float, float]]
    arrows: Mapping[tuple[Key, Key], Sequence[tuple[float, float]]]
    width: float
    height: float


def layered(sizes: Mapping[Key, tuple[float, float]], edges: Sequence[tuple[Key, Key]]) -> Layout[Key]:
    """Place nodes of these sizes (width, height) so that all edges run down and no two nodes overlap."""
    boxes = {key: Box(*size) for key, size in sizes.items()}
    edges = list(dict.fromkeys(edges))
    _rank(boxes, edges)
    chains = {edge: _chain(boxes[edge[0]], boxes[edge[1]]) for edge in edges}
    layers: list[list[Box]] = [[] for _ in range(1 + max((b.layer for b in boxes.values()), default=0))]
    for box in [*boxes.values(), *(b for chain in chains.values() for b in chain[1:-1])]:
        layers[box.layer].append(box)
    for layer in layers:
        _spread(layer, [b.x for b in layer])
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = {id(b): _mean(b, sweep) for b in layer}
            if sweep < SWEEPS // 2:
                layer.sort(key=lambda b: wanted[id(b)])
            _spread(layer, [wanted[id(b)] for b in layer])
    left = min((b.x - b.width / 2 for layer in layers for b in layer), default=0.0)
    bottom = 0.0
    for layer in layers:
        height = max((b.height for b in layer), default=0.0)
        for box in layer:
            box.x, box.y = box.x - left, bottom + height / 2
            box.height = box.height if box.width else height
        bottom += height + LAYER_GAP
    arrows = {edge: _points(chain) for edge, chain in chains.items()}
    right = max((b.x + b.width / 2 for layer in layers for b in layer), default=0.0)
    return Layout({key: (b.x, b.y) for key, b in boxes.items()}, arrows, right, max(bottom - LAYER_GAP, 0.0))


def _rank(boxes: Mapping[Key, Box], edges: Sequence[tuple[Key, Key]]) -> None:
    """Layers: as far up as what is in front allows, then sources as far down as what reads them allows."""
    below: dict[Key, list[Key]] = {key: [] for key in boxes}
    waits = dict.fromkeys(boxes, 0)
    for a, b in edges:
        below[a].append(b)
        waits[b] += 1
    sources = [key for key, count in waits.items() if not count]
    ready = list(sources)
    while ready:
        key = ready.pop()
        for other in below[key]:
            boxes[other].layer = max(boxes[other].layer, boxes[key].layer + 1)
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    for key in sources:
        boxes[key].layer = min((boxes[b].layer - 1 for b in below[key]), default=0)


def _chain(a: Box, b: Box) -> list[Box]:
    """The bends of an arrow from a to b, with its ends."""
    chain = [a, *(Box(0.0, 0.0, layer) for layer in range(a.layer + 1, b.layer)), b]
    for upper, lower in pairwise(chain):
        upper.below.append(lower)
        lower.above.append(upper)
    return chain


def _mean(box: Box, sweep: int) -> float:
    near = box.above if sweep % 2 == 0 else box.below
    near = near or (box.below if sweep else [])
    return sum(b.x for b in near) / len(near) if near else box.x


def _spread(layer: Sequence[Box], wanted: Sequence[float]) -> None:
    """Put the nodes of a layer, in order, as near as possible to where they want to be, without overlap."""
    offsets, offset = [], 0.0
    for i, box in enumerate(layer):
        offset += (layer[i - 1].width + box.width) / 2 + GAP if i else 0.0
        offsets.append(offset)
    pools: list[tuple[float, int]] = []  # mean of where the first would be, and how many
    for want, at in zip(wanted, offsets, strict=True):
        mean, count = want - at, 1
        while pools and pools[-1][0] > mean:
            other, many = pools.pop()
            mean, count = (mean * count + other * many) / (count + many), count + many
        pools.append((mean, count))
    starts = [mean for mean, count in pools for _ in range(count)]
    for box, start, at in zip(layer, starts, offsets, strict=True):
        box.x = start + at


def _points(chain: Sequence[Box]) -> list[tuple[float, float]]:
    """An arrow from the lower edge of its first box to the upper edge of its last. It passes a layer straight down."""
    first, *bends, last = chain
    passed = [(b.x, b.y + side * b.height / 2) for b in bends for side in (-1, 1)]
    return [(first.x, first.y + first.height / 2), *passed, (last.x, last.y - last.height / 2)]
