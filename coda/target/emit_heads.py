"""Emission of head-wise epilogues (templates/heads.h): a struct for each segment, one nested for each block.

Values are placed by what they vary over, as in emit.py, with one more place: HEAD, a value for each row and head,
computed once the head's reductions are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from coda.ir import Dim, Node
from coda.ops.reduce import REDUCTIONS
from coda.target import emit_strips
from coda.target.emit import load_row, operand_traits, place_of, told_size
from coda.target.emit_strips import Sink, Table
from coda.target.heads import HeadLowering, fail
from coda.target.plan import Block, Piece, Plan, Segment, counted_axes, is_run
from coda.target.scalars import Scope, cpp_type, is_packed, pack, unpack

WHERE = "// where"  # stands for the struct of a segment that says where it reads and stores


@dataclass
class Section:
    """Values of one place: struct members and the assignments that fill them."""

    members: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    def struct(self, name: str) -> str:
        return f"struct {name} {{ {' '.join(self.members)} }};" if self.members else f"struct {name} {{}};"


@dataclass
class Shared:
    """Segments with the same code, as q and k are rotated: ``lines`` is that of the first. Where they differ in which
    operands they read and where they store, ``lines`` says ``w.NAME``, and ``where`` has the numbers of each."""

    segments: list[Segment]
    lines: list[str]
    where: list[dict[str, int]]

    @property
    def name(self) -> str:
        return self.segments[0].name

    @property
    def members(self) -> list[str]:
        """The names that differ."""
        return [name for name in self.where[0] if len({w[name] for w in self.where}) > 1]

    def code(self) -> list[str]:
        """The struct, with numbers where all agree."""
        members = self.members
        text = "\n".join(self.lines)
        for name, number in self.where[0].items():
            text = text if name in members else re.sub(rf"\bw\.{name}\b", str(number), text)
        ints = " ".join(f"int {name};" for name in members)
        return text.replace(WHERE, f"struct Where {{ {ints} }};" if ints else "struct Where {};").split("\n")

    def chosen(self, values: Sequence[str], strips: int) -> str:
        """The value of the segment that ``head`` lies in, which is one of these. ``head`` counts strips of heads."""
        *rest, result = values
        for segment, value in reversed(list(zip(self.segments, rest, strict=False))):
            result = f"head < {strips * (segment.start + (segment.count or 0))} ? {value} : {result}"
        return result


class HeadEmitter:
    """Writes the Body and Visitor of a plan with heads."""

    def __init__(self, plan: Plan):
        assert plan.heads is not None
        self.plan, self.heads = plan, plan.heads
        dot = next(n for n in plan.program.nodes() if n.op == "dot")
        self.lowering = HeadLowering(plan.program, dot, plan.rows, plan.columns)
        self.scope = Scope()
        self.paired = self.lowering.pair is not None  # each of two neighbouring columns has math of its own
        self.gathered: dict[Node, str] = {}  # gather -> the Row member that says where its row begins
        self.row_names = {a.name for a in plan.rows}
        self.head_names = {s.product.type.dims[1][0].name for s in self.heads.segments}
        self.tables: dict[Block, list[Table]] = {}  # that elements of a strip take as parameters
        self.where: dict[str, int] = {}  # numbers of operands and outputs of the segment that is being written

    # ---- places ----

    def place(self, node: Node, column_axis: str) -> str:
        names = node.type.names
        if column_axis in names:
            return "tile" if names & self.row_names else "column"
        if names & self.head_names:
            return "head"
        return "row" if names & self.row_names else "uniform"

    def nodes(self, roots: Sequence[Node], stop: set[Node] = frozenset()) -> list[Node]:  # type: ignore[assignment]
        """Nodes of the roots' math, operands first; nodes in ``stop`` are included but not looked into."""
        seen: dict[Node, None] = {}

        def visit(node: Node) -> None:
            if node in seen:
                return
            if self.lowering.is_leaf(node):
                if self._gather(node) is not None:
                    visit(self._gather(node).args[1])  # type: ignore[union-attr]
            elif node not in stop and not self.lowering.is_product(node):
                for arg in node.args:
                    visit(arg)
            seen[node] = None

        for root in roots:
            visit(root)
        return [n for n in seen if n.op != "const"]

    @staticmethod
    def _gather(leaf: Node) -> Node | None:
        while leaf.op in ("part", "slice", "default"):
            leaf = leaf.args[0]
        return leaf if leaf.op == "gather" else None

    # ---- values ----

    def section(self, nodes: list[Node], variable: str, two: bool, load: Callable[[Node], str]) -> Section:
        """Assign each node to a member of ``variable``; deeper code then reads ``variable.member``."""
        section = Section()
        for node in nodes:
            if node in self.scope.names:
                continue
            type_ = f"coda::Two<{cpp_type(node.dtype)}>" if two else cpp_type(node.dtype)
            name = f"{variable}{len(section.members)}"
            value = load(node) if self.lowering.is_leaf(node) else self.expression(node)
            section.members.append(f"{type_} {name};")
            section.code.append(f"{variable}.{name} = {f'coda::spread({value})' if two else value};")
            self.scope.names[node] = f"{variable}.{name}"
        return section

    def expression(self, node: Node) -> str:
        if counted := counted_axes(node):
            return self.position(counted)
        told = node.op == "size" and not node.attr("expr").is_Integer
        return told_size(self.plan, node.attr("expr")) if told else self.scope.expression(node)

    def position(self, axes: Dim) -> str:
        """The position along rows, heads of a segment, or columns of a block."""
        if is_run(axes, self.plan.rows):
            return place_of(axes, self.plan.rows, "m", lambda size: told_size(self.plan, size))
        if len(axes) > 1:  # all columns: no part of them is cut
            column = f"int64_t(g) * {self.heads.dim} + i"
            return f"coda::Two<int64_t>{{{column}, {column} + 1}}"
        (axis,) = axes
        if axis.name in self.head_names:
            return "int64_t(g)"
        return "int64_t(i / 2)" if self.paired else "coda::Two<int64_t>{i, i + 1}"

    def index(self, leaf: Node) -> int:
        operand = self.lowering.operand(leaf)
        return next(
            i for i, o in enumerate(self.plan.operands) if (o.arg, o.identity) == (operand.arg, operand.identity)
        )

    def placed(self, kind: str, number: int) -> str:
        """The number of an operand or output in a segment, by a name."""
        names = {n: name for name, n in self.where.items() if name.startswith(kind)}
        name = names.get(number, f"{kind}{len(names)}")
        self.where[name] = number
        return f"w.{name}"

    def operand(self, leaf: Node) -> str:
        return f"in[{self.placed('operand', self.index(leaf))}]"

    def output(self, store: int) -> str:
        return f"p.outputs[{self.placed('output', store)}]"

    def load_uniform(self, leaf: Node) -> str:
        return f"coda::load_scalar<{self._dtype(leaf)}>(in[{self.index(leaf)}])"

    def load_row(self, leaf: Node) -> str:
        return load_row(self.plan.operands[self.index(leaf)], self.index(leaf))

    def load_head(self, segment: Segment) -> Callable[[Node], str]:
        return lambda leaf: (
            f"coda::load_head<{self._dtype(leaf)}>({self.operand(leaf)}, {self._head(leaf, segment)}, 0)"
        )

    def load_columns(self, segment: Segment) -> Callable[[Node], str]:
        def load(leaf: Node) -> str:
            function = "load_head" if self.paired else "load_head_columns"
            position = f"{self._head(leaf, segment)}, {self._column(leaf)}"
            return f"coda::{function}<{self._dtype(leaf)}>({self.operand(leaf)}, {position})"

        return load

    def _column(self, leaf: Node) -> str:
        """The column of a leaf's tensor at column ``i`` of the block."""
        cut = self.lowering.cut(leaf)
        if not self.paired:
            return f"i + {cut.column}"
        return f"i / 2 + {cut.column}" if cut.lane is None else f"i + {2 * cut.column + cut.lane}"

    def name_products(self, products: Sequence[Node], offsets: Sequence[int]) -> None:
        """The accumulators as parameters: two neighbouring columns for each offset."""
        for product in products:
            cut = self.lowering.cut(product)
            parameter = f"product{offsets.index(self.lowering.step * cut.column)}"
            self.scope.names[product] = parameter if cut.lane is None else f"{parameter}.{'xy'[cut.lane]}"

    def spread(self, value: str) -> str:
        """A value for both columns; of pairs, each is for its own."""
        return value if self.paired else f"coda::spread({value})"

    def declared(self, node: Node) -> str:
        type_ = cpp_type(node.dtype)
        return type_ if self.paired else f"coda::Two<{type_}>"

    def _head(self, leaf: Node, segment: Segment) -> str:
        """The head index into the leaf's tensor: counted over the whole product where the tensor is."""
        return f"g + {self.lowering.cut(leaf).head}"

    def _dtype(self, leaf: Node) -> str:
        return self.plan.operands[self.index(leaf)].dtype.cpp

    def tile_code(self, nodes: list[Node]) -> list[str]:
        """Constants of an element function: gathers, then math; 16-bit casts keep their packed word."""
        lines: list[str] = []
        for node in nodes:
            if node in self.scope.names:
                continue
            name = f"v{len(lines)}"
            if (gather := self._gather(node)) is not None and self.lowering.is_leaf(node):
                function = "load_gathered_element" if self.paired else "load_gathered"
                expression = f"coda::{function}({self.gathered[gather]}, {self._column(node)})"
            elif node.op == "cast" and is_packed(node.dtype) and not self.paired:
                source = f"coda::spread({self.scope.value(node.args[0], 'float')})"
                word = self.scope.words[node] = f"w{len(lines)}"
                lines.append(f"uint32_t const {word} = {pack(node.dtype, source, node.attr('saturate'))};")
                name, expression = f"v{len(lines)}", unpack(node.dtype, word)
            else:
                expression = self.spread(self.scope.expression(node))
            self.scope.names[node] = name
            lines.append(f"{self.declared(node)} const {name} = {expression};")
        return lines

    # ---- the whole ----

    @cached_property
    def _written(self) -> tuple[Section, Section, list[Shared]]:
        """The values of the tile and of rows, which segments share, and the code of these, each once."""
        roots = [v for s in self.heads.segments for v in _roots(s)]
        values = self.nodes(roots)
        inner = {n.type.dims[1][1].name for s in self.heads.segments for n in self._products(s)}
        place = lambda n: "tile" if n.type.names & inner else self.place(n, "")  # noqa: E731
        uniform = self.section([n for n in values if place(n) == "uniform"], "u", False, self.load_uniform)
        row = self.section([n for n in values if place(n) == "row"], "r", False, self.load_row)
        self._gather_rows([n for n in values if self.lowering.is_leaf(n) and self._gather(n) is not None], row)
        found: dict[str, Shared] = {}
        for segment in self.heads.segments:
            self.where = {}
            lines = self._segment(segment)
            shared = found.setdefault("\n".join(lines[1:]), Shared([], lines, []))
            shared.segments.append(segment)
            shared.where.append(dict(self.where))
        return uniform, row, list(found.values())

    def body(self) -> str:
        """The shared Uniform and Row values, then a struct for each segment that has code of its own."""
        uniform, row, segments = self._written
        lines = [
            "struct Body {",
            f"  {uniform.struct('Uniform')}",
            f"  {row.struct('Row')}",
            "  struct Columns {};  // staged for each head: Segment::stage",
            *_function(
                "Uniform uniform(coda::Operand const* in, int rows, int columns)",
                ["Uniform u{};", *uniform.code],
                "u",
            ),
            *_function(
                "Row row(coda::Operand const* in, Uniform const& u, int m, int rows)", ["Row r{};", *row.code], "r"
            ),
            *(f"  {line}" for shared in segments for line in shared.code()),
            "};",
        ]
        return "\n".join(lines)

    def _gather_rows(self, leaves: list[Node], row: Section) -> None:
        """Where the rows of gathered tables begin: found once for each row of the tile."""
        for leaf in leaves:
            gather = self._gather(leaf)
            if gather is None or gather in self.gathered:
                continue
            if gather.args[1] not in self.scope.names:
                raise fail("the index of a gather is a value of its row", gather)
            name = f"r{len(row.members)}"
            position = self.scope.value(gather.args[1], cpp_type(gather.args[1].dtype))
            row.members.append(f"{self._dtype(leaf)} const* {name};")
            row.code.append(f"r.{name} = coda::gathered_row<{self._dtype(leaf)}>(in[{self.index(leaf)}], {position});")
            self.gathered[gather] = f"r.{name}"

    def _products(self, segment: Segment) -> list[Node]:
        return [segment.product, *(p for b in segment.blocks for p in b.products)]

    def _segment(self, segment: Segment) -> list[str]:
        columns, accumulate = self._reductions(segment)
        reduction_names = [f"t.t{k}" for k in range(len(segment.reductions))]
        for node, name in zip(segment.reductions, reduction_names, strict=True):
            self.scope.names[node] = self._finished(node, name)
        roots = _roots(segment)
        inner = {b.products[0].type.dims[1][1].name for b in segment.blocks}
        above = [n for n in self.nodes(roots, set(segment.reductions)) if not n.type.names & inner]
        head = self.section([n for n in above if self.place(n, "") == "head"], "h", False, self.load_head(segment))
        blocks = [self._block(segment, i, b) for i, b in enumerate(segment.blocks)]
        totals = " ".join(f"{_state(n)} t{k};" for k, n in enumerate(segment.reductions))
        identities = ", ".join(f"{_combiner(n)}::identity()" for n in segment.reductions)
        lines = [f"struct {segment.name} {{", f"  {WHERE}"]
        lines += [f"  struct Totals {{ {totals} }};" if totals else "  struct Totals {};"]
        lines += [
            f"  CODA_FN static Totals identity() {{ return {{{identities}}}; }}",
            f"  {columns.struct('Columns')}",
        ]
        lines += _function(
            "Columns columns(Where const& w, coda::Operand const* in, Uniform const& u, int g, int i)",
            ["Columns c{};", *columns.code],
            "c",
        )
        lines += _function("void accumulate(Totals& t, coda::Operand const* in, Uniform const& u, Row const& r, "
                           "Columns const& c, int m, int i, coda::Two<float> product0)", accumulate, None)  # fmt: skip
        lines += [f"  {head.struct('Head')}"]
        lines += _function("Head head(Where const& w, coda::Operand const* in, Uniform const& u, Row const& r, "
                           "Totals const& t, int g)",
                           ["Head h{};", *head.code], "h")  # fmt: skip
        lines += [f"  {line}" for block in blocks for line in block]
        lines += self._stage(segment)
        lines += self._visit(segment)
        return [*lines, "};"]

    def _reductions(self, segment: Segment) -> tuple[Section, list[str]]:
        """The pass over a whole head that the reductions need."""
        if not segment.reductions:
            return Section(), []
        axis = segment.product.type.dims[1][1].name
        nodes = self.nodes([n.args[0] for n in segment.reductions])
        self.name_products([n for n in nodes if self.lowering.is_product(n)], (0,))
        columns = self.section(
            [n for n in nodes if self.place(n, axis) == "column"], "c", not self.paired, self.load_columns(segment)
        )
        lines = self.tile_code([n for n in nodes if self.place(n, axis) == "tile"])
        for k, node in enumerate(segment.reductions):
            name, combine = f"s{k}", f"{_combiner(node)}::combine"
            value = self.spread(self.scope.value(node.args[0], "float"))
            lines.append(f"{'float' if self.paired else 'coda::Two<float>'} const {name} = {value};")
            total = f"t.t{k}"
            for each in [name] if self.paired else [f"{name}.x", f"{name}.y"]:
                one = each if _state(node) == "float" else f"{_combiner(node)}::of({each})"
                total = f"{combine}({total}, {one})"
            lines.append(f"t.t{k} = {total};")
        return columns, lines

    def _finished(self, reduction: Node, total: str) -> str:
        """The value of a reduction over a head."""
        if reduction.op == "reduce_mean":
            return f"({total} / {float(self.heads.dim)}f)"
        return total if _state(reduction) == "float" else f"{_combiner(reduction)}::value({total})"

    def _block(self, segment: Segment, number: int, block: Block) -> list[str]:
        axis = block.products[0].type.dims[1][1].name
        kept, words = dict(self.scope.names), dict(self.scope.words)
        if (
            segment.reductions and axis == segment.product.type.dims[1][1].name
        ):  # values of the first pass are recomputed
            for node in self.nodes([n.args[0] for n in segment.reductions]):
                if self.place(node, axis) in ("tile", "column"):
                    self.scope.names.pop(node, None)
        self.name_products(block.products, block.offsets)
        roots = [v for p in block.pieces for v in _lanes(p.value)]
        nodes = self.nodes(roots, set(segment.reductions))
        columns = self.section(
            [n for n in nodes if self.place(n, axis) == "column"], "c", not self.paired, self.load_columns(segment)
        )
        tables = self._name_tables([n for n in nodes if self.lowering.is_leaf(n)]) if self.heads.strip else []
        self.tables[block] = tables
        code = self.tile_code([n for n in nodes if self.place(n, axis) == "tile"])
        members, returns = self._results(block)
        parameters = "".join(f", coda::Two<float> product{i}" for i in range(len(block.offsets)))
        parameters += "".join(f", coda::Two<float> table{k}" for k in range(len(tables)))
        lines = [
            f"struct Block{number} {{",
            f"  {columns.struct('Columns')}",
            f"  struct Result {{ {' '.join(members)} }};",
        ]
        lines += _function(
            "Columns columns(Where const& w, coda::Operand const* in, Uniform const& u, int g, int i)",
            ["Columns c{};", *columns.code],
            "c",
        )
        lines += _function("Result element(coda::Operand const* in, Uniform const& u, Row const& r, Head const& h, "
                           f"Columns const& c, int m, int i{parameters})",
                           code, f"{{{', '.join(returns)}}}")  # fmt: skip
        self.scope.names, self.scope.words = kept, words
        return [*lines, "};"]

    def _name_tables(self, leaves: Sequence[Node]) -> list[Table]:
        """What a strip reads of gathered tables, column for column of its own, as parameters."""
        tables: list[Table] = []
        for leaf in leaves:
            if (gather := self._gather(leaf)) is not None and not self.paired:
                row = self.gathered[gather].removeprefix("r.")
                self.scope.names[leaf] = f"table{len(tables)}"
                tables.append(Table(row, self._dtype(leaf), self.lowering.cut(leaf).column))
        return tables

    def _results(self, block: Block) -> tuple[list[str], list[str]]:
        members, returns = [], []
        for k, piece in enumerate(block.pieces):
            values = [self.scope.value(v, "float") for v in _lanes(piece.value)]
            both = f"coda::spread({values[0]})" if len(values) == 1 else f"coda::Two<float>{{{', '.join(values)}}}"
            if self.plan.stores[piece.store].is_packed:
                members.append(f"uint32_t piece{k};")
                word = self.scope.words.get(piece.value)
                returns.append(word or pack(self.plan.stores[piece.store].dtype, both))
            else:
                members.append(f"coda::Two<float> piece{k};")
                returns.append(both)
        return members, returns

    # ---- what runs on the device ----

    def _slots(self, segment: Segment) -> list[tuple[str, str, int]]:
        """(struct, offset expression, pairs) of the column values staged for a head."""
        slots, offset = [], "0"
        parts = [("Columns", self.heads.dim // 2)] + [
            (f"Block{i}::Columns", b.width // 2) for i, b in enumerate(segment.blocks)
        ]
        for name, pairs in parts:
            slots.append((name, offset, pairs))
            offset += f" + {pairs} * coda::size_of<{name}>()"
        return [*slots, ("", offset, 0)]

    def _stage(self, segment: Segment) -> list[str]:
        *slots, (_, total, _) = self._slots(segment)
        lines = [f"  static constexpr int kSlotBytes = {total};",
                 "  CUTLASS_DEVICE static void stage(Where const& w, char* slot, coda::Operand const* in, "
                 "Uniform const& u, int g, int pair) {"]  # fmt: skip
        for name, offset, pairs in slots:
            owner = name.removesuffix("Columns").removesuffix("::")
            call = f"{owner}::columns" if owner else "columns"
            lines.append(f"    if constexpr (coda::size_of<{name}>() > 0)")
            lines.append(
                f"      if (pair < {pairs})\n"
                f"        reinterpret_cast<{name}*>(slot + {offset})[pair] = {call}(w, in, u, g, 2 * pair);"
            )
        return [*lines, "  }"]

    def _visit(self, segment: Segment) -> list[str]:
        slots = self._slots(segment)
        lines = [
            "  template <class Launch>",
            "  CUTLASS_DEVICE static void visit(Where const& w, coda::HeadView const& v, Launch const& p, "
            "Uniform const& u,",
            "                                   Row const (&rows)[2], char const* slot, int g, int row, int q) {",
            *(emit_strips.enter(self.heads, self.heads.strip) if self.heads.strip else []),
            "    Totals totals[2] = {identity(), identity()};",
            *(self._reducing_pass(segment, slots[0][1]) if segment.reductions else []),
            "    Head const heads[2] = {head(w, p.operands, u, rows[0], totals[0], g), "
            "head(w, p.operands, u, rows[1], totals[1], g)};",
            *(self._head_stores(segment) if segment.head_values else []),
        ]
        stores = list(dict.fromkeys(p.store for b in segment.blocks for p in b.pieces))
        for k, store in enumerate(stores):
            place = f"coda::batched_row({self.output(store)}, row"
            lines.append(f"    int64_t const rows{k}[2] = {{{place}), {place} + 8)}};")
        for number, block in enumerate(segment.blocks):
            if self.heads.strip:
                sinks = [self._sink(piece, stores.index(piece.store)) for piece in block.pieces]
                lines += emit_strips.steps(self.heads, self.heads.strip, number, block, self.tables[block], sinks)
            else:
                lines += self._steps(number, block, slots[number + 1][1], stores)
        return [*lines, "  }"]

    def _reducing_pass(self, segment: Segment, offset: str) -> list[str]:
        """All columns of the head, then the quad that shares a row."""
        return [
            "    CUTLASS_PRAGMA_UNROLL",
            f"    for (int j = 0; j < {self.heads.dim // 8}; ++j) {{",
            f"      Columns const c = coda::staged<Columns>(slot + {offset}, 4 * j + q);",
            "      CUTLASS_PRAGMA_UNROLL",
            "      for (int rr = 0; rr < 2; ++rr)",
            "        accumulate(totals[rr], p.operands, u, rows[rr], c, row + 8 * rr, 8 * j + 2 * q, v.pair(j, rr));",
            "    }",
            "    CUTLASS_PRAGMA_UNROLL",
            "    for (int rr = 0; rr < 2; ++rr) {",
            *(
                f"      totals[rr].t{k} = coda::quad_combine<{_combiner(n)}>(totals[rr].t{k});"
                for k, n in enumerate(segment.reductions)
            ),
            "    }",
        ]

    def _head_stores(self, segment: Segment) -> list[str]:
        """Results that are one value for each row and head."""
        lines = ["    CUTLASS_PRAGMA_UNROLL", "    for (int rr = 0; rr < 2; ++rr) {"]
        lines += ["      Head const& h = heads[rr];", "      Row const& r = rows[rr];"]
        lines += ["      Totals const& t = totals[rr];"]
        for value, store in segment.head_values:
            place = f"row + 8 * rr, p.m, g, q, {self.scope.value(value, 'float')}"
            lines.append(
                f"      coda::store_head_value<{self.plan.stores[store].dtype.cpp}>({self.output(store)}, {place});"
            )
        return [*lines, "    }"]

    def _sink(self, piece: Piece, number: int) -> Sink:
        bits = self.plan.stores[piece.store].dtype.bits
        return Sink(self.output(piece.store), f"rows{number}", bits, piece.offset)

    def _steps(self, number: int, block: Block, offset: str, stores: Sequence[int]) -> list[str]:
        kept = ["uint32_t" if self.plan.stores[p.store].is_packed else "coda::Two<float>" for p in block.pieces]
        products = "".join(f", v.pair({o // 8} + first / 8 + j, rr)" for o in block.offsets)
        lines = [
            f"    coda::for_steps<{block.width}>([&](auto width, int first) {{",
            "      constexpr int kWidth = decltype(width)::value;",
            *(f"      {type_} piece{k}[kWidth / 4];" for k, type_ in enumerate(kept)),
            "      CUTLASS_PRAGMA_UNROLL",
            "      for (int j = 0; j < kWidth / 8; ++j) {",
            f"        auto const c = coda::staged<Block{number}::Columns>(slot + {offset}, first / 2 + 4 * j + q);",
            "        CUTLASS_PRAGMA_UNROLL",
            "        for (int rr = 0; rr < 2; ++rr) {",
            f"          auto const result = Block{number}::element(p.operands, u, rows[rr], heads[rr], c, "
            "row + 8 * rr, "
            f"first + 8 * j + 2 * q{products});",
            *(f"          piece{k}[2 * j + rr] = result.piece{k};" for k in range(len(block.pieces))),
            "        }",
            "      }",
        ]
        for k, piece in enumerate(block.pieces):
            sink = f"store{self.plan.stores[piece.store].dtype.bits}"
            rows = "{{rows{0}[0], rows{0}[1]}}".format(stores.index(piece.store))
            at = f"{{row, first + {piece.offset}, p.m, {self.heads.dim}, q, {rows}}}"
            output = self.output(piece.store)
            lines.append(f"      coda::{sink}<kWidth>({output}, g, piece{k}, coda::StepPosition{at});")
        return [*lines, "    });"]

    def visitor(self) -> str:
        """What epilogue.h asks of a visitor with heads."""
        slot = "0"
        for shared in self._written[2]:
            slot = f"coda::larger({slot}, {shared.name}::kSlotBytes)"
        lines = [
            "struct Visitor : Body {",
            *operand_traits(self.plan),
            "  static constexpr int kLanes = 1, kBytesPerElement = 0;",
            f"  {emit_strips.unit(self.heads)}",
            f"  static constexpr int kSlotBytes = ({slot} + 15) / 16 * 16;",
            "  using Streams = coda::Streams<>;",
            "  CUTLASS_DEVICE static bool needs_tiles(Launch const&) { return false; }",
            *(f"  {line}" for line in self.dispatch()),
        ]
        return "\n".join([*lines, "};"])

    def dispatch(self) -> list[str]:
        """Which segment a head (or a strip of it) belongs to, where that reads and stores, and its number in it."""
        lines = ["template <class F> CUTLASS_DEVICE static void dispatch(int head, int heads, F const& f) {"]
        for shared in self._written[2]:
            spans = []
            for segment in shared.segments:
                start, end = (self._at(head) for head in (segment.start, segment.start + (segment.count or 0)))
                spans.append(f"(head >= {start} && head < {'heads' if segment.count is None else end})")
            numbers = [", ".join(str(w[name]) for name in shared.members) for w in shared.where]
            strips = self.heads.strips
            where = shared.chosen([f"Where{{{n}}}" for n in numbers], strips) if shared.members else "Where{}"
            first = shared.chosen([str(self._at(s.start)) for s in shared.segments], strips)
            lines += [
                f"  if (head < heads && ({' || '.join(spans)})) {{",
                f"    using Where = typename Body::{shared.name}::Where;",
                f"    return f(typename Body::{shared.name}{{}}, {where}, head - ({first}));",
                "  }",
            ]
        return [*lines, "}"]

    def _at(self, head: int) -> int:
        """Where a head begins, counted as ``dispatch`` counts."""
        return head * self.heads.strips


def _lanes(value: Node) -> tuple[Node, ...]:
    """The values of neighbouring columns."""
    return value.args if value.op == "stack" else (value,)


def _roots(segment: Segment) -> list[Node]:
    pieces = [v for b in segment.blocks for p in b.pieces for v in _lanes(p.value)]
    return pieces + [v for v, _ in segment.head_values]


def _combiner(node: Node) -> str:
    return REDUCTIONS[node.op.removeprefix("reduce_")].cpp


def _state(reduction: Node) -> str:
    """What the reduction of a head has come to so far."""
    floats = REDUCTIONS[reduction.op.removeprefix("reduce_")].floats
    return "float" if floats == 1 else f"{_combiner(reduction)}::State"


def _function(head: str, body: list[str], result: str | None) -> list[str]:
    returns = [] if result is None else [f"    return {result};"]
    return [f"  CODA_FN static {head} {{", *(f"    {line}" for line in body), *returns, "  }"]
