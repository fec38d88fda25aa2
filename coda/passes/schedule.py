"""When each value of a block program can be computed: its stage.

Groups of products run one after the other: stages 2, 4, 6 ... A value belongs to the latest product it depends on,
whose epilogue computes it while the tile is in registers. Two things need more than a tile:

* a reduction over an axis that no tile holds whole is finished only when all tiles are: it is *late*, and so are the
  statistics made of it (a mean, then 1/rms), which a finish kernel computes;
* a matrix that reads a late value (``y * r`` with r from all of y) belongs to the odd stage behind the product. A
  kernel of an odd stage, or of stage 0, which depends on no product, owns whole rows: no row statistic is late there.
  So a row statistic that such a kernel reads is left to it, also where others read it as well;
* what must be in memory, and rows make of a statistic of other columns, is left to another kernel: the next odd stage.

An opaque call is a group as well, with nothing in its stage but its results: what reads them comes behind. So does what
reads a *bare* product, whose kernel stores it and no more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import sympy

from coda.ir import Node, Program
from coda.ops import OPS
from coda.passes.merge import ANCHORS, Group, core

LEAVES = {"input", "const", "index", "size"}
LOCAL_COLUMNS = 256  # the widest static axis that a tile holds whole: a head, a block of a quantised row


@dataclass
class Schedule:
    """The stage of each value of a program, and which values are late there."""

    program: Program
    groups: Sequence[Group]
    bare: Collection[Node] = ()  # products, or their roundings
    stage: dict[Node, int] = field(default_factory=dict)
    late: set[Node] = field(default_factory=set)
    loops: dict[Node, frozenset[str]] = field(default_factory=dict)  # the axes that its stage counts to make a value
    apart: set[Node] = field(default_factory=set)  # made of a statistic of other columns, in the same stage
    left_to_rows: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.stored = in_memory(self.program)
        self.place_all()
        self.left_to_rows = self.read_by_rows()
        self.place_all()

    def place_all(self) -> None:
        of_dot = {dot: 2 * i for i, group in enumerate(self.groups, 1) for dot in group.dots}
        self.late.clear()
        self.apart.clear()
        for node in self.program.nodes():
            self.stage[node] = of_dot[node] if node in of_dot else self.place(node)
            self.loops[node] = self.counted(node)
            if self.has_other_columns(node, self.stage[node]):
                self.apart.add(node)

    def read_by_rows(self) -> set[Node]:
        """The late row statistics from which a kernel right behind their product computes what must be in memory."""
        users = self.program.users()
        leads: set[Node] = set()
        for node in reversed(self.program.nodes()):
            stage = self.stage[node]
            behind = stage % 2 == 1
            if behind and (node in self.stored or any(u in leads and self.stage[u] == stage for u in users[node])):
                leads.add(node)
            if node in self.late and any(u in leads and self.stage[u] in (stage, stage + 1) for u in users[node]):
                leads.add(node)
        return {n for n in leads if n in self.late and is_reduction(n) and is_in_a_row(n)}

    def group(self, stage: int) -> Group | None:
        """The products of an even stage."""
        return self.groups[stage // 2 - 1] if stage and stage % 2 == 0 else None

    def place(self, node: Node) -> int:
        """The stage of a value that is no product; notes whether it is late."""
        stage = max((self.stage[a] + (a.op == "call" or a in self.bare) for a in node.args), default=0)
        waiting = [a for a in node.args if a in self.late and self.stage[a] == stage]
        if waiting and any(node.type.names <= a.type.names for a in waiting):
            self.late.add(node)
        elif waiting:
            return stage + 1 if stage % 2 == 0 else stage + 2
        elif node in self.left_to_rows:
            return stage + 1
        else:
            needed = is_reduction(node) or node in self.stored
            if needed and owns_rows(stage) and self.has_other_columns(node, stage):
                stage += 2 if stage else 1
            if is_reduction(node) and not self.in_one_block(node, stage):
                self.late.add(node)
        return stage

    def counted(self, node: Node) -> frozenset[str]:
        """The axes that the kernel of a value's stage counts to make it: its own, and those it reduces over."""
        if node.op in ANCHORS:
            return node.type.names
        found = node.type.names.union(*(a.type.names for a in node.args if is_reduction(node)))
        for i, operand in enumerate(node.args):
            if self.stage[operand] == self.stage[node]:
                cut = node.attr("axis") if node.op in ("part", "slice", "gather") else None
                cut = node.attr("parts")[i] if node.op == "concat" else cut
                found |= self.loops[operand] - {cut}
        return found

    def has_other_columns(self, node: Node, stage: int) -> bool:
        """Whether a value is made of a statistic that the same kernel would make of rows of other columns."""
        here = [a for a in node.args if self.stage[a] == stage]
        lacking = [a for a in here if a.type.names < node.type.names]
        return any(a in self.apart for a in here) or any(not self.loops[a] <= node.type.names for a in lacking)

    def in_one_block(self, reduction: Node, stage: int) -> bool:
        """Whether one thread block sees all of what a reduction at this stage adds up."""
        sizes = [a.size for a in reduction.args[0].type.axes if a.name in reduction.attr("axes")]
        width = sympy.Mul(*sizes)
        if width.is_Integer and width <= LOCAL_COLUMNS and is_along_rows(reduction):
            return True
        return owns_rows(stage) and is_in_a_row(reduction)


def owns_rows(stage: int) -> bool:
    """Whether the kernels of a stage own whole rows: those that no product is in."""
    return stage == 0 or stage % 2 == 1


def in_memory(program: Program) -> set[Node]:
    """What must be in memory however the program is cut: results, operands of products, what calls read and give."""
    anchors = [n for n in program.nodes() if n.op in ANCHORS]
    stored = {core(a, n.op) for n in anchors for a in n.args} | {n for n in anchors if n.op == "call"}
    return {n for n in stored | {o.value for o in program.outputs} if n.op not in LEAVES}


def is_reduction(node: Node) -> bool:
    return OPS[node.op].family == "reduce" and node.op != "partial"


def is_along_rows(reduction: Node) -> bool:
    """Whether a reduction leaves the slowest dim of what lies in memory alone."""
    (operand,) = reduction.args
    memory, frontier = operand, [operand]
    while frontier:
        found = next((n for n in frontier if n.op == "input" and n.type.names == operand.type.names), None)
        if found is not None:
            memory = found
            break
        frontier = [a for n in frontier for a in n.args if a.type.names == operand.type.names]
    return not {a.name for a in memory.type.dims[0]} & set(reduction.attr("axes"))


def is_in_a_row(reduction: Node) -> bool:
    """Whether a kernel that owns whole rows finishes a reduction."""
    return is_along_rows(reduction) and not is_scattered(reduction)


def is_scattered(reduction: Node) -> bool:
    """Whether what a reduction of several axes adds up is no one loop of a row: heads that are cut into pieces."""
    (operand,) = reduction.args
    inner = {a.name for a in operand.type.axes if a.name in reduction.attr("axes")}
    inner -= {next(a.name for a in operand.type.axes if a.name in inner)}
    frontier = [operand] if inner else []
    while frontier:
        for node in frontier:
            joined, cut = node.op in ("concat", "stack"), node.op == "part"
            if (joined and node.attr("axis").name in inner) or (cut and node.attr("into").name in inner):
                return True
        frontier = list(
            dict.fromkeys(a for n in frontier if not is_reduction(n) and n.op not in ANCHORS for a in n.args)
        )
    return False
