"""Reductions over named axes, and how they are accumulated.

A reduction over the columns of a kernel is computed tile by tile. ``partial(sum(x, N))`` returns those tile values
unfinished (one f32 for each tile and row, in tile order); otherwise a ``finish`` kernel combines them in that fixed
order, so equal inputs and an equal variant give equal bits. ``finish(stats)`` is the reduction of partial results that
another program has left.
"""

from __future__ import annotations

from dataclasses import dataclass

from coda.dtypes import F32
from coda.ir import Node, Partial
from coda.ops.table import FINISH, Op, OpError, Type, arithmetic_dtype, build, register


@dataclass(frozen=True)
class Reduction:
    """How one kind of reduction is accumulated: ``cpp`` combines partials of ``floats`` f32 values, see
    templates/reduce.h; a mean is a sum that is divided when it is finished."""

    kind: str
    cpp: str
    floats: int = 1
    is_mean: bool = False


REDUCTIONS = {
    "sum": Reduction("sum", "coda::Sum"),
    "mean": Reduction("mean", "coda::Sum", is_mean=True),
    "max": Reduction("max", "coda::Max"),
    "min": Reduction("min", "coda::Min"),
    "logsumexp": Reduction("logsumexp", "coda::LogSumExp", floats=2),
}
PARTIALS = tuple(kind for kind, r in REDUCTIONS.items() if not r.is_mean)  # whose partial results can be stored


def _infer(types, attrs):
    """attrs: ``axes``, the names reduced over (axes of the operand)."""
    (t,) = types
    names = attrs["axes"]
    for name in names:
        if t.axis(name) is None:
            raise OpError(
                f"cannot reduce over axis '{name}': the operand has axes [{', '.join(a.name for a in t.axes)}]",
                "name an axis of the operand",
            )
    dims = tuple(d for d in (tuple(a for a in dim if a.name not in names) for dim in t.dims) if d)
    return Type(arithmetic_dtype(types), dims)


def _infer_float(types, attrs):
    """A mean or a logarithm of integers is no integer."""
    return _infer(types, attrs).with_dtype(F32)


def _reduce(kind):
    def torch_reduce(ctx, node, x):
        import torch

        axes = [i for i, a in enumerate(node.args[0].type.axes) if a.name in node.attr("axes")]
        x = ctx.compute(x, node.dtype)  # a bool counts as 0 or 1
        if kind in ("max", "min"):
            if any(x.shape[i] == 0 for i in axes):
                shape = [s for i, s in enumerate(x.shape) if i not in axes]
                return _empty_extremum(x, kind, shape)
            return (torch.amax if kind == "max" else torch.amin)(x, axes)
        if kind == "logsumexp":
            return torch.logsumexp(x, axes)
        return getattr(x, kind)(axes)

    return torch_reduce


def _empty_extremum(x, kind, shape):
    """The identity of max or min, for a reduction over nothing."""
    import torch

    if x.is_floating_point():
        return x.new_full(shape, float("-inf") if kind == "max" else float("inf"))
    limits = torch.iinfo(x.dtype)
    return x.new_full(shape, limits.min if kind == "max" else limits.max)


_DERIVATIVES = {
    "sum": "dy",
    "mean": "dy / count",  # `count`: the number of elements reduced over
    "max": "where(a == y, dy / ties, 0)",  # `ties`: the number of them that equal y (torch.amax shares evenly)
    "min": "where(a == y, dy / ties, 0)",
    "logsumexp": "dy * exp(a - y)",
}
for _kind, _text in _DERIVATIVES.items():
    register(
        Op(
            f"reduce_{_kind}", 1, _infer_float if _kind in ("mean", "logsumexp") else _infer, _reduce(_kind),
            f"{_kind} over the named axes", derivative=(_text,), surface=False, family="reduce",
        )
    )  # fmt: skip


def partial_of(reduction: Node) -> Partial:
    """What the partial results of a reduction are parts of."""
    over = tuple(a for a in reduction.args[0].type.axes if a.name in reduction.attr("axes"))
    return Partial(reduction.op.removeprefix("reduce_"), over)


def read_of(name: str, type: Type) -> Node:
    """What a program reads of a tensor: its values, or of partial results the finished ones."""
    tensor = build("input", name=name, type=type)
    return build(FINISH, tensor) if type.partial else tensor


def _infer_partial(types, attrs):
    return types[0]


def _infer_finish(types, attrs):
    (t,) = types
    if t.partial is None:
        raise OpError(
            f"'finish' takes partial results, and {t} is finished", "declare the parameter as partial[sum, D] f32[M]"
        )
    return t.with_dtype(t.dtype)


def _finish(ctx, node, x):
    return combined(node.args[0].type.partial.kind, x)


def combined(kind, partials):
    """Partial results, a torch tensor with one dim for them in front, as a finished one."""
    reduce = {"max": partials.amax, "min": partials.amin, "logsumexp": partials.logsumexp}.get(kind, partials.sum)
    return reduce(0)


register(
    Op(
        "partial", 1, _infer_partial, lambda ctx, node, x: x,
        "an unfinished reduction: stored as one value for each tile, see `coda explain`",
        surface=False, family="reduce",
    )
)  # fmt: skip
register(
    Op(
        FINISH, 1, _infer_finish, _finish, "finish(stats): what partial results of another program add up to",
        surface=False, family="structure",
    )
)  # fmt: skip
