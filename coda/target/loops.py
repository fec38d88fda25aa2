"""How the loops of a row kernel step through tensors: which axes are one loop, and the stride of each loop.

Axes are counted by one loop where every tensor that has one of them has both, next to each other in one dim: ``(B T)``
that is never taken apart is a single loop over rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import sympy

from coda.dtypes import DType
from coda.ir import Axis, Dim, Node, Size, dim_size
from coda.target.rowplan import Access, Stride


@dataclass(frozen=True)
class Tensor:
    """A tensor as a leaf or an output sees it: stored with ``dims``, begun at ``offsets`` (axis, position). ``within``
    maps the name of a part to the axis that it is a part of. Partial results have a dim in front, which counts them."""

    arg: str
    dtype: DType
    dims: tuple[Dim, ...]
    offsets: tuple[tuple[str, Size], ...] = ()
    within: tuple[tuple[str, str], ...] = ()
    identity: float = 0.0
    gather: str | None = None  # the axis that `index` selects from
    index: Node | None = field(default=None, compare=False)
    partial: str | None = None  # "sum", ..: how they are reduced

    def stored(self, name: str) -> str:
        """The axis of the tensor behind an axis of the leaf."""
        within = dict(self.within)
        while name in within:
            name = within[name]
        return name

    def place(self, name: str) -> tuple[int, int] | None:
        """(dim, position in its group) of an axis of the leaf; None where the tensor lacks it."""
        stored = self.stored(name)
        for i, dim in enumerate(self.dims):
            for j, axis in enumerate(dim):
                if axis.name == stored and stored != self.gather:
                    return i, j
        return None

    def stride(self, name: str) -> Stride | None:
        place = self.place(name)
        if place is None:
            return None
        dim, at = place
        return Stride(dim + (self.partial is not None), dim_size(self.dims[dim][at + 1 :]))

    def access(self, levels: Sequence[Dim], space: Dim | None) -> Access:
        """The strides of the loops, each that of its fastest axis."""
        offsets = []
        for name, position in self.offsets:
            dim, place = self._whole(name)
            offsets.append((dim, position * dim_size(self.dims[dim][place + 1 :])))
        gather = None
        if self.gather is not None:
            dim, place = self._whole(self.gather)
            gather = Stride(dim, dim_size(self.dims[dim][place + 1 :])), self.dims[dim][place].size
        return Access(
            self.arg, self.dtype, tuple(self.stride(level[-1].name) for level in levels),
            self.stride(space[-1].name) if space else None,
            tuple((d, o) for d, o in offsets if o != 0), self.identity, gather, partial=self.partial,
        )  # fmt: skip

    def _whole(self, name: str) -> tuple[int, int]:
        return next((i, j) for i, dim in enumerate(self.dims) for j, axis in enumerate(dim) if axis.name == name)

    def joins(self, outer: str, inner: str) -> bool:
        """Whether one loop can step through both axes: adjacent in one dim, or both absent."""
        a, b = self.place(outer), self.place(inner)
        if a is None or b is None:
            return a is b
        return a[0] == b[0] and a[1] + 1 == b[1] and self.stored(inner) == inner


def joined(axes: Iterable[Axis], tensors: Sequence[Tensor], apart: Collection[frozenset[str]] = ()) -> tuple[Dim, ...]:
    """Axes as loops, slowest first; no loop goes from inside one of the sets ``apart`` to outside."""
    loops: list[Dim] = []
    for axis in axes:
        last = loops[-1][-1].name if loops else None
        together = last is not None and all((last in inside) == (axis.name in inside) for inside in apart)
        if together and all(t.joins(last, axis.name) for t in tensors):  # type: ignore[arg-type]
            loops[-1] = (*loops[-1], axis)
        else:
            loops.append((axis,))
    return tuple(loops)


def tensor_of(leaf: Node) -> Tensor:
    """The tensor behind a leaf: a parameter, sliced, cut, gathered from, absent, or finished."""
    offsets: list[tuple[str, Size]] = []
    within: dict[str, str] = {}
    identity, gather, index = 0.0, None, None
    node = leaf
    while node.op != "input":
        if node.op == "slice":
            offsets.append((node.attr("axis"), sympy.Integer(node.attr("index"))))
        elif node.op == "part":
            offsets.append((node.attr("axis"), node.attr("start")))
            within[node.attr("into").name] = node.attr("axis")
        elif node.op == "default":
            identity = node.attr("identity")
        elif node.op == "gather":
            gather, index = node.attr("axis"), node.args[1]
        node = node.args[0]
    within = {new: old for new, old in within.items() if new != old}
    stored = Tensor("", node.dtype, node.type.dims, (), tuple(within.items())).stored
    return Tensor(
        node.attr("name"), node.dtype, node.type.dims, tuple((stored(name), at) for name, at in offsets),
        tuple(within.items()), identity, gather, index, node.type.partial.kind if node.type.partial else None,
    )  # fmt: skip


def is_leaf(node: Node) -> bool:
    """Whether a node reads a parameter, at an address that depends on the row at most."""
    gathers = 0
    while node.op in ("slice", "part", "default", "gather", "finish"):
        gathers += node.op == "gather"
        node = node.args[0]
    return node.op == "input" and gathers <= 1
