"""How the local parts of DTensors lie on a mesh, and how their gradients do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

Placements = tuple[Any, ...]


def is_plain(placements: Placements) -> bool:
    """Whether each mesh dim holds replicas, shards, or parts of a sum."""
    return all(
        isinstance(p, Shard) or p.is_replicate() or (type(p) is Partial and p.reduce_op == "sum") for p in placements
    )


def is_even(x: DTensor) -> bool:
    """Whether shards are of one size, so that all ranks compile the same; taken to be so along dims that vary."""
    parts: dict[int, int] = defaultdict(lambda: 1)
    for dim, p in enumerate(x.placements):
        if isinstance(p, Shard):
            parts[p.dim] *= x.device_mesh.size(dim)
    return all(not isinstance(size := x.shape[dim], int) or size % n == 0 for dim, n in parts.items())


def of_gradient(placements: Placements, summed: frozenset[int] = frozenset()) -> Placements:
    """How the gradient of a local part lies: a shard's is a shard; that of a replica, and of a part of a sum, is
    whole on each rank, which is what ``DTensor.from_local`` documents. On the mesh dims ``summed`` it is a part of a
    sum."""
    whole = (Replicate() if p.is_partial() else p for p in placements)
    return tuple(Partial() if dim in summed else p for dim, p in enumerate(whole))


def summed_dims(operands: Sequence[Placements], results: Sequence[Placements]) -> list[frozenset[int]] | None:
    """For each operand of an operation on local parts, the mesh dims on which its gradient is a part of a sum: those
    where the operand is a replica and others are not. None where gradients do not follow from the layouts."""
    found: list[set[int]] = [set() for _ in operands]
    for dim in range(len(results[0])):
        given, made = [p[dim] for p in operands], [p[dim] for p in results]
        if all(p.is_replicate() for p in (*given, *made)):
            continue
        parts = any(p.is_partial() for p in given)
        if any(p.is_replicate() for p in made) or (parts and not all(p.is_partial() for p in made)):
            return None
        if parts and not all(p.is_partial() or p.is_replicate() for p in given):
            return None
        for dims, p in zip(found, given, strict=True):
            if p.is_replicate():
                dims.add(dim)
    return [frozenset(dims) for dims in found]
