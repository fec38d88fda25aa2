"""A region of an ATen graph as a program.

Every operation is translated by what it computes (the tables in ``coda.pytorch.aten``); there is no pattern for a model
or a layer. Two things differ between the languages:

* torch dims go by position, our axes by name: ``cells.py`` finds the names. The graph is walked until nothing new is
  learnt about them; those walks build nothing. The last one builds the program.
* torch rounds each result to its dtype; our arithmetic is f32 between the casts that are written. With
  ``numerics="eager"`` a cast is written behind every operation. With ``"fused"`` only where the model says so, or where
  a tensor has to exist: an explicit ``.to``, what is returned, what a product and something else read, and what is
  widened or normalised (a statistic sees the stored value).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from coda.dtypes import F32, DType
from coda.errors import CodaError
from coda.frontend import expression
from coda.ir import Axis, Dim, Node, Output, Param, Program, Type
from coda.ops import OpError, build
from coda.passes.axes import conform
from coda.passes.naming import Fresh
from coda.pytorch.aten import handler, is_view, kind
from coda.pytorch.cells import Cell, Cells, Dims, Group, total
from coda.pytorch.normal import Positions, distribute, tables
from coda.pytorch.refusal import Refusal
from coda.pytorch.values import Value, dtype_of, memory_order, shape_of

MOST_WALKS = 64


@dataclass(frozen=True)
class Result:
    """How an output of a program becomes a torch tensor: the axes of each dim in memory order, () for a dim of size 1,
    and the order in which torch sees these dims."""

    fx: fx.Node
    name: str
    dims: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Translation:
    """A program, the graph nodes that are its tensors and scalars in order, its symbolic sizes and its results."""

    program: Program
    tensors: tuple[fx.Node, ...]
    scalars: tuple[fx.Node, ...]
    positions: tuple[Positions, ...]  # their parameters come between those of tensors and scalars
    sizes: dict[str, sympy.Expr]
    results: tuple[Result, ...]


def translate(
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    weights: Collection[fx.Node],
    differentiable: Collection[fx.Node] = (),
    numerics: str = "fused",
) -> Translation:
    """The program of some nodes of a graph, given in order. Raises Refusal where they have none."""
    return Translator(list(nodes), list(outputs), weights, differentiable, numerics).run()


@dataclass
class Translator:
    """Handlers of operations (see ``coda.pytorch.aten``) get the translator as their first argument."""

    nodes: list[fx.Node]
    outputs: list[fx.Node]
    weights: Collection[fx.Node]
    differentiable: Collection[fx.Node]
    numerics: str
    cells: Cells = field(default_factory=Cells)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    columns: dict[fx.Node, list[Group]] = field(default_factory=dict)  # of the products that read a matrix
    parts: dict[fx.Node, list[Value]] = field(default_factory=dict)  # of what has several results
    lanes: list[tuple[Dims, Cell]] = field(default_factory=list)  # of which positions were taken, and the other dims
    leaves: dict[fx.Node, Dims] = field(default_factory=dict)
    params: dict[fx.Node, Param] = field(default_factory=dict)
    axes: dict[str, Axis] = field(default_factory=dict)
    extents: dict[str, sympy.Expr] = field(default_factory=dict)  # of the axes, in this graph
    building: bool = False

    def __post_init__(self) -> None:
        self.inside = set(self.nodes)
        self.fresh = Fresh(set())

    def run(self) -> Translation:
        for _ in range(MOST_WALKS):
            self.cells.learnt = False
            self.walk()
            self.align_heads()
            if not self.cells.learnt:
                break
        else:
            raise Refusal("its dims do not come to rest")
        self.building = True
        self.walk()
        return self.translation()

    def walk(self) -> None:
        self.values, self.columns, self.lanes = {}, defaultdict(list), []
        for node in self.nodes:
            try:
                self.values[node] = self.translated(node)
            except (Refusal, OpError, CodaError) as error:
                raise Refusal(str(error).splitlines()[0], node) from error

    def translated(self, node: fx.Node) -> Value:
        """The value of one operation."""
        handle = handler(node)
        if handle is None:
            raise Refusal(f"{node.target} is not translated")
        return self.rounded(node, handle(self, node, *node.args, **node.kwargs))

    def align_heads(self) -> None:
        """Products that read one matrix and have heads of one size: q, k and v. Nothing in the region says that their
        heads are over one axis, but then their weights can lie side by side."""
        for columns in self.columns.values():
            heads = [g for g in map(self.cells.resolve, columns) if len(g) >= 2]
            for group in heads[1:]:
                if total(group[1:]) == total(heads[0][1:]):
                    self.cells.unify(group[1:], heads[0][1:])

    # What handlers ask for.

    def value(self, arg: Any) -> Value:
        """An operand: an operation of the region, an input of it, or a number."""
        if not isinstance(arg, fx.Node):
            return Value((), self.number(arg))
        if arg in self.inside:
            return self.values[arg]
        dims = self.leaf(arg)
        return Value(self.cells.resolve_dims(dims), self.input(arg, dims) if self.building else None)

    def number(self, value: float) -> Node | None:
        if not isinstance(value, (int, float)):
            raise Refusal(f"{value!r} is no number")
        return self.emit("const", value=float(value), dtype=F32)

    def emit(self, op: str, *args: Node | None, **attrs: Any) -> Node | None:
        """A node, in the walk that builds."""
        return build(op, *args, **attrs) if self.building else None  # type: ignore[arg-type]

    def text(self, text: str, **nodes: Node | None) -> Node | None:
        """A node from program text over other nodes."""
        return expression(text, **nodes) if self.building else None  # type: ignore[arg-type]

    def broadcast(self, values: Sequence[Value]) -> tuple[Dims, list[Node | None]]:
        """The dims of an elementwise result, and the operands over its axes."""
        rank = max(len(v.dims) for v in values)
        padded = [((),) * (rank - len(v.dims)) + v.dims for v in values]
        dims: list[Group] = []
        nodes = [v.node for v in values]
        for position in range(rank):
            group: Group = ()
            for i, own in enumerate(padded):
                if not own[position]:
                    continue
                if not group:
                    group = own[position]
                elif not self.cells.unify(own[position], group):
                    nodes[i] = self.renamed(nodes[i], own[position], group)
            dims.append(self.cells.resolve(group))
        return tuple(dims), nodes

    def renamed(self, node: Node | None, old: Group, new: Group) -> Node | None:
        """The value with the axes of one dim under other names: square weights give two axes of one size."""
        if node is None:
            return None
        for a, b in zip(self.axes_of(old), self.axes_of(new), strict=True):
            if a != b and node.type.axis(a.name):
                node = build("part", node, axis=a.name, start=sympy.Integer(0), into=b)
        return node

    def axes_of(self, group: Group) -> Dim:
        return tuple(self.axis(c) for c in self.cells.resolve(group))

    def axis(self, cell: Cell) -> Axis:
        """The axis of a cell: M, M2 ... for rows, N, N2 ... for what has a fixed size."""
        if cell.key not in self.axes:
            name = self.fresh("N" if cell.fixed else "M").replace("_", "")
            self.axes[cell.key] = Axis.of(name, cell.size) if cell.fixed else Axis.free(name)
            self.extents[name] = cell.size
        return self.axes[cell.key]

    def matrix(self, value: Value, columns: int, dtype: DType) -> Node | None:
        """A value as an operand of a product: its leading dims are the rows, its last ``columns`` dims the columns."""
        if value.node is None:
            return None
        split = len(value.dims) - columns
        rows, cols = ([a for g in dims for a in self.axes_of(g)] for dims in (value.dims[:split], value.dims[split:]))
        node = conform(value.node, Type(dtype, (tuple(rows), tuple(cols))))
        return node if node.dtype == dtype else build("cast", node, dtype=dtype, saturate=False)

    # Inputs.

    def leaf(self, node: fx.Node) -> Dims:
        """The dims of an input, as they begin."""
        if node not in self.leaves:
            shape = shape_of(node)
            weight = node in self.weights and len(shape) <= 2  # others, as learnt positions, have rows like activations
            last = len(shape) - 1
            single = last - 1 if not weight and all(s == 1 for s in shape[:-1]) else None  # one row is a row, too
            fixed = [bool(size.is_Integer) and (weight or i == last) for i, size in enumerate(shape)]
            self.leaves[node] = tuple(
                () if size == 1 and i != single else (Cell(f"{node.name}/{i}", size, fixed[i]),)
                for i, size in enumerate(shape)
            )
            self.cells.tensors.append(self.leaves[node])
        return self.leaves[node]

    def input(self, node: fx.Node, dims: Dims) -> Node:
        if node not in self.params:
            self.params[node] = self.param(node, dims)
        return build("input", name=self.params[node].name, type=self.params[node].type)

    def param(self, node: fx.Node, dims: Dims) -> Param:
        dtype = dtype_of(node)
        if dtype is None:
            raise Refusal(f"an operand of dtype {node.meta['val'].dtype} has no place in a program")
        type_ = Type(dtype, self.grouped([c for group in self.cells.resolve_dims(dims) for c in group], dims))
        stem = "s" if not type_.dims else "x" if node not in self.weights else "w" if len(type_.dims) > 1 else "g"
        return Param(self.fresh(stem), type_)

    def grouped(self, cells: Sequence[Cell], dims: Dims) -> tuple[Dim, ...]:
        """Cells in memory order as dims: the rows of an activation are one dim and its columns another."""
        kinds = [c.fixed for c in cells]
        if kinds == sorted(kinds) and len(set(kinds)) == 2:
            groups: list[Group] = [tuple(c for c in cells if c.fixed == fixed) for fixed in (False, True)]
        else:
            groups = list(self.cells.resolve_dims(dims))
        return tuple(self.axes_of(g) for g in groups if g)

    # Rounding.

    def rounded(self, node: fx.Node, value: Value) -> Value:
        dtype = dtype_of(node)
        if dtype is None or dtype.kind != "float" or value.node is None or is_view(node):
            return value
        computed = value.node.dtype == F32 and value.node.op != "cast"
        if dtype.bits >= 32 or not computed or not (self.numerics == "eager" or self.is_stored(node)):
            return value
        return Value(value.dims, build("cast", value.node, dtype=dtype, saturate=False))

    def is_stored(self, node: fx.Node) -> bool:
        """Whether a result has to be a tensor in memory, or the model treats it as one."""
        kinds = {kind(u) for u in self.readers(node)}
        products = "product" in kinds
        return node in self.outputs or bool(kinds & {"widening", "norm", "reduction"}) or (products and len(kinds) > 1)

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """The operations of the region that read a result, through views."""
        found: list[fx.Node] = []
        for user in node.users:
            if user in self.inside:
                found += self.readers(user) if is_view(user) else [user]
            elif user in self.outputs:
                found.append(user)
        return found

    # The program.

    def translation(self) -> Translation:
        results, outputs = [], []
        for node in self.outputs:
            result, output = self.output(node)
            results.append(result)
            outputs.append(output)
        order = list(self.params)
        tensors = [n for n in order if isinstance(n.meta["val"], torch.Tensor)]
        scalars = [n for n in order if n not in tensors]
        plain = distribute(Program.of("region", [self.params[n] for n in tensors], outputs))
        constant = {self.params[n].name for n in tensors if n not in self.differentiable}
        program, positions, was = tables(plain, constant)
        for name, axes in was.items():
            self.extents[name] = sympy.Mul(*(self.extents[a.name] for a in axes))
        program = replace(program, params=(*program.params, *(self.params[n] for n in scalars)))
        free = {a.name: self.extents[a.name] for a in program.axes if a.is_free}
        return Translation(program, tuple(tensors), tuple(scalars), tuple(positions), free, tuple(results))

    def output(self, node: fx.Node) -> tuple[Result, Output]:
        value = self.values[node]
        dtype, dims = dtype_of(node), self.cells.resolve_dims(value.dims)
        assert value.node is not None and dtype is not None
        order = memory_order(node.meta["val"])
        cells = [c for i in order for c in dims[i]]
        type_ = Type(dtype, self.grouped(cells, tuple(dims[i] for i in order)))
        stored = value.node if value.node.dtype == dtype else build("cast", value.node, dtype=dtype, saturate=False)
        name = self.fresh("y")
        in_memory = tuple(tuple(a.name for a in self.axes_of(dims[i])) for i in order)
        inverse = tuple(order.index(i) for i in range(len(order)))
        return Result(node, name, in_memory, inverse), Output(name, stored, type_)
