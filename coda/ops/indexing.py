"""Reads at computed positions (gather, pick) and counter-based random numbers."""

from __future__ import annotations

import math

from coda.dtypes import F32, I64
from coda.ops.structure import replace_axis
from coda.ops.table import Op, OpError, Type, broadcast, register


def _infer_gather(types, attrs):
    """attrs: ``axis``, the axis of the table that the index selects from; it is replaced by the index's axes."""
    table, index = types
    if index.dtype.kind != "int":
        raise OpError(f"an index must be an integer tensor, got {index.dtype}")
    if table.axis(attrs["axis"]) is None:
        raise OpError(f"there is no axis '{attrs['axis']}' to gather from")
    twice = (table.names - {attrs["axis"]}) & index.names
    if twice:
        raise OpError(
            f"the gathered value would have axis '{sorted(twice)[0]}' twice",
            "pick(z, V, label) reads one element of each row",
        )
    return replace_axis(table, attrs["axis"], index.axes)


def _gather(ctx, node, table, index):
    position = [a.name for a in node.args[0].type.axes].index(node.attr("axis"))
    flat = ctx.rows(node, table, position, index.reshape(-1).long())
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

    z_type, index_type = (a.type for a in node.args)
    picked_axis = z_type.axis(node.attr("axis"))
    rows = ctx.expand(ctx.compute(z, node.dtype), z_type.axes, (*node.type.axes, picked_axis))
    index = ctx.expand(index.long(), index_type.axes, node.type.axes)
    size = rows.shape[-1]
    if size == 0:
        return rows.new_zeros(rows.shape[:-1])
    picked = rows.gather(-1, index.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where((index >= 0) & (index < size), picked, picked.new_zeros(()))


register(Op("pick", 2, _infer_pick, _pick, "pick(z, V, label): the element of each row at an integer position",
            surface=False, family="index"))  # fmt: skip


def _position(ctx, node):
    import torch

    sizes = [ctx.size(a.size) for a in node.attr("axes")]
    return torch.arange(math.prod(sizes), device=ctx.device).reshape(sizes)


register(Op("position", 0, lambda types, attrs: Type(I64, (attrs["axes"],)), _position,
            "the position in a group of axes, of which lowering makes that of 'rand'",
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


def _infer_rand_at(types, attrs):
    return Type(F32, broadcast(types))


register(
    Op(
        "rand_at", 3, _infer_rand_at,
        lambda ctx, node, seed, offset, at: ctx.philox_at(int(seed), int(offset), ctx.align_axes(
            at, node.args[2].type.axes, node.type.axes)),
        "the number at a linear position: what 'rand' is lowered to",
        cpp="coda::uniform({0}, {1}, {2})", surface=False, family="random", operands=I64,
    )
)  # fmt: skip
