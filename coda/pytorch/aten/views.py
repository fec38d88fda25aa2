"""What only moves: views, slices, joins. In a program axes go by name, so most of this leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from coda.ir import Axis, Node
from coda.pytorch.aten.table import register
from coda.pytorch.cells import Cell, Dims, Group, ratio
from coda.pytorch.refusal import Refusal
from coda.pytorch.values import Value, shape_of

if TYPE_CHECKING:
    from coda.pytorch.translate import Translator


def _is_identity(node: fx.Node) -> bool:
    return node.args[0].meta["val"].shape == node.meta["val"].shape


def _drops_nothing(node: fx.Node) -> bool:
    """Whether a dropout is switched off."""
    return len(node.args) < 3 or node.args[1] == 0 or not node.args[2]


@register("view", "alias", "contiguous", "clone")
def same(t: Translator, node: fx.Node, a: Any, *args: Any, **kwargs: Any) -> Value:
    return t.value(a)


register("view", "expand", takes=_is_identity)(same)
register("view", "dropout", takes=_drops_nothing)(same)


@register("view", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def view(t: Translator, node: fx.Node, a: Any, *args: Any) -> Value:
    value = t.value(a)
    cells = [c for group in t.cells.resolve_dims(value.dims) for c in group]
    return Value(_regrouped(t, cells, shape_of(node)), value.node)


def _regrouped(t: Translator, cells: Sequence[Cell], shape: Sequence[sympy.Expr]) -> Dims:
    """The cells in order as the dims of a new shape; a cell is taken apart where a dim ends within it."""
    pending = list(cells)
    return tuple(_taken(t, pending, size) for size in shape)


def _taken(t: Translator, pending: list[Cell], size: sympy.Expr) -> Group:
    """The next cells that make up a size."""
    if size == 1:
        return (pending.pop(0),) if pending and pending[0].size == 1 else ()
    group: list[Cell] = []
    while size != 1:
        cell = pending[0] if pending else None
        if cell is not None and cell.size == size:
            size = sympy.Integer(1)
        elif cell is not None and (rest := ratio(size, cell.size)) is not None:
            size = rest
        elif cell is not None and (inner := ratio(cell.size, size)) is not None:
            t.cells.split(cell, (size, inner))
            pending[:1] = t.cells.resolve((cell,))
            continue
        else:
            raise Refusal("a view cuts across dims")
        group.append(pending.pop(0))
    return tuple(group)


@register("view", "transpose")
def transpose(t: Translator, node: fx.Node, a: Any, first: int, second: int) -> Value:
    value = t.value(a)
    dims = list(value.dims)
    dims[first], dims[second] = dims[second], dims[first]
    return Value(tuple(dims), value.node)


@register("view", "t", "numpy_T")
def turn(t: Translator, node: fx.Node, a: Any) -> Value:
    value = t.value(a)
    return Value(value.dims[::-1], value.node)


@register("view", "permute")
def permute(t: Translator, node: fx.Node, a: Any, order: Sequence[int]) -> Value:
    value = t.value(a)
    return Value(tuple(value.dims[i] for i in order), value.node)


def _slices(node: fx.Node) -> bool:
    """Whether a slice has fixed bounds; with a step it takes each n-th of a whole dim."""
    bounds = node.args[2:]
    if not all(isinstance(b, int) or b is None for b in bounds):
        return False
    size = node.args[0].meta["val"].shape[node.args[1]] if len(node.args) > 1 else 0
    step = bounds[2] if len(bounds) == 3 else 1
    return step == 1 or (
        isinstance(size, int) and size % step == 0 and bounds[0] < step and (bounds[1] or size) >= size
    )


@register("cut", "slice", takes=_slices)
def slice_(
    t: Translator, node: fx.Node, a: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    value = t.value(a)
    size = shape_of(node.args[0])[dim]
    if shape_of(node)[dim] == size:
        return value
    if not size.is_Integer:
        raise Refusal("a slice of rows is not translated")
    first, last, _ = slice(start, end).indices(int(size))
    if step == 1:
        return cut(t, value, dim, node.name, first, last)
    cells = t.cells.resolve(value.dims[dim])
    if cells and cells[-1].size != step:
        t.cells.split(cells[-1], (cells[-1].size / step, sympy.Integer(step)))
        cells = t.cells.resolve(cells)
    return lane(t, value, dim, cells[:-1], cells[-1:], first)


@register("cut", "select", takes=lambda node: all(isinstance(a, int) for a in node.args[1:]))
def select(t: Translator, node: fx.Node, a: Any, dim: int, index: int) -> Value:
    value = t.value(a)
    dim %= len(value.dims)
    taken = lane(t, value, dim, (), value.dims[dim], index)
    return Value((*taken.dims[:dim], *taken.dims[dim + 1 :]), taken.node)


def lane(t: Translator, value: Value, dim: int, rest: Group, taken: Group, index: int) -> Value:
    """One position of the cell ``taken`` of a dim, of which ``rest`` is left."""
    taken = t.cells.resolve(taken)
    if len(taken) != 1 or not taken[0].fixed:
        raise Refusal("a position of several dims, or of the rows, is not translated")
    dims = (*value.dims[:dim], t.cells.resolve(rest), *value.dims[dim + 1 :])
    t.lanes.append((tuple(g for g in dims if g), taken[0]))
    if value.node is None:
        return Value(dims)
    name = t.axis(taken[0]).name
    return Value(dims, t.emit("slice", value.node, axis=name, index=index % int(taken[0].size)))


@register("join", "stack", takes=lambda node: _joins(node))
def stack(t: Translator, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    """A new dim. Where each operand comes from a position of one, as in a rotation of pairs, it is that one again."""
    dims, nodes = t.broadcast([t.value(x) for x in tensors])
    new: Group = (Cell(f"{node.name}/stack", sympy.Integer(len(tensors)), True),)
    shape = t.cells.resolve_dims(tuple(g for g in dims if g))
    for others, cell in t.lanes:
        if cell.size == len(tensors) and t.cells.resolve_dims(others) == shape:
            t.cells.unify(new, (cell,))
            break
    new = t.cells.resolve(new)
    dim %= len(dims) + 1
    whole = (*dims[:dim], new, *dims[dim:])
    if not t.building:
        return Value(whole)
    (axis,) = t.axes_of(new)
    return Value(whole, t.emit("stack", *nodes, axis=axis))


def cut(t: Translator, value: Value, dim: int, key: str, start: int, stop: int) -> Value:
    """Some positions of one dim."""
    if stop <= start:
        raise Refusal("a slice is empty")
    dim %= len(value.dims)
    piece = t.cells.cut(value.dims[dim], key, start, stop)
    dims = (*value.dims[:dim], t.cells.resolve(piece.group), *value.dims[dim + 1 :])
    if value.node is None:
        return Value(dims)
    axis = t.axis(piece.cell)
    if piece.into is None:
        return Value(dims, position(t, value.node, axis, piece.first))
    (into,) = t.axes_of((piece.into,))
    return Value(dims, t.emit("part", value.node, axis=axis.name, start=sympy.Integer(piece.first), into=into))


def position(t: Translator, node: Node | None, axis: Axis, index: int) -> Node | None:
    """One position of an axis. The program knows of rows no size: it is that of a part of one."""
    if axis.static is None:
        one = Axis.of(t.fresh("one"), 1)
        node, axis, index = t.emit("part", node, axis=axis.name, start=sympy.Integer(index), into=one), one, 0
    return t.emit("slice", node, axis=axis.name, index=index)


@register("cut", "split", "split_with_sizes", "chunk", "unsafe_split")
def split(t: Translator, node: fx.Node, a: Any, sizes: Any, dim: int = 0) -> Value:
    """Several parts of a dim; ``getitem`` takes one."""
    value, parts, start = t.value(a), list[Value](), 0
    for i, piece in enumerate(node.meta["val"]):
        stop = start + int(piece.shape[dim])
        parts.append(cut(t, value, dim, f"{node.name}.{i}", start, stop))
        start = stop
    t.parts[node] = parts
    return value


@register("cut", "getitem")
def getitem(t: Translator, node: fx.Node, a: fx.Node, index: int) -> Value:
    return t.parts[a][index]


def _joins(node: fx.Node) -> bool:
    return all(isinstance(x.meta.get("val"), torch.Tensor) for x in node.args[0])


@register("join", "cat", takes=_joins)
def cat(t: Translator, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    values = [t.value(x) for x in tensors]
    dim %= len(values[0].dims)
    own = [v.dims[dim] for v in values]
    others, nodes = t.broadcast([Value((*v.dims[:dim], (), *v.dims[dim + 1 :]), v.node) for v in values])
    parts = [t.cells.resolve(g) for g in own]
    if any(len(p) != 1 for p in parts):
        raise Refusal("a cat along a dim made of several axes is not translated")
    size = sympy.Add(*(p[0].size for p in parts))
    whole = t.cells.resolve((Cell(f"{node.name}/cat", size, parts[0][0].fixed),))
    dims = (*others[:dim], whole, *others[dim + 1 :])
    if not t.building:
        return Value(dims)
    axes = t.axes_of(whole)
    if len(axes) != 1:
        raise Refusal("what a cat makes is taken apart again")
    names = tuple(t.axis(p[0]).name for p in parts)
    return Value(dims, t.emit("concat", *nodes, axis=axes[0], parts=names))
