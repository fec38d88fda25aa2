"""Reads at computed positions (gather, pick) and counter-based random numbers."""

from __future__ import annotations

from coda.dtypes import F32
from coda.ops.structure import replace_axis
from coda.ops.table import Op, OpError, Type, broadcast, register


def _infer_gather(types, attrs):
    """attrs: ``axis``, the axis of the table that the index selects from; it is replaced by the index's axes."""
    table, index = types
    if index.dtype.kind != "int":
        raise OpError(f"an index must be an integer tensor, got {index.dtype}")
    if table.axis(attrs["axis"]) is None:
        raise OpError(f"there is no axis '{attrs['axis']}' to gather from")
    return replace_axis(table, attrs["axis"], index.axes)


def _gather(ctx, node, table, index):
    position = [a.name for a in node.args[0].type.axes].index(node.attr("axis"))
    flat = table.index_select(position, index.reshape(-1).long())
    return flat.unflatten(position, tuple(index.shape)) if index.dim() else flat.squeeze(position)


register(Op("gather", 2, _infer_gather, _gather, "cos[pos]: rows of a table at integer positions",
            surface=False, family="index"))  # fmt: skip


def _infer_pick(types, attrs):
    """attrs: ``axis``. The index has none of it; where it lies outside the axis the result is 0 and nothing is read."""
    z, index = types
    if index.dtype.kind != "int":
        raise OpError(f"the index of 'pick' must be an integer tensor, got {index.dtype}")
    if z.axis(attrs["axis"]) is None:
        raise OpError(f"there is no axis '{attrs['axis']}' to pick from")
    reduced = replace_axis(z, attrs["axis"], ())
    return Type(z.dtype if z.dtype.kind == "int" else F32, broadcast([reduced, index]))


def _pick(ctx, node, z, index):
    import torch

    axis = node.attr("axis")
    position = [a.name for a in node.args[0].type.axes].index(axis)
    size = z.shape[position]
    last = z.movedim(position, -1)
    rest = [a for a in node.args[0].type.axes if a.name != axis]
    index = ctx.align_axes(index, node.args[1].type.axes, rest).expand(last.shape[:-1]).long()
    inside = (index >= 0) & (index < size)
    if size == 0:
        return last.new_zeros(last.shape[:-1])
    picked = last.gather(-1, index.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, picked, picked.new_zeros(()))


register(Op("pick", 2, _infer_pick, _pick, "pick(z, V, label): the element of each row at an integer position",
            surface=False, family="index"))  # fmt: skip


def _infer_rand(types, attrs):
    """attrs: ``axes`` (tuple of Axis): Philox4x32-10 of (seed, offset, linear index over the axes), in [0, 1)."""
    return Type(F32, tuple((a,) for a in attrs["axes"]))


def _rand(ctx, node, seed, offset):
    return ctx.philox(int(seed), int(offset), [ctx.size(a.size) for a in node.attr("axes")])


register(
    Op(
        "rand", 2, _infer_rand, _rand,
        "rand(seed, offset, [M, D]): uniform numbers in [0, 1), a function of the global index alone"
        " (Salmon et al. 2011, Philox4x32-10)",
        surface=False, family="random",
    )
)  # fmt: skip
