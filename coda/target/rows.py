"""Lower a program without a product to a row kernel, or to a map kernel where nothing is reduced.

A team of threads owns a row: it holds the row's operands, reduces as often as the program asks (the mean, then the
variance around it), and stores. Reductions over the rows themselves (dgamma of a norm) become partial results of each
block, which a finish kernel adds up in fixed order. What cannot be lowered raises a CodaError that says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import sympy

from coda.dtypes import BF16, BOOL, F16, F32, I32, I64
from coda.errors import CodaError, Diagnostic
from coda.ir import Axis, Dim, Node, Output, Param, Program, dim_size, rewrite
from coda.ops import OPS, build
from coda.ops.reduce import REDUCTIONS
from coda.passes.lanes import unroll_lanes
from coda.passes.pieces import cut_pieces
from coda.target.loops import Tensor, is_leaf, joined, tensor_of
from coda.target.lower import program_args, size_operands, walk
from coda.target.plan import Finishing, Operand, Space, Store
from coda.target.rowplan import MAX_LEVELS, Access, Reading, RowPlan, Total, Writing

_READ = (BF16, F16, F32, I64, I32, BOOL)
_STORED = (BF16, F16, F32)
_STRUCTURE = {"const", "index", "size", "cast"}


def lower_rows(program: Program) -> RowPlan:
    """The plan of a program without a product."""
    try:
        return _RowLowering(program).plan()
    except CodaError as error:
        error.source = error.source or program.source
        raise


def _fail(message: str, node: Node | Param | None = None, hint: str | None = None) -> CodaError:
    return CodaError([Diagnostic(message, node.span if node else None, hint)])


def is_reduction(node: Node) -> bool:
    return node.op.startswith("reduce_")


# -- rewrites before lowering ----------------------------------------------------------------------------------------


def _prepared(program: Program) -> Program:
    """Lanes and pieces apart, axes by name alone, accumulation written out."""
    program = rewrite(program, _plain)
    program = program.with_outputs(map(_accumulated, program.outputs))
    return cut_pieces(unroll_lanes(program))


def _plain(node: Node, args: tuple[Node, ...]) -> Node | None:
    """Without layouts; a pick is the sum of the one element that is not masked."""
    if node.op in ("layout", "transpose"):
        return args[0]
    if node.op == "pick":
        z, index = args
        axis = z.type.axis(node.attr("axis"))
        chosen = build("eq", build("index", axis=axis), index, span=node.span)
        element = build("where", chosen, z, build("const", value=0.0, dtype=F32), span=node.span)
        return build("reduce_sum", element, axes=(node.attr("axis"),), span=node.span)
    return None


def _accumulated(output: Output) -> Output:
    """What an inout parameter holds afterwards."""
    if output.into is None:
        return output
    value = build("add", build("input", name=output.into, type=output.type), output.value, span=output.value.span)
    dtype = output.type.dtype
    return replace(output, value=value if value.dtype == dtype else build("cast", value, dtype=dtype, saturate=False))


def stored_pieces(value: Node) -> list[tuple[Node, Tensor]]:
    """The values an output is stored from, with where each begins: lanes of a ``stack``, pieces of a ``concat``."""
    if value.op not in ("stack", "concat"):
        return [(value, Tensor("", value.dtype, ()))]
    name = value.attr("axis").name
    result, start = [], sympy.Integer(0)
    for i, operand in enumerate(value.args):
        part = value.attr("parts")[i] if value.op == "concat" else name
        for inner, tensor in stored_pieces(operand):
            within = tensor.within if part == name else (*tensor.within, (part, name))
            offsets = tuple((name if n == part else n, at) for n, at in tensor.offsets)
            result.append((inner, replace(tensor, offsets=((name, start), *offsets), within=within)))
        start += operand.type.axis(part).size if value.op == "concat" else 1  # type: ignore[union-attr]
    return result


# -- the lowering ----------------------------------------------------------------------------------------------------


class _RowLowering:
    def __init__(self, program: Program):
        self.original = program
        self.program = _prepared(program)
        self.outputs = [(o, v, replace(t, arg=o.into or o.name, dtype=o.type.dtype, dims=o.type.dims))
                        for o in self.program.outputs for v, t in stored_pieces(o.value)]  # fmt: skip
        self.leaves = [n for n in walk([v for _, v, _ in self.outputs], is_leaf) if is_leaf(n)]
        self.leaves += [n for leaf in self.leaves for n in walk(self._indices(leaf), is_leaf) if is_leaf(n)]
        self.leaves = list(dict.fromkeys(self.leaves))
        self.tensors = {leaf: tensor_of(leaf) for leaf in self.leaves}
        self.family = self._family()
        self._nest()
        self.nodes = self._nodes([v for _, v, _ in self.outputs])
        self.spaces = self._spaces()
        self.levels = self._levels()
        self.accesses: list[Access] = []

    def _indices(self, leaf: Node) -> list[Node]:
        index = tensor_of(leaf).index
        return [] if index is None else [index]

    def _nodes(self, roots: list[Node]) -> list[Node]:
        """The math, operands first, with the values that select from tables."""
        indices = [i for leaf in walk(roots, is_leaf) if is_leaf(leaf) for i in self._indices(leaf)]
        return walk([*indices, *roots], is_leaf)

    # ---- rows and columns ----

    def _family(self) -> set[str]:
        """The axis that is fastest in the largest tensor, and its parts: what the threads of a team share."""
        seen = [
            *((leaf.type.axes, t) for leaf, t in self.tensors.items()),
            *((v.type.axes, t) for _, v, t in self.outputs),
        ]
        axes, tensor = max(seen, key=lambda s: len(s[0]))
        if not axes:
            return set()
        present = {tensor.stored(a.name) for a in axes}
        stored = [a.name for dim in tensor.dims for a in dim if a.name in present]
        fastest = stored[-1] if stored else axes[-1].name  # a table read at a position for each column
        return {fastest, *(a.name for axes, t in seen for a in axes if t.stored(a.name) == fastest)}

    def _nest(self) -> None:
        """A reduction over rows and columns becomes one over the columns, then one over the rows. Label: algebraic (the
        order of additions, which is the kernel's in any case)."""
        last = {
            a.name
            for t in self.tensors.values()
            for dim in t.dims[-1:]
            for a in dim
            if self.family & {x.name for x in dim}
        }

        def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
            axes = node.attr("axes") if is_reduction(node) else ()
            inside, outside = [tuple(a for a in axes if (a in last | self.family) == side) for side in (True, False)]
            if not (inside and outside and self.family & set(inside)) or node.op == "reduce_logsumexp":
                return None
            inner = build(node.op, *args, axes=inside, span=node.span)
            return build(node.op, inner, axes=outside, span=node.span)

        values = [Output(f"_{i}", v, v.type) for i, (_, v, _) in enumerate(self.outputs)]
        new = rewrite(Program.of("values", (), values), visit).outputs
        self.outputs = [(o, n.value, t) for (o, _, t), n in zip(self.outputs, new, strict=True)]

    def is_over_columns(self, node: Node) -> bool:
        return is_reduction(node) and bool(self.family & set(node.attr("axes")))

    def _spaces(self) -> tuple[Dim, ...]:
        """The column spaces, widest first: what is reduced over, and the fastest axes that nothing reduces."""
        reduced = {frozenset(n.attr("axes")): n for n in self.nodes if self.is_over_columns(n)}
        for one, node in reduced.items():
            if any(one != other and one & other for other in reduced):
                raise _fail(
                    f"a kernel reduces each row over one set of axes; here over ({' '.join(sorted(one))}) and over "
                    "others that overlap it", node, "return the inner reduction from a program of its own",
                )  # fmt: skip
        found = [self._ordered(names, node) for names, node in reduced.items()]
        held = {n for names in reduced for n in names}
        axes = {a.name: a for n in self.nodes for a in n.type.axes}
        found += [(axes[name],) for name in sorted(self.family & axes.keys()) if name not in held]
        if not reduced and len(found) == 1:
            found = [self._widened(found[0])]
        return tuple(found) or ((),)

    def _ordered(self, names: frozenset[str], node: Node) -> Dim:
        """Axes that are reduced together, as one loop."""
        axes = tuple(a for a in node.args[0].type.axes if a.name in names)
        loops = joined(axes, [*self.tensors.values(), *(t for _, _, t in self.outputs)], set())
        if len(loops) > 1:
            raise _fail(
                f"a reduction over ({' '.join(a.name for a in axes)}), which do not lie next to each other in memory",
                node, "group them in one dim, as in x: bf16[M, (H d)]",
            )  # fmt: skip
        return loops[0]

    def _widened(self, space: Dim) -> Dim:
        """The columns of a map, with the axes in front of them that lie in one run with them everywhere."""
        tensors = [*self.tensors.values(), *(t for _, _, t in self.outputs)]
        counted = {n.attr("axis").name for n in self.nodes if n.op == "index"}
        order = [a for a in self._row_axes(space)] + list(space)
        loops = joined(order, tensors, counted)
        return loops[-1] if loops and loops[-1][-1] == space[-1] else space

    def _row_axes(self, *spaces: Dim) -> list[Axis]:
        """All other axes, in the order of a result that has them, or of the largest value."""
        columns = {a.name for s in spaces for a in s} | self.family
        stored = [tuple(a for dim in t.dims for a in dim if a in v.type.axes) for _, v, t in self.outputs]
        values = sorted((n.type.axes for n in self.nodes), key=lambda axes: -len(axes))
        rows = dict.fromkeys(a for axes in values for a in axes if a.name not in columns)
        whole = [axes for axes in stored if rows.keys() <= set(axes)]
        return [a for a in dict.fromkeys(a for axes in whole for a in axes) if a in rows] or list(rows)

    def _levels(self) -> tuple[Dim, ...]:
        counted = {n.attr("axis").name for n in self.nodes if n.op == "index"}
        tensors = [*self.tensors.values(), *(t for _, _, t in self.outputs)]
        levels = joined(self._row_axes(*self.spaces), tensors, counted)
        if len(levels) > MAX_LEVELS:
            names = ", ".join(" ".join(a.name for a in level) for level in levels)
            raise _fail(f"the rows are counted by {len(levels)} loops ({names}); a kernel has up to {MAX_LEVELS}")
        return levels

    def space(self, node: Node) -> int | None:
        """The column space of a value; None for one value of each row."""
        inside = [i for i, s in enumerate(self.spaces) if node.type.names & {a.name for a in s}]
        if len(inside) > 1:
            raise _fail("a value over two parts of one axis at once", node)
        return inside[0] if inside else None

    def row_names(self, node: Node) -> frozenset[str]:
        return node.type.names & {a.name for level in self.levels for a in level}

    # ---- the plan ----

    def plan(self) -> RowPlan:
        for node in self.nodes:
            self._check(node)
        late = self._late()
        stored = [(o, v, t) for o, v, t in self.outputs if v not in late]
        finished = [(o, v, t) for o, v, t in self.outputs if v in late]
        totals = [n for n in self.nodes if self._is_total(n)]
        roots = [v for _, v, _ in stored] + [t.args[0] for t in totals]
        stages = self._stages(roots)
        readings = tuple(map(self._reading, self._read(roots)))
        writings = tuple(self._writing(v, t) for _, v, t in stored)
        partials = tuple(self._total(t) for t in totals)
        stores = tuple(Store(_kind(t), (t.reduction.args[0],), F32, reduction=_reduction(t.reduction), finished=True)
                       for t in partials)  # fmt: skip
        sizes = self._sizes(roots)
        return RowPlan(
            name=self.program.name, program=self.program, args=program_args(self.original), levels=self.levels,
            spaces=self.spaces, accesses=tuple(self.accesses), readings=readings + sizes, stages=stages,
            writings=writings, totals=partials, stores=stores, finishings=self._finishings(partials, finished),
        )  # fmt: skip

    def _check(self, node: Node) -> None:
        """Whether generated math has words for a node."""
        if is_leaf(node):
            param = self.program.param(tensor_of(node).arg)
            if param.type.dtype not in _READ:
                raise _fail(
                    f"operand '{param.name}' is {param.type.dtype}; a kernel reads bf16, f16, f32, i64, i32 and bool",
                    param,
                )
        elif is_reduction(node):
            if node.dtype.kind != "float":
                raise _fail("a reduction of integers is lowered in a later release", node, "convert: 1.0 * x")
        elif node.op == "partial":
            raise _fail("a row kernel finishes its reductions", node, "return the reduction without partial(...)")
        elif OPS[node.op].cpp is None and node.op not in _STRUCTURE:
            raise _fail(f"'{node.op}' in a kernel over rows is lowered in a later release", node)
        if node.op == "cast" and not (node.dtype in _STORED or node.dtype in (I32, I64)):
            raise _fail(f"a cast from {node.args[0].dtype} to {node.dtype} is lowered in a later release", node)

    def _is_total(self, node: Node) -> bool:
        """A reduction over all rows."""
        if not is_reduction(node) or self.is_over_columns(node):
            return False
        rows = {a.name for level in self.levels for a in level}
        if set(node.attr("axes")) != rows or self.row_names(node.args[0]) != rows:
            raise _fail(
                f"a reduction over ({' '.join(sorted(node.attr('axes')))}) of rows ({' '.join(sorted(rows))}); a "
                "kernel reduces over all rows, or over the columns", node,
                "reduce in two programs, or over all of these axes",
            )  # fmt: skip
        if node.op == "reduce_logsumexp":
            raise _fail("'logsumexp' over the rows is lowered in a later release", node)
        return True

    def _late(self) -> set[Node]:
        """What is known only when all rows are."""
        late: set[Node] = set()
        for node in self.nodes:
            if is_leaf(node) or not (self._is_total(node) or any(a in late for a in node.args)):
                continue
            if self.row_names(node) or (is_reduction(node) and any(a in late for a in node.args)):
                raise _fail("a reduction over all rows is used in every row again; that is a second kernel", node)
            late.add(node)
        return late

    def _stages(self, roots: list[Node]) -> tuple[tuple[Node, ...], ...]:
        """The reductions over columns by when they are known."""
        stage: dict[Node, int] = {}
        found: list[list[Node]] = []
        for node in self._nodes(roots):
            stage[node] = 0 if is_leaf(node) else max((stage[a] for a in node.args), default=0)
            if self.is_over_columns(node):
                stage[node] += 1
                while len(found) < stage[node]:
                    found.append([])
                found[stage[node] - 1].append(node)
        return tuple(map(tuple, found))

    # ---- tensors ----

    def _add(self, access: Access) -> int:
        if access not in self.accesses:
            self.accesses.append(access)
        return self.accesses.index(access)

    def _read(self, roots: list[Node]) -> list[Node]:
        return [n for n in self._nodes(roots) if is_leaf(n)]

    def _reading(self, leaf: Node) -> Reading:
        tensor, space = self.tensors[leaf], self.space(leaf)
        index = tensor.index
        if index is not None and (self.space(index) is not None or is_reduction(index)):
            raise _fail(
                "a table is read at a position of its own for each column; a kernel takes one for each row", leaf
            )
        access = self._add(tensor.access(self.levels, None if space is None else self.spaces[space]))
        varies = bool(self.row_names(leaf)) or index is not None
        return Reading(leaf, access, space, varies, index)

    def _writing(self, value: Node, tensor: Tensor) -> Writing:
        if tensor.dtype not in _STORED:
            raise _fail(f"output '{tensor.arg}' is {tensor.dtype}; this release stores bf16, f16 and f32", value)
        space = self.space(value)
        access = tensor.access(self.levels, None if space is None else self.spaces[space])
        missing = tuple(i for i, stride in enumerate(access.levels) if stride is None)
        return Writing(value, self._add(access), space, missing)

    def _total(self, reduction: Node) -> Total:
        """Its partial results: one for each block and column, in the workspace."""
        self.accesses.append(Access(None, F32))
        return Total(reduction, len(self.accesses) - 1, self.space(reduction.args[0]))

    def _sizes(self, roots: list[Node]) -> tuple[Reading, ...]:
        nodes = [n for n in self._nodes(roots) if n.op == "size" and not n.attr("expr").is_Integer]
        return tuple(Reading(n, self._add(Access(None, I64, size=n.attr("expr"))), None, False) for n in nodes)

    # ---- finish kernels ----

    def _finishings(
        self, totals: tuple[Total, ...], finished: list[tuple[Output, Node, Tensor]]
    ) -> tuple[Finishing, ...]:
        result = []
        for kind in ("column", "total"):
            slots = [i for i, t in enumerate(totals) if _kind(t) == kind]
            reductions = [totals[i].reduction for i in slots]
            ready = [(o, v, t) for o, v, t in finished if (self.space(v) is None) == (kind == "total")]
            for output, value, tensor in ready:
                self._check_finished(output, value, tensor, kind)
            if ready:
                above = walk([v for _, v, _ in ready], lambda n: n in reductions or is_leaf(n))  # noqa: B023
                operands = self._operands(n for n in above if is_leaf(n))
                operands += size_operands(above, dim_size(tuple(a for level in self.levels for a in level)))
                results = tuple((v, o.into or o.name, o.type.dtype) for o, v, _ in ready)
                result.append(Finishing(kind, tuple(slots), tuple(reductions), operands, results))
        return tuple(result)

    def _check_finished(self, output: Output, value: Node, tensor: Tensor, kind: str) -> None:
        if output.type.dtype not in _STORED:
            raise _fail(f"output '{output.name}' is {output.type.dtype}; this release stores bf16, f16 and f32", value)
        if tensor.offsets:
            raise _fail(f"output '{output.name}' joins reductions over all rows; return them one by one", value)
        if kind == "column" and (len(output.type.dims) != 1 or output.type.dims[0] not in self.spaces):
            raise _fail(
                f"output '{output.name}' is stored as {output.type}; a reduction over all rows is a vector", value
            )

    def _operands(self, leaves: Iterable[Node]) -> tuple[Operand, ...]:
        found: dict[tuple[str, float], Operand] = {}
        for leaf in leaves:
            tensor = self.tensors[leaf]
            if tensor.offsets or tensor.gather or len(tensor.dims) > 1:
                raise _fail(f"'{tensor.arg}' is read in parts where a reduction over all rows is finished", leaf)
            space = Space.UNIFORM if self.space(leaf) is None else Space.COLUMN
            column = None if space is Space.UNIFORM else 0
            found[tensor.arg, tensor.identity] = Operand(
                tensor.arg, space, tensor.dtype, None, column, identity=tensor.identity
            )
        return tuple(found.values())


def _kind(total: Total) -> str:
    return "total" if total.space is None else "column"


def _reduction(node: Node) -> str:
    return node.op.removeprefix("reduce_")


assert set(REDUCTIONS) == {"sum", "mean", "max", "min", "logsumexp"}  # what templates/row.h accumulates
