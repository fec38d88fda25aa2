"""Lower a program without a product to a row kernel, or to a map kernel where nothing is reduced.

Values over different axes, as the heads of q and of k, are *parts* of the kernel (rowpart.py). A team of threads owns a
row of a part. What no row finishes becomes partials, which a finish kernel adds up in fixed order: reductions over the
rows (dgamma of a norm), over the heads of a row, and sums of reductions of several parts. What cannot be lowered raises
a CodaError that says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy

from coda.dtypes import BF16, BOOL, F16, F32, I32, I64
from coda.errors import CodaError
from coda.ir import Axis, Node, Output, Param, Program, rewrite
from coda.ops import OPS, build
from coda.ops.reduce import REDUCTIONS
from coda.passes.join_sums import join_sums
from coda.passes.lanes import unroll_lanes
from coda.passes.pieces import cut_pieces
from coda.passes.placed_random import placed_random
from coda.target.loops import Tensor, is_leaf, joined, tensor_of
from coda.target.lower import program_args, size_operands, walk
from coda.target.plan import Operand, Space, Store
from coda.target.rowpart import STORED, Late, PartLowering, fail, is_reduction, math
from coda.target.rowplan import MAX_PARTS, Access, Partials, RowFinishing, RowPart, RowPlan

_READ = (BF16, F16, F32, I64, I32, BOOL)
_STRUCTURE = {"const", "index", "position", "size", "cast"}


def lower_rows(program: Program) -> RowPlan:
    """The plan of a program without a product."""
    try:
        return _RowLowering(program).plan()
    except CodaError as error:
        error.source = error.source or program.source
        raise


# -- rewrites before lowering ----------------------------------------------------------------------------------------


def _prepared(program: Program) -> Program:
    """Lanes and pieces apart, axes by name alone, accumulation written out."""
    leading = {p.type.dims[0] for p in program.params if p.type.dims and len(p.type.dims[0]) > 1}
    program = rewrite(placed_random(program, leading), _plain)
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


# -- axes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Values over some of the axes ``names``, of which the threads of a team share ``family``: the one that is fastest
    in the largest tensor, and its pieces. ``columns``: what a row reduces over."""

    names: frozenset[str]
    family: frozenset[str]
    columns: frozenset[str]


class _Groups:
    """The axes of a program in groups: values over axes of one group are a part of the kernel."""

    def __init__(self, values: list[tuple[Node, Tensor]]):
        self.nodes = math(v for v, _ in values)
        leaves = {n: tensor_of(n) for n in self.nodes if is_leaf(n)}
        self.seen = [*((n.type.axes, t) for n, t in leaves.items()), *((v.type.axes, t) for v, t in values)]
        widest = max((len(axes) for axes, _ in self.seen), default=0)
        self.fastest = dict.fromkeys(_fastest(axes, t) for axes, t in self.seen if axes and len(axes) == widest)
        sets = sorted({self.wholes(n.type.names) for n in self.nodes}, key=lambda s: (-len(s), sorted(s)))
        largest = [s for s in sets if not any(s < other for other in sets)]
        order = {s: i for i, s in enumerate(dict.fromkeys(self.wholes(n.type.names) for n in self.nodes))}
        self.all = tuple(map(self.group, sorted(largest, key=order.__getitem__)))

    def pieces(self, whole: str) -> set[str]:
        """An axis and its pieces."""
        return {a.name for axes, t in self.seen for a in axes if t.stored(a.name) == whole} | {whole}

    def wholes(self, names: Iterable[str]) -> frozenset[str]:
        """The axes, but the fastest ones for their pieces."""
        known = {piece: whole for whole in self.fastest for piece in self.pieces(whole)}
        return frozenset(known.get(name, name) for name in names)

    def group(self, names: frozenset[str]) -> _Group:
        inside = [(axes, t) for axes, t in self.seen if self.wholes(a.name for a in axes) <= names and axes]
        if not inside:
            return _Group(names, frozenset(), frozenset())
        axes, tensor = max(inside, key=lambda s: len(s[0]))
        family = frozenset(self.pieces(_fastest(axes, tensor)))
        return _Group(names, family, self.columns(names, family, [t for _, t in inside]))

    def columns(self, names: frozenset[str], family: frozenset[str], tensors: list[Tensor]) -> frozenset[str]:
        """What a row has side by side: the last dims of tensors, where each is one loop and is reduced whole; else the
        family alone."""
        wide = family | {a.name for t in tensors for dim in t.dims[-1:] for a in dim if family & {x.name for x in dim}}
        nodes = [n for n in self.nodes if self.wholes(n.type.names) <= names]
        parts = {tuple(a for a in n.type.axes if a.name in wide) for n in nodes if n.type.names & family}
        reduced = [(set(n.attr("axes")) & wide, n.args[0].type.names & wide) for n in self.nodes if is_reduction(n)
                   and self.wholes(n.args[0].type.names) <= names]  # fmt: skip
        counted = any(n.op == "index" and n.attr("axis").name in wide for n in nodes)
        whole = all(not axes or axes == all_there_are for axes, all_there_are in reduced)
        one_loop = all(len(axes) <= 1 or (not counted and len(joined(axes, tensors)) == 1) for axes in parts)
        return wide if whole and one_loop else family

    def of(self, names: Iterable[str]) -> _Group | None:
        wholes = self.wholes(names)
        return next((g for g in self.all if wholes <= g.names), None)


def _fastest(axes: tuple[Axis, ...], tensor: Tensor) -> str:
    """The axis that is fastest in memory."""
    present = {tensor.stored(a.name) for a in axes}
    stored = [a.name for dim in tensor.dims for a in dim if a.name in present]
    return stored[-1] if stored else axes[-1].name  # a table read at a position for each column


# -- the lowering ----------------------------------------------------------------------------------------------------


@dataclass
class _Contents:
    """What a part computes."""

    stored: list[tuple[Node, Tensor]] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)


@dataclass
class _Finish:
    """Results that one finish kernel makes, over the axes ``axes``."""

    axes: tuple[Axis, ...]
    group: _Group | None
    results: list[tuple[Output, Node, Tensor]] = field(default_factory=list)
    reductions: dict[Node, None] = field(default_factory=dict)


class _RowLowering:
    def __init__(self, program: Program):
        self.original = program
        self.program = _prepared(program)
        self.outputs = [(o, v, replace(t, arg=o.into or o.name, dtype=o.type.dtype, dims=o.type.dims))
                        for o in self.program.outputs for v, t in stored_pieces(o.value)]  # fmt: skip
        self.groups = _Groups([(v, t) for _, v, t in self.outputs])
        self._nest()
        self.nodes = math(v for _, v, _ in self.outputs)
        for node in self.nodes:
            self._check(node)

    def _nest(self) -> None:
        """A reduction over rows and columns becomes one over the columns, then one over the rows; a mean over rows is a
        sum, divided; sums of the pieces of an axis are one. Label: algebraic (the order of additions, which is the
        kernel's in any case)."""

        def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
            group = self.groups.of(node.args[0].type.names) if is_reduction(node) else None
            if group is None:
                return None
            sizes = {a.name: a.size for a in node.args[0].type.axes}
            inside, outside = [
                tuple(a for a in node.attr("axes") if (a in group.columns) == side) for side in (True, False)
            ]
            if not (group.family & set(inside)):
                inside, outside = (), node.attr("axes")
            mean = node.op == "reduce_mean" and (outside or len(self.groups.all) > 1)
            if not mean and not (inside and outside):
                return None
            value = args[0]
            for axes in (inside, outside):
                if axes:
                    value = build("reduce_sum" if mean else node.op, value, axes=axes, span=node.span)
            count = build("size", expr=sympy.Mul(*(sizes[a] for a in node.attr("axes")))) if mean else None
            return value if count is None else build("div", value, count, span=node.span)

        values = [Output(f"_{i}", v, v.type) for i, (_, v, _) in enumerate(self.outputs)]
        new = join_sums(rewrite(Program.of("values", (), values), visit))[0].outputs
        self.outputs = [(o, n.value, t) for (o, _, t), n in zip(self.outputs, new, strict=True)]

    def _check(self, node: Node) -> None:
        """Whether generated math has words for a node."""
        if is_leaf(node):
            param = self.program.param(tensor_of(node).arg)
            if param.type.dtype not in _READ:
                raise fail(
                    f"operand '{param.name}' is {param.type.dtype}; a kernel reads bf16, f16, f32, i64, i32 and bool",
                    param,
                )
            if param.type.partial:
                self._check_partial(param, node)
        elif is_reduction(node):
            if node.dtype.kind != "float":
                raise fail("a reduction of integers is lowered in a later release", node, "convert: 1.0 * x")
        elif node.op == "position" and node.type.names & frozenset().union(*(g.columns for g in self.groups.all)):
            raise fail("positions in a group of columns are lowered in a later release", node, "give them one axis")
        elif node.op == "partial":
            raise fail("a row kernel finishes its reductions", node, "return the reduction without partial(...)")
        elif OPS[node.op].cpp is None and node.op not in _STRUCTURE:
            raise fail(f"'{node.op}' in a kernel over rows is lowered in a later release", node)
        if node.op == "cast" and not (node.dtype in STORED or node.dtype in (I32, I64)):
            raise fail(f"a cast from {node.args[0].dtype} to {node.dtype} is lowered in a later release", node)

    def _check_partial(self, param: Param, node: Node) -> None:
        """Whether a row finishes partial results of another program."""
        assert param.type.partial is not None
        kind = param.type.partial.kind
        if REDUCTIONS[kind].floats > 1:
            raise fail(f"partial results of '{kind}' are two values each", param, "pass the finished values")
        if any(node.type.names & group.columns for group in self.groups.all):
            raise fail("partial results are finished for each row, and these vary over columns", param)

    # ---- what a row finishes, and what it does not ----

    def _in_row(self, reduction: Node) -> bool:
        group = self.groups.of(reduction.args[0].type.names)
        return group is not None and set(reduction.attr("axes")) <= group.columns

    @cached_property
    def _homes(self) -> dict[Node, _Group | None]:
        """The group in which each value is computed; None for what is late: known only behind the kernel."""
        names: dict[Node, frozenset[str] | None] = {}
        for node in self.nodes:
            index = tensor_of(node).index if is_leaf(node) else None
            below = [names[a] for a in ((index,) if index is not None else () if is_leaf(node) else node.args)]
            late = any(x is None for x in below) or (is_reduction(node) and not self._in_row(node))
            names[node] = None if late else node.type.names.union(*(x for x in below if x is not None))
            if not late and self.groups.of(names[node]) is None:  # type: ignore[arg-type]
                names[node] = None
        return {n: None if x is None else self.groups.of(x) for n, x in names.items()}

    def _reductions(self, value: Node) -> list[Node]:
        """The reductions that a late value is made of: over rows, or left by a row."""
        stop = lambda n: is_reduction(n) or is_leaf(n)  # noqa: E731
        return [n for n in walk([value], stop) if is_reduction(n)]

    def _columns(self, reduction: Node) -> frozenset[str]:
        """The columns that a reduction over rows keeps: they are last in its partials."""
        home = self._homes[reduction.args[0]] if self._homes[reduction] is None else None
        return home.columns if home is not None else frozenset()

    def _late(self, reduction: Node, order: tuple[Axis, ...]) -> Late:
        """A reduction as partials; ``order`` is that of the rows in what is made of it."""
        if self._homes[reduction] is not None:
            kept = tuple(a for a in order if a in reduction.type.axes)
            return Late(reduction, reduction, (), kept)
        (value,) = reduction.args
        if self._homes[value] is None:
            raise fail("what no row reduces by itself is used in every row again; that is a second kernel", reduction)
        columns = self._homes[value].columns  # type: ignore[union-attr]
        over = tuple(a for a in value.type.axes if a.name in reduction.attr("axes"))
        kept = tuple(a for a in order if a in reduction.type.axes and a.name not in columns)
        return Late(reduction, value, over, kept)

    # ---- the plan ----

    def plan(self) -> RowPlan:
        contents = {group: _Contents() for group in self.groups.all}
        finishes: dict[frozenset[str], _Finish] = {}
        for output, value, tensor in self.outputs:
            home = self._homes[value]
            if home is not None:
                contents[home].stored.append((value, tensor))
            else:
                self._add_result(finishes, output, value, tensor)
        slots = self._fill(contents, finishes)
        parts: list[RowPart] = []
        partials: list[Partials] = []
        for group, part in contents.items():
            if part.stored or part.late:
                axes = group.family, group.columns
                lowering = PartLowering(len(parts), part.stored, part.late, *axes, len(partials))
                parts.append(lowering.part())
                partials += lowering.partials()
        if len(parts) > MAX_PARTS:
            raise fail(f"the program has values over {len(parts)} sets of axes; one kernel takes {MAX_PARTS}")
        finishings = [self._finishing(f, slots, partials) for f in finishes.values()]
        late = [x for part in contents.values() for x in part.late]
        stores = [Store(_kind(x.reduction.type.names, self._homes[x.value]), (x.value,), F32, finished=True,
                        reduction=_reduction(x.reduction)) for x in late]  # fmt: skip
        return RowPlan(
            self.program.name, self.program, program_args(self.original), tuple(parts), tuple(partials), tuple(stores),
            tuple(_numbered(finishings)),
        )  # fmt: skip

    def _add_result(self, finishes: dict[frozenset[str], _Finish], output: Output, value: Node, tensor: Tensor) -> None:
        """A late value among the results of a finish kernel."""
        reductions = self._reductions(value)
        if any(r.type.names != value.type.names for r in reductions):
            raise fail("what no row reduces by itself is used in every row again; that is a second kernel", value)
        if output.type.dtype not in STORED:
            raise fail(f"output '{output.name}' is {output.type.dtype}; this release stores bf16, f16 and f32", value)
        stored = [a.name for dim in tensor.dims for a in dim]
        columns = frozenset[str]().union(*(self._columns(r) for r in reductions))
        of = {a: i for r in reductions for i, a in enumerate(r.args[0].type.axes)}
        order = sorted(value.type.axes, key=lambda a: (a.name in columns, of[a] if a.name in columns
                                                       else stored.index(tensor.stored(a.name))))  # fmt: skip
        finish = finishes.setdefault(value.type.names, _Finish(tuple(order), self.groups.of(value.type.names)))
        finish.results.append((output, value, tensor))
        finish.reductions |= dict.fromkeys(reductions)

    def _fill(self, contents: dict[_Group, _Contents], finishes: dict[frozenset[str], _Finish]) -> dict[Node, int]:
        """The reductions of finish kernels as partials of the parts that make them; the slot of each."""
        for finish in finishes.values():
            for reduction in finish.reductions:
                late = self._late(reduction, finish.axes)
                home = self._homes[late.value]
                assert home is not None
                contents[home].late.append(late)
        order = [x.reduction for part in contents.values() for x in part.late]
        return {reduction: slot for slot, reduction in enumerate(order)}

    # ---- finish kernels ----

    def _finishing(self, finish: _Finish, slots: dict[Node, int], partials: Sequence[Partials]) -> RowFinishing:
        reductions = tuple(finish.reductions)
        kind = _kind(frozenset(a.name for a in finish.axes), finish.group)
        values = [v for _, v, _ in finish.results]
        above = walk(values, lambda n: n in reductions or is_leaf(n))
        leaves = tuple(n for n in above if is_leaf(n) and n not in reductions)
        for leaf in leaves:
            if index := tensor_of(leaf).index:
                raise fail("a table is read where reductions are finished", index)
        tensors = [tensor_of(leaf) for leaf in leaves]
        stored = [t for _, _, t in finish.results]
        loops = joined(finish.axes, [*tensors, *stored])
        if len(loops) > 2:
            raise fail(f"a result over {len(loops)} loops in memory; a finish kernel counts two", values[0])
        outer, inner = ([()] * 2 + [*loops])[-2:]
        missing = (None,) * (2 - len(loops))
        accesses = [t.access(loops, None) for t in [*tensors, *stored]]
        accesses = [replace(a, levels=(*missing, *a.levels)) for a in accesses]
        operands = tuple(self._operand(t, leaf, finish) for leaf, t in zip(leaves, tensors, strict=True))
        sizes = size_operands(above, sympy.Integer(0), groups=(finish.axes,))
        accesses[len(leaves) : len(leaves)] = [Access(None, I64, size=o.size) for o in sizes]
        results = tuple((v, o.into or o.name, o.type.dtype) for o, v, _ in finish.results)
        return RowFinishing(
            kind, tuple(slots[r] for r in reductions), reductions, operands + sizes, results, leaves=leaves,
            loops=(outer, inner), accesses=tuple(accesses),
            plain=tuple(not partials[slots[r]].blocks for r in reductions),
        )  # fmt: skip

    def _operand(self, tensor: Tensor, leaf: Node, finish: _Finish) -> Operand:
        if tensor.partial:
            raise fail("partial results are read where other reductions are finished", leaf, "return them apart")
        if not leaf.type.names <= {a.name for a in finish.axes}:
            raise fail("what no row reduces by itself is used in every row again; that is a second kernel", leaf)
        space = Space.COLUMN if leaf.type.names else Space.UNIFORM
        return Operand(tensor.arg, space, tensor.dtype, identity=tensor.identity)


def _numbered(finishings: list[RowFinishing]) -> list[RowFinishing]:
    """Told apart by number where several are of one kind."""
    kinds = [f.kind for f in finishings]
    return [replace(f, number=1 + kinds[:i].count(f.kind)) for i, f in enumerate(finishings)]


def _kind(names: frozenset[str], group: _Group | None) -> str:
    """What a finished value is for: a "row", a "column", or all of them."""
    if not names:
        return "total"
    return "column" if group is not None and names & group.family else "row"


def _reduction(node: Node) -> str:
    return node.op.removeprefix("reduce_")


assert set(REDUCTIONS) == {"sum", "mean", "max", "min", "logsumexp"}  # what templates/row.h accumulates
