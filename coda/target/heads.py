"""Lowering of head-wise epilogues: QK-norm, RoPE, split q, k and v, scales of quantised blocks.

The columns of the product group heads and the columns within a head, ``(G d)``. ``split`` over G makes segments,
each with its own outputs; ``split`` over d makes blocks, whose lanes are computed together; a reduction over d gives a
value for each row and head. After ``push_parts`` all of this can be read off the leaves of each output.

In ``(G f p=2)`` neighbouring columns are a pair, whose lanes ``z.p[0]`` and ``z.p[1]`` the program sees apart, as
interleaved RoPE does. A thread holds both, so a block has both lanes of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from coda.errors import CodaError, Diagnostic
from coda.ir import Axis, Dim, Node, Output, Program, Size, replaced, topological
from coda.ops import build
from coda.target.plan import (
    FLOATS,
    STORED,
    Block,
    Heads,
    Operand,
    Piece,
    Segment,
    Space,
    Store,
    Strip,
    Walk,
    dtype_list,
)

RUNS = (32, 16)  # columns that a strip may have of each part of a head: a box of TMA, and a step of the epilogue


def fail(message: str, node: Node | None = None, hint: str | None = None) -> CodaError:
    return CodaError([Diagnostic(message, node.span if node else None, hint)])


def is_head_wise(program: Program, columns: Dim) -> bool:
    """Whether the program looks inside the columns of its product: cuts, gathers, or parts of the column group."""
    names = {a.name for a in columns}
    for node in program.nodes():
        if node.op in ("part", "concat", "gather"):
            return True
        if node.op.startswith("reduce_") and set(node.attr("axes")) < names:
            return True
    if len(columns) == 1:
        return False
    tensors = [p.type for p in program.params] + [o.type for o in program.outputs]
    return any(0 < len(names & {a.name for a in dim}) < len(columns) for t in tensors for dim in t.dims)


def pair_axis(program: Program, lanes: Sequence[Axis]) -> Axis | None:
    """The axis of neighbouring columns in heads that the program sees apart and stores together; None without one."""
    for columns in (n.type.dims[-1] for n in program.nodes() if n.op == "dot"):
        pair = columns[-1]
        if len(columns) == 3 and pair in lanes and pair.static == 2:
            outputs = [o for o in program.outputs if columns[1].name in o.type.names or pair.name in o.type.names]
            if outputs and all(pair in o.type.axes for o in outputs):
                return pair
    return None


@dataclass(frozen=True)
class Cut:
    """Where a leaf lies in the columns: first head, first column within the head, lane of a pair. Columns of pairs are
    counted by pairs."""

    head: int
    column: int
    lane: int | None = None


def rows_as_tables(program: Program, rows: Dim, columns: Dim) -> Program:
    """The program with operands over rows and the columns of a head, as cosines that are given for each token, read
    like tables: ``cos: f32[M, f]`` at ``index(M)``, and ``cos: f32[T, f]`` at ``index(T)`` where rows are ``(B T)``."""
    nodes = program.nodes()
    below = set(topological(a for n in nodes if n.op == "dot" for a in n.args))
    inner = columns[:2][-1].name  # of a single axis HeadLowering says what is wrong
    wide = {inner, *(n.attr("into").name for n in nodes if n.op == "part" and n.attr("axis") == inner)}
    tables = {}
    for node in nodes:
        axes = node.type.axes
        alone = node.op == "input" and len(node.type.dims) == len(axes) == 2 and node not in below
        if alone and axes[0] in rows and axes[1].name in wide and not program.param(node.attr("name")).optional:
            position = build("index", axis=axes[0], span=node.span)
            tables[node] = build("gather", node, position, axis=axes[0].name, span=node.span)
    return replaced(program, tables)


class HeadLowering:
    """Segments, blocks, operands and stores of one program. ``rows`` and ``columns`` are those of its product."""

    def __init__(self, program: Program, dot: Node, rows: Dim, columns: Dim):
        if len(columns) != 2 and pair_axis(program, columns[-1:]) is None:
            raise fail(f"columns ({' '.join(a.name for a in columns)}) are neither heads nor one axis", dot,
                       "group them as (heads columns), as in w: bf16[(G d=128), D]")  # fmt: skip
        self.program, self.dot, self.rows = program, dot, rows
        self.head_axis, self.column_axis, *pair = columns
        self.pair = pair[0] if pair else None
        self.step = 2 if pair else 1  # columns that one position of `column_axis` stands for
        self.dim = self.step * self._static(self.column_axis.size, self.column_axis.name, dot)
        if self.dim % 16 or self.dim > 256:
            raise fail(f"heads have {self.dim} columns; a head-wise epilogue takes multiples of 16 up to 256", dot)
        self.stores: list[Store] = []

    @staticmethod
    def _static(size: Size, name: str, node: Node) -> int:
        if not size.is_Integer:
            given = [f"{s.name}=64" for s in sorted(size.free_symbols, key=str)]
            raise fail(f"the size of '{name}' is {size}, but a head-wise epilogue needs a number", node,
                       f"declare it, as in {given[0]}, or give --dims {','.join(given)}")  # fmt: skip
        return int(size)

    # ---- outputs to segments ----

    def heads(self) -> Heads:
        grouped: dict[tuple[int, str], list[Output]] = {}
        for output in self.program.outputs:
            if output.is_partial or output.into:
                raise fail(f"output '{output.name}' of a head-wise epilogue is neither partial nor inout", output.value)
            grouped.setdefault(self._segment_of(output), []).append(output)
        segments = [self._segment(f"Segment{i}", *key, grouped[key]) for i, key in enumerate(sorted(grouped))]
        for before, after in pairwise(segments):
            if before.count is None or before.start + before.count > after.start:
                raise fail(f"segments '{before.name}' and '{after.name}' of the heads overlap", self.dot)
        return Heads(self.dim, self.head_axis, self.column_axis, tuple(segments))

    def _segment_of(self, output: Output) -> tuple[int, str]:
        """(first head, head axis) of an output, from the products it reads."""
        found = {(self.cut(n).head, n.type.dims[1][0].name) for n in self._products(output.value)}
        if len(found) != 1:
            raise fail(
                f"output '{output.name}' combines {len(found) or 'no'} runs of heads; it takes one", output.value
            )
        return found.pop()

    def _products(self, value: Node) -> list[Node]:
        return [n for n in self.walk([value]) if self.is_product(n)]

    def is_product(self, node: Node) -> bool:
        while node.op in ("part", "slice"):
            node = node.args[0]
        return node is self.dot

    def is_leaf(self, node: Node) -> bool:
        """A parameter, a gather from one, a cut of either, or partial results finished."""
        while node.op in ("part", "slice", "default", "finish"):
            node = node.args[0]
        return node.op in ("input", "gather")

    def walk(self, roots: list[Node]) -> list[Node]:
        """Nodes of the epilogue's math, operands first, not looking below leaves and products."""
        seen: dict[Node, None] = {}

        def visit(node: Node) -> None:
            if node not in seen:
                if not (self.is_leaf(node) or self.is_product(node)):
                    for arg in node.args:
                        visit(arg)
                seen[node] = None

        for root in roots:
            visit(root)
        return list(seen)

    def cut(self, leaf: Node) -> Cut:
        """The offsets of a leaf's parts, heads and columns apart."""
        head, column, lane = 0, 0, None
        while leaf.op in ("part", "slice", "default"):
            if leaf.op == "slice":
                lane = leaf.attr("index")
            elif leaf.op == "part":
                start = self._static(leaf.attr("start"), leaf.attr("axis"), leaf)
                if leaf.attr("axis") == self.head_axis.name:
                    head += start
                else:
                    column += start
            leaf = leaf.args[0]
        return Cut(head, column, lane)

    # ---- one segment ----

    def _segment(self, name: str, start: int, head_axis: str, outputs: list[Output]) -> Segment:
        values = [o.value for o in outputs]
        reductions = tuple(n for n in self.walk(values) if n.op.startswith("reduce_"))
        for node in reductions:
            if set(node.attr("axes")) != {self.column_axis.name}:
                raise fail(f"a reduction over ({' '.join(node.attr('axes'))}) in a head-wise epilogue", node,
                           f"reduce over the columns of a head, {self.column_axis}")  # fmt: skip
            if any(n.op.startswith("reduce_") for n in topological(node.args)):
                raise fail("one reduction over a head feeds another; a kernel reduces once", node)
        axis = next(n.type.dims[1][0] for n in self._products(values[0]))
        count = None if axis == self.head_axis else self._static(axis.size, axis.name, values[0])
        whole = next((n for n in self.walk(values) if self.is_product(n) and self.column_axis in n.type.axes), None)
        head_values, pieces = [], []
        for output in outputs:
            if self._varies_in_head(output.value):
                pieces += self._pieces(output)
            else:
                head_values.append((output.value, self._store(output, "head")))
        return Segment(name, start, count, whole or self._products(values[0])[0], reductions, tuple(head_values),
                       self._blocks(pieces))  # fmt: skip

    def _varies_in_head(self, value: Node) -> bool:
        columns = {n.type.dims[1][1] for n in self._products(value)} | {self.column_axis}
        return bool(columns & set(value.type.axes))

    def _pieces(self, output: Output) -> list[tuple[Axis, Piece]]:
        """What an output is stored from: the operands of a concat at its root, or the value itself; of pairs, a stack
        of both lanes."""
        store, value = self._store(output, "tile"), output.value
        if self.pair is None:
            parts = self._joined(value)
        elif value.op == "stack" and value.attr("axis") == self.pair:
            lanes = [self._joined(lane) for lane in value.args]
            parts = [build("stack", *both, axis=self.pair) for both in zip(*lanes, strict=True)]
        else:
            raise fail(f"output '{output.name}' has one lane of '{self.pair}' alone", value)
        pieces, offset = [], 0
        for part in parts:
            axis = self._block_axis(part)
            width = self.step * self._static(axis.size, axis.name, part)
            if width:
                pieces.append((axis, Piece(part, store, offset)))
            offset += width
        return pieces

    @staticmethod
    def _joined(value: Node) -> list[Node]:
        """The operands of a concat at the root of a value, with the casts above it."""
        casts = []
        below = value
        while below.op in ("cast", "layout"):
            casts.append(below)
            below = below.args[0]
        if below.op != "concat":
            return [value]
        parts = []
        for part in below.args:
            for node in reversed(casts):
                if node.op == "cast":
                    part = build("cast", part, span=node.span, **dict(node.attrs))
            parts.append(part)
        return parts

    def _block_axis(self, value: Node) -> Axis:
        axes = {n.type.dims[1][1] for n in self._products(value)} & set(value.type.axes)
        if len(axes) != 1:
            raise fail("a value within a head mixes columns of several widths", value)
        return axes.pop()

    def _blocks(self, pieces: list[tuple[Axis, Piece]]) -> tuple[Block, ...]:
        by_axis: dict[Axis, list[Piece]] = {}
        for axis, piece in pieces:
            by_axis.setdefault(axis, []).append(piece)
        blocks = []
        for axis, members in by_axis.items():
            width = self.step * self._static(axis.size, axis.name, members[0].value)
            if width % 16:
                raise fail(
                    f"'{axis}' cuts heads into {width} columns; a head-wise epilogue takes multiples of 16",
                    members[0].value,
                )
            products = sorted({n for p in members for n in self._products(p.value) if n.type.dims[1][1] == axis},
                              key=lambda n: (self.cut(n).column, self.cut(n).lane or 0))  # fmt: skip
            offsets = tuple(dict.fromkeys(self.step * self.cut(n).column for n in products))
            blocks.append(Block(width, offsets, tuple(products), tuple(members)))
        return tuple(blocks)

    def strip(self, heads: Heads, joined: bool) -> Strip | None:
        """The strips that heads may be cut into, so that tiles of more widths take them, and tiles that lie across
        weights (``joined``): where nothing needs a whole head, neither a reduction nor values of its columns, and each
        segment works on whole heads or on their halves together."""
        blocks = [block for segment in heads.segments for block in segment.blocks]
        inner = {self.column_axis.name, *(b.products[0].type.dims[1][1].name for b in blocks)}
        rows = {a.name for a in self.rows}
        values = self.walk([o.value for o in self.program.outputs])
        whole = any(s.reductions or s.head_values for s in heads.segments)
        if whole or any(v.type.names & inner and not v.type.names & rows for v in values):
            return None
        parts = max(len(b.offsets) for b in blocks)
        width = heads.dim // parts
        ways = [(heads.dim, (0,)), (width, tuple(part * width for part in range(parts)))]
        run = next((r for r in RUNS if width % r == 0), heads.dim)
        fits = parts <= 2 and all((b.width, b.offsets) in ways for b in blocks)
        return Strip(run, parts) if fits and (joined or run * parts < heads.dim) else None

    # ---- tensors ----

    def _store(self, output: Output, kind: str) -> int:
        stored = STORED if kind == "tile" else FLOATS
        if output.type.dtype not in stored:
            what = "elements" if kind == "tile" else "values of a head"
            raise fail(
                f"output '{output.name}' is {output.type.dtype}; {what} are stored in {dtype_list(stored)}",
                output.value,
            )
        self.stores.append(
            Store(
                kind,
                (output.value,),
                output.type.dtype,
                output.name,
                walk=self.tensor_walk(output.type.dims, output.name),
            )
        )
        return len(self.stores) - 1

    def tensor_walk(self, dims: tuple[Dim, ...], name: str) -> Walk:
        """How rows, heads and columns step through a tensor of these dims."""
        walk = Walk()
        rows = [a.name for a in self.rows]
        for i, dim in enumerate(dims):
            paired = self.pair in dim
            if paired and (dim[-1] != self.pair or len(dim) == 1):
                raise fail(f"'{name}' does not have '{self.pair}' last in its group: pairs are neighbours", self.dot)
            dim = tuple(a for a in dim if a != self.pair)
            names = [a.name for a in dim]
            if names == rows:
                walk = replace(walk, row=i)
            elif len(rows) == 2 and names == rows[:1]:
                walk = replace(walk, batch=i)
            elif len(rows) == 2 and names == rows[1:]:
                walk = replace(walk, row=i)
            elif len(dim) == 2:
                scale = self._static(dim[1].size, names[1], self.dot) * (2 if paired else 1)
                walk = replace(walk, head=i, column=i, head_scale=scale)
            elif len(dim) == 1 and self._is_head_axis(dim[0]):
                walk = replace(walk, head=i)
            elif len(dim) == 1:
                walk = replace(walk, column=i)
            else:
                raise fail(
                    f"'{name}' has dim ({' '.join(names)}), which is not rows, heads or columns of a head", self.dot
                )
        if walk.batch is not None and walk.row is None:
            raise fail(
                f"'{name}' varies over '{rows[0]}' but not over '{rows[1]}'; a kernel reads whole rows", self.dot
            )
        return walk

    def _is_head_axis(self, axis: Axis) -> bool:
        if axis == self.head_axis:
            return True
        cut_heads = {
            n.attr("into") for n in self.program.nodes() if n.op == "part" and n.attr("axis") == self.head_axis.name
        }
        return axis in cut_heads

    def operand(self, leaf: Node) -> Operand:
        """The operand that a leaf reads."""
        identity, node = 0.0, leaf
        while node.op in ("part", "slice", "default", "finish"):
            if node.op == "default":
                identity = node.attr("identity")
            node = node.args[0]
        if node.op == "gather":
            table = node.args[0]
            if table.op != "input" or table.type.axes[0].name != node.attr("axis"):
                raise fail("a gather reads rows of a parameter [P, columns]", node)
            param = self.program.param(table.attr("name"))
            walk = Walk(row=0, column=1 if len(param.type.dims) > 1 else None)
            return Operand(param.name, Space.TILE, param.type.dtype, identity=identity, walk=walk, gathered=True)
        param = self.program.param(node.attr("name"))
        walk = self.tensor_walk(param.type.dims, param.name) if param.type.dims else Walk()
        space = self.space(leaf)
        if space is Space.TILE:
            raise fail(f"operand '{param.name}' varies over rows and columns; a head-wise epilogue reads rows, heads, "
                       "columns, and tables [rows, columns]", leaf)  # fmt: skip
        return Operand(param.name, space, param.type.dtype, identity=identity, walk=walk)

    def space(self, node: Node) -> Space:
        """Where a value varies; heads count as columns."""
        rows = {a.name for a in self.rows}
        if not node.type.names:
            return Space.UNIFORM
        if node.type.names <= rows:
            return Space.ROW
        return Space.TILE if node.type.names & rows else Space.COLUMN
