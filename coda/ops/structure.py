"""Leaves, the product, casts, and the operations that only rename, cut, join or reorder axes."""

from __future__ import annotations

import sympy

from coda.dtypes import F32, I64
from coda.ir import Axis
from coda.ops.table import Op, OpError, Type, broadcast, register


def _structural(name, arity, infer, torch, doc, derivative=None, surface=False, symbol=None, family="structure"):
    return register(
        Op(name, arity, infer, torch, doc, derivative=derivative, surface=surface, symbol=symbol, family=family)
    )


# Leaves: their type is an attribute.
_structural("input", 0, lambda types, attrs: attrs["type"], lambda ctx, node: ctx.input(node), "a parameter, by `name`")
_structural(
    "const", 0, lambda types, attrs: Type(attrs["dtype"]),
    lambda ctx, node: ctx.constant(node), "a literal: `value`, `dtype`",
)  # fmt: skip
_structural(
    "index", 0, lambda types, attrs: Type(I64, ((attrs["axis"],),)),
    lambda ctx, node: ctx.arange(node.attr("axis")), "index(V): the position along an axis (iota)",
)  # fmt: skip
_structural(
    "size", 0, lambda types, attrs: Type(I64), lambda ctx, node: ctx.scalar(ctx.size(node.attr("expr")), node),
    "a symbolic size as a number, as in x / |D|",
)  # fmt: skip


def _infer_cast(types, attrs):
    return types[0].with_dtype(attrs["dtype"])


_structural(
    "cast", 1, _infer_cast, lambda ctx, node, x: ctx.round(x, node.attr("dtype"), node.attr("saturate")),
    "a rounding to a storage dtype (round to nearest even); `saturate` clamps to the largest finite value",
    derivative=("dy",),
)  # fmt: skip


def _infer_default(types, attrs):
    return types[0]


_structural(
    "default", 1, _infer_default, lambda ctx, node, x: ctx.default(node, x),
    "an optional parameter, or `identity` (that of the + or * it stands in) where it is absent", derivative=("dy",),
)  # fmt: skip


def _infer_dot(types, attrs):
    a, b = types
    for which, t in (("left", a), ("right", b)):
        if len(t.dims) not in (2, 3):
            count = f"{len(t.dims)} dim{'s' * (len(t.dims) != 1)}"
            raise OpError(
                f"the {which} operand of '@' has {count} ({t}); it needs two, or three with a batch",
                "group axes into two dims, as in x: bf16[(B T), D]",
            )
        if t.dtype.kind != "float":
            raise OpError(f"the {which} operand of '@' is {t.dtype}; products take float dtypes")
    if a.dims[:-2] != b.dims[:-2]:
        raise _no_common_batch(a, b)
    if a.dims[-1] != b.dims[-2]:  # names and sizes
        left, right = (" ".join(axis.name for axis in dim) for dim in (a.dims[-1], b.dims[-2]))
        which = "second" if a.dims[:-2] else "first"
        raise OpError(
            f"'@' contracts axis ({left}) of the left operand with axis ({right}) of the right",
            f"the last axis of the left operand and the {which} of the right must be the same; is a .T missing?",
        )
    shared = a.names & {x.name for x in b.dims[-1]}
    if shared:
        raise OpError(
            f"the result of '@' would have axis '{sorted(shared)[0]}' twice",
            "declare a second axis of equal size, as in dim A = D",
        )
    if a.dtype != b.dtype:
        raise OpError(f"'@' takes operands of one dtype, got {a.dtype} and {b.dtype}", "cast one of them")
    return Type(F32, (*a.dims[:-1], b.dims[-1]))


def _no_common_batch(a, b):
    """The error of operands of which one has three dims, or both, but not the first in common."""
    if len(a.dims) == len(b.dims):
        left, right = (" ".join(axis.name for axis in t.dims[0]) for t in (a, b))
        return OpError(
            f"the first dims of the operands of '@' are the batch, but one is ({left}) and one ({right})",
            "both operands have the batch first, as in x: bf16[B, M, K] @ w: bf16[B, K, N]",
        )
    which, t = ("left", a) if len(a.dims) == 3 else ("right", b)
    hint = (
        "where all rows share one weight, group the batch into the rows, as in x: bf16[(B M), K]" if t is a
        else "where all weights share one x, group the batch into the columns, as in w: bf16[(B N), K]"
    )  # fmt: skip
    return OpError(f"only the {which} operand of '@' has a batch ({t}); both have it, or none", hint)


def _dot(ctx, node, a, b):
    return ctx.contract(a, b, node)


_structural("dot", 2, _infer_dot, _dot,
            "a @ b: contraction of the last dim of a with the last but one of b, f32 accumulation",
            derivative=("dy @ b.T", "a.T @ dy"), symbol="@", family="dot")  # fmt: skip


def _infer_transpose(types, attrs):
    (t,) = types
    if len(t.dims) not in (2, 3):
        raise OpError(f".T needs a value of two dims, or three with a batch, got {t}")
    return Type(t.dtype, (*t.dims[:-2], t.dims[-1], t.dims[-2]))


_structural("transpose", 1, _infer_transpose,
            lambda ctx, node, x: ctx.align_axes(x, node.args[0].type.axes, node.type.axes),
            ".T: the last two dims swapped", derivative=("dy.T",))  # fmt: skip


def _infer_layout(types, attrs):
    (t,), dims = types, attrs["dims"]
    have, want = {a.name: a.size for a in t.axes}, {a.name: a.size for d in dims for a in d}
    if have != want:
        raise OpError(f"a value with axes [{', '.join(have)}] cannot be laid out as [{', '.join(want)}]")
    return Type(t.dtype, dims)


_structural("layout", 1, _infer_layout, lambda ctx, node, x: ctx.align_axes(x, node.args[0].type.axes, node.type.axes),
            "the same value with its axes in another order or grouping: `dims`", derivative=("dy",))  # fmt: skip


def replace_axis(t: Type, name: str, new: tuple[Axis, ...]) -> Type:
    """The type with one axis replaced in place (by nothing: a dim left empty disappears)."""
    dims = []
    for dim in t.dims:
        changed = tuple(b for a in dim for b in (new if a.name == name else (a,)))
        if changed:
            dims.append(changed)
    return Type(t.dtype, tuple(dims))


def _need_axis(t: Type, name: str) -> Axis:
    axis = t.axis(name)
    if axis is None:
        raise OpError(f"there is no axis '{name}' here; the value has [{', '.join(a.name for a in t.axes)}]")
    return axis


def _infer_slice(types, attrs):
    axis = _need_axis(types[0], attrs["axis"])
    index = attrs["index"]
    if axis.static is not None and not 0 <= index < axis.static:
        raise OpError(f"index {index} is outside axis '{axis.name}' of size {axis.static}")
    return replace_axis(types[0], axis.name, ())


_structural(
    "slice", 1, _infer_slice,
    lambda ctx, node, x: x.select(
        [a.name for a in node.args[0].type.axes].index(node.attr("axis")), node.attr("index")
    ),
    "z.s[0]: one position of an axis, which disappears",
)  # fmt: skip


def _infer_part(types, attrs):
    """attrs: ``axis`` cut, ``start`` (size expression), ``into`` the new Axis."""
    _need_axis(types[0], attrs["axis"])
    return replace_axis(types[0], attrs["axis"], (attrs["into"],))


_structural(
    "part", 1, _infer_part,
    lambda ctx, node, x: x.narrow(
        [a.name for a in node.args[0].type.axes].index(node.attr("axis")),
        ctx.size(node.attr("start")), ctx.size(node.attr("into").size),
    ),
    "a contiguous part of an axis, under a new axis name: what split(x, d = f | f | *) gives",
)  # fmt: skip


def _infer_stack(types, attrs):
    """attrs: ``axis``, the new Axis (its size is the number of operands), appended as a dim of its own."""
    axis = attrs["axis"]
    if any(axis.name in t.names for t in types):
        raise OpError(f"stack would make axis '{axis.name}', but an operand already has it")
    dtype = types[0].dtype if all(t.dtype == types[0].dtype for t in types) else F32
    return Type(dtype, (*broadcast(types), (axis,)))


def _stack(ctx, node, *xs):
    import torch

    axes = node.type.axes[:-1]
    return torch.stack([ctx.expand(x, arg.type.axes, axes) for x, arg in zip(xs, node.args, strict=True)], -1)


_structural("stack", None, _infer_stack, _stack, "stack(a, b, s): a new axis s from values of equal axes")


def _infer_concat(types, attrs):
    """attrs: ``parts``, the axis name joined in each operand; ``axis``, the new Axis (size: the sum)."""
    axis, parts = attrs["axis"], attrs["parts"]
    total = sympy.Integer(0)
    renamed = []
    for t, part in zip(types, parts, strict=True):
        total += _need_axis(t, part).size
        renamed.append(replace_axis(t, part, (axis,)))
    if sympy.simplify(total - axis.size) != 0:
        raise OpError(f"the parts add up to {total}, but axis '{axis.name}' has size {axis.size}")
    dtype = types[0].dtype if all(t.dtype == types[0].dtype for t in types) else F32
    return Type(dtype, broadcast(renamed))


def _concat(ctx, node, *xs):
    import torch

    position = [a.name for a in node.type.axes].index(node.attr("axis").name)
    parts = []
    for x, arg, name in zip(xs, node.args, node.attr("parts"), strict=True):
        target = list(node.type.axes)
        target[position] = arg.type.axis(name)
        parts.append(ctx.expand(x, arg.type.axes, target))
    return torch.cat(parts, position)


_structural("concat", None, _infer_concat, _concat, "concat(a, b, d): values joined along an axis")
