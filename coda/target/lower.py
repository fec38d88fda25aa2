"""Lower: an epilogue program to a visitor plan.

What the accumulators hold is found in product.py. Each value is placed by the axes it varies over (``Space``); each
output becomes a store, each reduction over rows or columns a partial store with a finish kernel behind it. What
cannot be lowered raises a CodaError that says why, at the place in the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sympy

from coda.dtypes import BOOL, F32, I32, I64, S8
from coda.errors import CodaError
from coda.ir import Axis, Dim, Node, Output, Param, Program, Size, dim_size, rewrite, topological
from coda.ops import OPS, build
from coda.ops.reduce import REDUCTIONS
from coda.passes.join import join_products
from coda.passes.lane_heads import lanes_as_heads
from coda.passes.lanes import lane_axes, unroll_lanes
from coda.passes.parts import push_parts
from coda.passes.placed_random import placed_random
from coda.target.heads import HeadLowering, is_head_wise, pair_axis, rows_as_tables
from coda.target.plan import (
    FLOATS,
    STORED,
    Arg,
    Finishing,
    Lanes,
    Major,
    Operand,
    Plan,
    Space,
    Store,
    Walk,
    counted_axes,
    dtype_list,
    is_run,
    place_in,
)
from coda.target.product import fail as _fail
from coda.target.product import find_product, lane_order


def lower(program: Program) -> Plan:
    """The visitor plan of an epilogue program. Raises CodaError where the program needs more than one kernel."""
    return _Lowering(program).plan()


class _Lowering:
    def __init__(self, program: Program):
        self.source = program.source
        self.original = program
        try:
            program = lanes_as_heads(placed_random(program))
            self.program = join_products(unroll_lanes(program))
            lanes = lane_axes(program)
            pair = pair_axis(self.program, lanes)  # columns of heads, not lanes of the product
            self.product = find_product(self.program, [a for a in lanes if a != pair])
            self.rows, self.columns, self.batch = self.product.rows, self.product.columns, self.product.batch
            self.lane_axis, self.products = self.product.lane_axis, self.product.accumulators
            self.head_lowering = self._head_wise()
            self.program = self._nested_totals(self.program)
        except CodaError as error:
            error.source = error.source or program.source
            raise

    def _head_wise(self) -> HeadLowering | None:
        """The lowering by heads, where the program looks inside the columns of its product."""
        if not is_head_wise(self.program, self.columns):
            return None
        if self.batch or len(self.products) == 2 or (len(self.product.terms) > 1 and not self.product.joined):
            plain = "product with two lanes" if len(self.products) == 2 else "sum of products"
            what = "batched product" if self.batch else plain
            raise _fail(f"a head-wise epilogue of a {what} is lowered in a later release", self.products[0])
        self.program = rows_as_tables(push_parts(self.program), self.rows, self.columns)
        (dot,) = (n for n in self.program.nodes() if n.op == "dot")
        return HeadLowering(self.program, dot, self.rows, self.columns)

    # ---- where values vary ----

    def space(self, node: Node) -> Space:
        """Over which part of the tile a value varies."""
        rows, columns = names_of(self.rows), names_of(self.columns)
        names = node.type.names
        if strangers := names - rows - columns - names_of(self.batch):
            tile = ", ".join(" ".join(a.name for a in dim) for dim in (self.batch, self.rows, self.columns) if dim)
            raise _fail(
                f"a value over axes [{', '.join(a.name for a in node.type.axes)}] does not fit the output tile "
                f"[{tile}]: it has axis '{sorted(strangers)[0]}'",
                node, "every epilogue operand varies over the rows and columns of the product, or a part of them",
            )  # fmt: skip
        if names & rows and names & columns:
            return Space.TILE
        return Space.ROW if names & rows else Space.COLUMN if names & columns else Space.UNIFORM

    @property
    def _groups(self) -> tuple[Dim, ...]:
        return self.rows, self.columns, self.batch

    def _tensor_dims(self, dims: tuple[Dim, ...], node: Node | None, name: str) -> Places:
        """Which dims of a stored tensor carry the rows, the columns and the batch, which may be outside of either."""
        row_dim = column_dim = batch_dim = None
        lanes = Lanes.NONE
        for i, dim in enumerate(dims):
            if self.batch and dim[: len(self.batch)] == self.batch:
                batch_dim, dim = i, dim[len(self.batch) :]
            bare = tuple(a for a in dim if a != self.lane_axis)
            if dim == self.rows:
                row_dim = i
            elif dim == self.columns or (bare == self.columns and batch_dim != i):
                column_dim = i
                if bare != dim:
                    lanes = lane_order(dim, self.lane_axis, node)  # type: ignore[arg-type]
            elif dim:
                named = (dims[i], self.rows, self.columns, self.batch)
                own, rows, columns, batch = (" ".join(a.name for a in d) for d in named)
                which = f"neither the rows ({rows}) nor the columns ({columns})"
                which = f"not the batch ({batch}), the rows ({rows}) or the columns ({columns})" if batch else which
                raise _fail(
                    f"'{name}' has dim ({own}), which is {which} of the product", node,
                    "this release reads whole rows and columns; parts of a group come later",
                )  # fmt: skip
        return Places(row_dim, column_dim, lanes, batch_dim)

    # ---- operands ----

    def _operand_of(self, leaf: Node) -> tuple[str, float]:
        """(parameter, identity) of an epilogue leaf: input, default(input) or a slice of one."""
        identity = 0.0
        while leaf.op in ("slice", "default", "finish"):
            if leaf.op == "default":
                identity = leaf.attr("identity")
            leaf = leaf.args[0]
        return leaf.attr("name"), identity

    def _operands(self, roots: list[Node]) -> tuple[Operand, ...]:
        """The operands that the given values read, in the order of the parameters."""
        found: dict[tuple[str, float], Operand] = {}
        for leaf in leaves(roots):
            name, identity = self._operand_of(leaf)
            param = self.program.param(name)
            self._check_readable(param)
            at, space = self._tensor_dims(param.type.dims, leaf, name), self.space(leaf)
            dims = (at.row, at.column, at.lanes, identity)
            operand = Operand(name, space, param.type.dtype, *dims, batch_dim=at.batch)
            if param.type.partial:
                operand = replace(operand, row_dim=1, column_dim=0, partial=self._finished_kind(param))
            found[name, identity] = operand
        order = [p.name for p in self.program.params]
        operands = sorted(found.values(), key=lambda o: (order.index(o.arg), o.identity))
        return tuple(self._with_maps(operands))

    def _finished_kind(self, param: Param) -> str:
        """How an epilogue reduces the partial results of a parameter, each row once a tile."""
        assert param.type.partial is not None
        kind = param.type.partial.kind
        if param.type.dims != (self.rows,):
            rows = _dim_names((self.rows,))[0]
            raise _fail(
                f"operand '{param.name}' is {param.type}; an epilogue finishes partial results of its rows, [{rows}]",
                param, "pass the finished values",
            )  # fmt: skip
        if REDUCTIONS[kind].floats > 1:
            raise _fail(
                f"operand '{param.name}': a partial of '{kind}' is {REDUCTIONS[kind].floats} values, and a parameter "
                "holds one", param, "pass the finished values",
            )  # fmt: skip
        return kind

    def _with_maps(self, operands: list[Operand]) -> list[Operand]:
        maps, result = 0, []
        for operand in operands:
            if operand.space is Space.TILE:
                self._check_tile_operand(operand)
                operand = replace(operand, map=maps)
                maps += 1
            result.append(operand)
        return result

    def _check_tile_operand(self, operand: Operand) -> None:
        """TMA fetches rows of 16- and 32-bit floats, of one lane at a time."""
        param = self.program.param(operand.arg)
        if operand.dtype not in FLOATS:
            raise _fail(
                f"operand '{param.name}' is {operand.dtype} over the whole tile; "
                "this release prefetches bf16, f16 and f32", param,
            )  # fmt: skip
        if operand.column_dim != len(param.type.dims) - 1:
            dims = (self.rows, self.columns) if operand.batch_dim is None else (self.batch, self.rows, self.columns)
            raise _fail(
                f"operand '{param.name}' is stored by columns; this release prefetches rows", param,
                f"store it as [{', '.join(_dim_names(dims))}]",
            )  # fmt: skip
        if operand.lanes is Lanes.INNER:
            raise _fail(
                f"operand '{param.name}' interleaves its lanes; this release prefetches each lane by itself", param,
                f"store it with '{self.lane_axis}' first in its group",
            )  # fmt: skip

    # ---- stores and finish kernels ----

    def plan(self) -> Plan:
        try:
            return self._plan()
        except CodaError as error:
            error.source = error.source or self.source
            raise

    def _head_plan(self, lowering: HeadLowering) -> Plan:
        self._check_heads(lowering)
        heads = lowering.heads()
        results = [o.value for o in self.program.outputs]
        positions = [n.args[1] for n in topological(results) if n.op == "gather"]  # which a walk does not look into
        nodes = lowering.walk([*results, *positions])
        found = {}
        for leaf in filter(lowering.is_leaf, nodes):
            operand = lowering.operand(leaf)
            if (param := self.program.param(operand.arg)).type.partial:
                operand = replace(operand, walk=Walk(row=1, column=0), partial=self._finished_kind(param))
            found[operand.arg, operand.identity] = operand
        sizes = size_operands(nodes, groups=(self.rows,))
        operands = (*found.values(), *sizes)
        if self.product.b_major is Major.K:  # a box of TMA is any number of rows of B, if its columns are K
            heads = replace(heads, strip=lowering.strip(heads, bool(self.product.joined)))
        return self._plan_of(operands=operands, stores=tuple(lowering.stores), finishings=(), heads=heads)

    def _plan(self) -> Plan:
        if self.head_lowering is not None:
            return self._head_plan(self.head_lowering)
        stores: list[Store] = []
        finished: dict[str, list[tuple[Output, Node]]] = {"row": [], "column": [], "total": []}
        outputs = [o if o.into is None else self._accumulated(o) for o in self.program.outputs]
        for node in walk([o.value for o in outputs], lambda n: is_leaf(n) or n in self.products):
            self._check_expressible(node)
        rows = names_of((*self.batch, *self.rows))
        by_row = any(not o.is_partial and "row" in self._kinds(o.value) for o in outputs)
        for output in outputs:
            if output.is_partial:
                stores.append(self._partial_store(output.value.args[0], output))
            elif reductions := self._reductions(output.value):
                kind = self._finish_kind(output, reductions)
                finished[kind].append((output, output.value))
            elif by_row and output.value.type.names == rows:  # there is a kernel over the rows anyway
                finished["row"].append((output, output.value))
            elif self._reads_partials() and output.value.type.names == rows and output.type.dims == (self.rows,):
                stores.append(self._row_store(output))
            else:
                stores.append(self._tile_store(output))
        finishings = self._finishings(finished, stores)
        in_tile = walk([v for s in stores for v in s.values], lambda n: is_leaf(n) or n in self.products)
        for node in in_tile:
            if node.op == "pick":
                raise _fail(
                    "'pick' gives one value for each row, known when the row is finished; it is used in every element",
                    node, "return it, or what follows from it, as a value for each row",
                )  # fmt: skip
        operands = self._operands([v for s in stores for v in s.values])
        operands += size_operands(in_tile, dim_size(self.rows), dim_size(self.columns), groups=self._groups)
        return self._plan_of(operands=operands, stores=tuple(stores), finishings=finishings)

    def _accumulated(self, output: Output) -> Output:
        """What an inout parameter holds afterwards: an output that reads the memory it is stored to."""
        held = build("input", name=output.into, type=output.type)

        def total(held: Node, value: Node) -> Node:
            result = build("add", held, value, span=value.span)
            dtype = output.type.dtype
            return result if result.dtype == dtype else build("cast", result, dtype=dtype, saturate=False)

        if output.value.op != "stack":
            return replace(output, value=total(held, output.value))
        axis = output.value.attr("axis")
        lanes = [
            total(build("slice", held, axis=axis.name, index=i), value) for i, value in enumerate(output.value.args)
        ]
        return replace(output, value=build("stack", *lanes, axis=axis, span=output.value.span))

    def _plan_of(self, **parts: Any) -> Plan:
        """The plan with these operands, stores and so on around the product."""
        product = self.product
        return Plan(
            name=self.program.name, program=self.program, args=program_args(self.original), terms=product.terms,
            a_major=product.a_major, b_major=product.b_major, products=product.accumulators, b_lanes=product.b_lanes,
            joined=product.joined, batch=product.batch,
            rows=product.rows, columns=product.columns, lane_axis=product.lane_axis, **parts,
        )  # fmt: skip

    def _check_expressible(self, node: Node) -> None:
        """Whether generated math has words for a node."""
        if axes := counted_axes(node):
            self.space(node)  # axes of the rows or columns
            if len(axes) > 1 and not any(is_run(axes, group) for group in self._groups):
                raise _fail(f"the axes ({' '.join(map(str, axes))}) are counted together, but are no group", node)
        if node.op == "cast" and not _is_rounding(node):
            hint = "write cast(x, s8, saturate)" if node.dtype is S8 else None
            raise _fail(f"a cast from {node.args[0].dtype} to {node.dtype} is lowered in a later release", node, hint)
        if node.op == "pick" and self.space(node.args[0]) is not Space.TILE and not self._is_table(node.args[0]):
            raise _fail("'pick' selects from a value over the tile, or from a parameter over its columns", node)
        if OPS[node.op].cpp is None and not is_leaf(node) and node not in self.products and node.op not in _STRUCTURE:
            raise _fail(f"'{node.op}' in an epilogue is lowered in a later release", node)

    def _check_heads(self, lowering: HeadLowering) -> None:
        """The same of a head-wise epilogue, which has fewer words."""
        results = [o.value for o in self.program.outputs]
        lanes = [lane for value in results for lane in (value.args if value.op == "stack" else (value,))]
        joined = [_below_casts(lane) for lane in lanes]  # a concat there is stored part by part
        for node in lowering.walk(results):
            if lowering.is_leaf(node):
                for read in (n for n in topological([node]) if n.op == "input"):
                    self._check_readable(self.program.param(read.attr("name")))
            elif node.op == "pick":
                raise _fail("'pick' in a head-wise epilogue is lowered in a later release", node)
            elif (
                not counted_axes(node)
                and not lowering.is_product(node)
                and not (node.op == "concat" and node in joined)
            ):
                self._check_expressible(node)

    def _check_readable(self, param: Param) -> None:
        if param.type.dtype not in (*FLOATS, I64, I32, BOOL):
            raise _fail(
                f"operand '{param.name}' is {param.type.dtype}; an epilogue reads bf16, f16, f32, i64, i32 and bool",
                param,
            )

    def _reads_partials(self) -> bool:
        return any(p.type.partial for p in self.program.params)

    def _row_store(self, output: Output) -> Store:
        """A value of each row, which is made of partials and wanted elsewhere, too."""
        if output.type.dtype not in FLOATS:
            raise _fail(f"output '{output.name}' is {output.type.dtype}; values of rows are floats", output.value)
        return Store("each", (output.value,), output.type.dtype, output.name, row_dim=0)

    def _tile_store(self, output: Output) -> Store:
        value = output.value
        values = value.args if value.op == "stack" else (value,)
        at = self._tensor_dims(output.type.dims, value, output.name)
        if at.row is None or at.column is None or (self.batch and at.batch is None):
            space = self.space(values[0])
            each = "" if space is Space.UNIFORM else f" for each {space.value}"
            raise _fail(
                f"output '{output.name}' is one value{each}, not one for each element of the product", value,
                "return it over the whole tile, or reduce over the other axis",
            )  # fmt: skip
        if output.type.dtype not in STORED:
            raise _fail(
                f"output '{output.name}' is {output.type.dtype}; elements are stored in {dtype_list(STORED)}", value
            )
        dims = (at.lanes, at.row, at.column)
        return Store("tile", tuple(values), output.type.dtype, output.name, *dims, batch_dim=at.batch)

    def _nested_totals(self, program: Program) -> Program:
        """A reduction over all elements becomes one over the columns, then one over the rows. Label: algebraic (the
        order of additions, which is the kernel's in any case)."""
        everything = names_of((*self.batch, *self.rows, *self.columns))

        def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
            if node.op.removeprefix("reduce_") not in REDUCTIONS or set(node.attr("axes")) != everything:
                return None
            inner = build(node.op, *args, axes=tuple(a.name for a in self.columns), span=node.span)
            return build(node.op, inner, axes=tuple(a.name for a in (*self.batch, *self.rows)), span=node.span)

        return rewrite(program, visit)

    def _is_table(self, node: Node) -> bool:
        return is_leaf(node) and self.space(node) is Space.COLUMN

    def _is_reduction(self, node: Node) -> bool:
        """Whether a value is known only when all tiles are: a reduction, or an element picked from the tile."""
        return node.op.startswith("reduce_") or (node.op == "pick" and self.space(node.args[0]) is Space.TILE)

    def _reductions(self, *values: Node) -> list[Node]:
        """The outermost reductions that values depend on."""
        return [n for n in walk(list(values), self._is_reduction) if self._is_reduction(n)]

    def _direction(self, reduction: Node) -> str:
        """ "row" for a reduction of the tile over all columns, "column" for one over all rows, of each batch or of all,
        "total" for one over the rows, of all batches, of a value for each row."""
        axes = {reduction.attr("axis")} if reduction.op == "pick" else set(reduction.attr("axes"))
        kind, over = reduction.op.removeprefix("reduce_"), self.space(reduction.args[0])
        columns, all_rows = names_of(self.columns), names_of((*self.batch, *self.rows))
        of_each = over is Space.TILE and not self._is_over_batch(reduction)
        rows = names_of(self.rows) if of_each else all_rows
        reduced = {"row": (Space.TILE,), "column": (Space.TILE, Space.ROW)}
        direction = "row" if axes == columns else "column" if axes == rows else None
        if direction is not None and over not in reduced[direction]:
            raise _fail(
                f"this reduces one value for each {over.value}; a kernel reduces values of rows and columns", reduction,
                "reduce it before, and pass the result",
            )  # fmt: skip
        if direction == "row" and self.space(reduction) is Space.ROW:
            return "row"
        if direction == "column" and kind != "pick":
            return "column" if over is Space.TILE else "total"
        raise _fail(
            f"a reduction over ({' '.join(sorted(axes))}) is lowered in a later release", reduction,
            f"reduce over all columns ({' '.join(sorted(columns))}) or all rows ({' '.join(sorted(rows))})",
        )  # fmt: skip

    def _is_over_batch(self, reduction: Node) -> bool:
        """Whether a reduction over rows is one over those of all batches."""
        return bool(self.batch) and reduction.op != "pick" and names_of(self.batch) <= set(reduction.attr("axes"))

    def _partial_store(self, reduction: Node, output: Output | None = None) -> Store:
        if reduction.op == "pick":
            return Store("pick", reduction.args, F32, finished=True)
        direction = self._direction(reduction)
        kind = reduction.op.removeprefix("reduce_")
        if direction == "total":
            raise _fail(
                "this reduces values of whole rows, of which there are no partials", reduction,
                "return it without partial(...)",
            )  # fmt: skip
        if output is not None and self.batch:
            raise _fail(
                "unfinished reductions of a batched product are lowered in a later release", reduction,
                f"return {kind}(...), which is finished",
            )  # fmt: skip
        if output is not None and REDUCTIONS[kind].floats > 1:
            raise _fail(
                f"a partial of '{kind}' is {REDUCTIONS[kind].floats} values, and an output holds one", reduction,
                f"return {kind}(...), which is finished",
            )  # fmt: skip
        name = output.name if output else None
        apart = 0 if self.batch and not self._is_over_batch(reduction) else None
        finished = output is None
        return Store(direction, reduction.args, F32, name, reduction=kind, finished=finished, batch_dim=apart)

    def _kinds(self, value: Node) -> set[str]:
        """The finish kernels that a value needs."""
        reductions = self._reductions(value)
        inner = self._reductions(*(r.args[0] for r in reductions))
        return {self._direction(r) for r in (*reductions, *inner)}

    def _finish_kind(self, output: Output, reductions: list[Node]) -> str:
        directions = {self._direction(r) for r in reductions}
        inner = self._reductions(*(r.args[0] for r in reductions))
        nested = {self._direction(r) for r in inner}
        if len(directions) > 1 or (inner and (directions, nested) != ({"total"}, {"row"})):
            raise _fail(f"output '{output.name}' combines reductions that need several kernels", output.value)
        (direction,) = directions
        if self.space(output.value).value != {"total": "uniform"}.get(direction, direction):
            raise _fail(
                f"output '{output.name}' uses a finished reduction over whole rows in every element; that needs a "
                "second kernel over the rows, which comes in a later release", output.value,
                "return the reduction, and apply it in the epilogue of the next product",
            )  # fmt: skip
        return direction

    def _finishings(self, finished: dict[str, list[tuple[Output, Node]]], stores: list[Store]) -> tuple[Finishing, ...]:
        """The finish kernels in the order they run; what the total kernel reduces is computed by the row kernel."""
        totals = self._reductions(*(value for _, value in finished["total"]))
        kept = tuple(dict.fromkeys(total.args[0] for total in totals))
        finishings = []
        for kind in ("row", "column"):
            if finished[kind] or (kind == "row" and kept):
                finishings.append(self._finishing(kind, finished[kind], stores, kept if kind == "row" else ()))
        if totals:
            slots = tuple(len(stores) + kept.index(total.args[0]) for total in totals)
            finishings.append(self._finish("total", slots, totals, finished["total"]))
        return tuple(finishings)

    def _finishing(
        self, kind: str, results: list[tuple[Output, Node]], stores: list[Store], kept: tuple[Node, ...]
    ) -> Finishing:
        reductions = self._reductions(*(value for _, value in results), *kept)
        first = len(stores)
        stores += [self._partial_store(r) for r in reductions]
        return self._finish(kind, tuple(range(first, len(stores))), reductions, results, kept)

    def _finish(
        self, kind: str, slots: tuple[int, ...], reductions: list[Node], results: list[tuple[Output, Node]],
        kept: tuple[Node, ...] = (),
    ) -> Finishing:  # fmt: skip
        for output, _ in results:
            if output.type.dtype not in FLOATS:
                raise _fail(
                    f"output '{output.name}' is {output.type.dtype}; this release stores bf16, f16 and f32",
                    output.value,
                )
            if self.batch:
                self._check_of_batches(kind, output, reductions)
        values = [value for _, value in results] + list(kept)
        operands = self._operands([leaf for value in values for leaf in leaves_above(value, set(reductions))])
        above = walk(values, lambda n: n in reductions or is_leaf(n))
        batch = self.batch if any(map(self._is_over_batch, reductions)) else ()
        known = dim_size(self.columns if kind == "row" else (*batch, *self.rows))
        operands += size_operands(above, known, groups=self._groups)
        stored = tuple((value, output.name, output.type.dtype) for output, value in results)
        plain = (kind == "total",) * len(slots)
        return Finishing(kind, slots, tuple(reductions), operands, stored, kept, batch=batch, plain=plain)

    def _check_of_batches(self, kind: str, output: Output, reductions: list[Node]) -> None:
        """A finish kernel behind a batched product counts through the rows or columns of each batch, or through
        columns alone; it knows no positions."""
        over_batch = {self._is_over_batch(r) for r in reductions}
        if len(over_batch) > 1:
            raise _fail(
                "columns are added up over each batch and over all batches; one kernel does one", output.value,
                "return one of the two",
            )  # fmt: skip
        self._tensor_dims(output.type.dims, output.value, output.name)
        each = {"row": self.rows, "column": self.columns, "total": ()}[kind]
        counted = names_of(each if True in over_batch else (*self.batch, *each))
        inside = walk([output.value], lambda n: self._is_reduction(n) or is_leaf(n))
        positions = [n for n in inside if (counted_axes(n) or n.op == "pick") and n not in reductions]
        if output.value.type.names != counted or positions:
            message = f"output '{output.name}' is not made of reductions of a batched product alone"
            raise _fail(f"{message}; it is lowered in a later release", output.value)


def size_operands(nodes: Sequence[Node], *known: Size, groups: Sequence[Dim] = ()) -> tuple[Operand, ...]:
    """The sizes that a kernel is told, besides those that it knows: of the product, or what reductions run over. Of
    axes that are counted it is told what places them in their group."""
    sizes = dict.fromkeys(n.attr("expr") for n in nodes if n.op == "size")
    for axes in filter(None, map(counted_axes, nodes)):
        found = (s for group in groups if is_run(axes, group) for s in place_in(axes, group) if s is not None)
        sizes |= dict.fromkeys(map(sympy.sympify, found))
    return tuple(Operand("", Space.UNIFORM, I64, size=s) for s in sizes if not s.is_Integer and s not in known)


class Places(NamedTuple):
    """Which dims of a tensor carry rows, columns (and how their lanes) and the batch; None: it does not vary."""

    row: int | None
    column: int | None
    lanes: Lanes
    batch: int | None


def names_of(axes: Iterable[Axis]) -> frozenset[str]:
    return frozenset(axis.name for axis in axes)


# Operations without a C++ expression that are lowered by what they are; reductions are judged by their kind.
_STRUCTURE = {"const", "index", "position", "size", "pick", "cast", "layout", "stack"}
_STRUCTURE |= {name for name, op in OPS.items() if op.family == "reduce"}


def _below_casts(node: Node) -> Node:
    while node.op in ("cast", "layout"):
        node = node.args[0]
    return node


def _is_rounding(cast: Node) -> bool:
    """A cast that generated math rounds as torch does: to a float, to s8 within its range, or to a wider integer."""
    source, target = cast.args[0].dtype, cast.dtype
    if target is S8:
        return source.kind == "float" and cast.attr("saturate")
    return target.kind == "float" or (source.kind != "float" and target in (I32, I64) and source.bits <= target.bits)


def is_leaf(node: Node) -> bool:
    """An epilogue leaf that reads a parameter: input, default of one, a slice of either, or its partial results."""
    while node.op in ("slice", "default", "finish"):
        node = node.args[0]
    return node.op == "input"


def walk(roots: list[Node], stop: Callable[[Node], bool]) -> list[Node]:
    """Nodes reachable from the roots without looking below those where ``stop`` holds, operands first."""
    seen: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in seen:
            return
        if not stop(node):
            for arg in node.args:
                visit(arg)
        seen[node] = None

    for root in roots:
        visit(root)
    return list(seen)


def leaves(roots: list[Node]) -> list[Node]:
    """The parameter leaves that values read in the epilogue (not those of the product itself)."""
    stop = lambda n: is_leaf(n) or n.op == "dot"  # noqa: E731
    return [n for n in walk(roots, stop) if is_leaf(n)]


def leaves_above(value: Node, stop: set[Node]) -> list[Node]:
    """The parameter leaves that a finished value reads besides the reductions in ``stop``."""
    return [n for n in walk([value], lambda n: n in stop or is_leaf(n)) if is_leaf(n)]


def program_args(program: Program) -> tuple[Arg, ...]:
    """The positions of ``NAME_run``."""
    args = [
        Arg(
            p.name,
            p.type.dtype,
            tuple(map(dim_size, p.type.dims)),
            _dim_names(p.type.dims),
            False,
            p.optional,
            p.default,
            p.inout,
            p.type.partial,
        )
        for p in program.params
    ]
    args += [
        Arg(
            o.name,
            o.type.dtype,
            tuple(map(dim_size, o.type.dims)),
            _dim_names(o.type.dims),
            True,
            partial=o.type.partial,
        )
        for o in program.outputs
        if o.into is None
    ]
    return tuple(args)


def _dim_names(dims: tuple[Dim, ...]) -> tuple[str, ...]:
    return tuple(d[0].name if len(d) == 1 else "(" + " ".join(a.name for a in d) + ")" for d in dims)
