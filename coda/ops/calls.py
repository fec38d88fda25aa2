"""Opaque calls: what others compute between what coda does (attention, a scan), with typed operands and results.

An ``Extern`` says what such a function takes and gives, never how. One call of a function with several results is
several nodes, equal but for ``result``: one for each result that is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from coda.ir import Axis, Dim, Node, Type
from coda.ops.table import Op, OpError, register

Typed = tuple[str, Type]


@dataclass(frozen=True)
class Extern:
    """An opaque function. The axes of its types are its own: a call binds each to what its operand has in that place.

    ``backward`` gives its gradients: of its parameters, results and ``d_NAME`` for results it takes those that it
    names, and it returns ``d_NAME`` for parameters.
    """

    name: str
    params: tuple[Typed, ...]
    results: tuple[Typed, ...]
    backward: Extern | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(dict.fromkeys(a for _, t in (*self.params, *self.results) for a in t.axes))


def same_call(a: Node, b: Node) -> bool:
    """Whether two nodes are results of one call."""
    return a.args == b.args and a.attr("callee") == b.attr("callee")


def _bind(callee: Extern, types: list[Type]) -> dict[str, Dim]:
    """What each axis of an extern stands for in a call. Raises OpError where an operand does not fit."""
    bound: dict[str, Dim] = {}
    seen: dict[str, str] = {}
    for (name, declared), given in zip(callee.params, types, strict=True):
        if given.dtype != declared.dtype or len(given.dims) != len(declared.dims):
            hint = f"give it a type first, as in {name}: {declared} = ..."
            raise OpError(f"'{callee.name}' takes {name}: {declared}, got {given}", hint)
        for dim, actual in zip(declared.dims, given.dims, strict=True):
            for axis, stands_for in _matched(callee, name, dim, actual):
                if bound.setdefault(axis.name, stands_for) != stands_for:
                    was, now = (" ".join(a.name for a in d) for d in (bound[axis.name], stands_for))
                    raise OpError(
                        f"axis '{axis.name}' of '{callee.name}' is ({was}) in {seen[axis.name]} and ({now}) in {name}"
                    )
                seen.setdefault(axis.name, name)
    return bound


def _matched(callee: Extern, name: str, dim: Dim, actual: Dim) -> list[tuple[Axis, Dim]]:
    """The axes of a declared dim with what they stand for: a whole dim, or the axes of a group one by one."""
    if len(dim) == 1:
        pairs = [(dim[0], actual)]
    elif len(dim) == len(actual):
        pairs = [(axis, (a,)) for axis, a in zip(dim, actual, strict=True)]
    else:
        declared, given = (" ".join(a.name for a in d) for d in (dim, actual))
        raise OpError(f"'{callee.name}' takes the group ({declared}) in {name}, got ({given})")
    for axis, stands_for in pairs:
        if axis.static is not None and (len(stands_for) != 1 or stands_for[0].size != axis.size):
            given = " ".join(a.name for a in stands_for)
            raise OpError(f"axis '{axis.name}' of '{callee.name}' has size {axis.static}, in {name} it is ({given})")
    return pairs


def _infer_call(types, attrs):
    """attrs: ``callee``, an Extern; ``result``, which of its results this is."""
    callee = attrs["callee"]
    if len(types) != len(callee.params):
        raise OpError(f"'{callee.name}' takes {len(callee.params)} operands, got {len(types)}")
    bound = _bind(callee, list(types))
    _, declared = callee.results[attrs["result"]]
    dims = tuple(tuple(a for axis in dim for a in bound.get(axis.name, (axis,))) for dim in declared.dims)
    return Type(declared.dtype, dims)


register(
    Op(
        "call", None, _infer_call, lambda ctx, node, *xs: ctx.call(node, xs),
        "a function declared by extern, which coda calls but does not know", surface=False, family="call",
    )
)  # fmt: skip
