"""The plan of a kernel without a product: teams of threads own whole rows, or parts of them where nothing is reduced.

``lower_rows`` (rows.py) makes a ``RowPlan``, ``emit_rows.py`` writes its device code over ``templates/row.h``.

Values that vary over different axes are computed by different *parts* of one launch: the heads of q by one, those of k
and v by another. The axes of a part are *rows*, counted by a few nested loops (``levels``), and *columns*, which the
threads of a team share. Columns lie in one or more ``spaces``: a head of which two halves are rotated and the rest is
not has two. Values over columns are computed eight at a time; values of a row once by each thread.

What needs more than a row, a sum over rows or over the heads of several parts, is left as *partials* in the workspace,
and a finish kernel adds them up in fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from coda.dtypes import DType
from coda.ir import Dim, Node, Program, Size, dim_size
from coda.target.plan import Arg, Finishing, Store, Tiled

MAX_LEVELS = 4  # kMaxLevels of templates/launch.h
MAX_PARTS = 4  # kMaxParts of templates/host/tables.h
OCTET = 8  # columns that a thread computes at a time
ROW_THREADS = 512  # of a block at most
TEAM_THREADS = 256  # of a team that holds one octet each
TOTAL_BLOCKS = 264  # blocks of a part that reduces over the rows: two for each multiprocessor of an H100 or H200
HELD_WORDS = 64  # 32-bit registers for the operands of a row that a thread holds


@dataclass(frozen=True)
class Stride:
    """How one loop steps through a tensor: ``scale`` times the stride of a dim. A dim may group several axes. Partials
    have no dims (None): there ``scale`` counts elements."""

    dim: int | None
    scale: Size


@dataclass(frozen=True)
class Access:
    """A tensor as a part reads or writes it: an entry of ``Rows.tensors``. ``arg`` None stands for the number
    ``size``, or for the partials in ``slot`` of the workspace.

    ``offsets``: (dim, elements along it) to where it begins, which slices and parts move. ``gather``: the stride of the
    axis that is selected from, and the number of positions it has.
    """

    arg: str | None
    dtype: DType
    levels: tuple[Stride | None, ...] = ()
    column: Stride | None = None
    offsets: tuple[tuple[int, Size], ...] = ()
    identity: float = 0.0
    gather: tuple[Stride, Size] | None = None
    size: Size | None = None
    slot: int | None = None
    partial: str | None = None  # "sum", ..: partial results of another program, reduced where they are read


@dataclass(frozen=True)
class Reading:
    """A leaf of the math: which access it is, in which column space it lies (None: it is a value of the row), whether
    it varies over the rows, and the value that selects from it."""

    leaf: Node
    access: int
    space: int | None
    varies: bool
    index: Node | None = None


@dataclass(frozen=True)
class Writing:
    """A value that is stored through access ``access``, once for each row or each column of ``space``. ``missing``:
    levels that the tensor lacks, whose first row alone stores."""

    value: Node
    access: int
    space: int | None
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Total:
    """``value``, of a row or of the columns of ``space``, reduced over the rows of a block, as ``reduction`` says; each
    block leaves its result at access ``access``. ``missing``: see ``Writing``."""

    reduction: Node
    value: Node
    access: int
    space: int | None
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Partials:
    """A slot of the workspace, [count][length], which part ``part`` fills for a finish kernel. With ``blocks`` there is
    one for each of its blocks, or, where ``kept``, for each of those that share the fixed levels; else there are
    ``count``."""

    part: int
    length: Size
    count: Size
    blocks: bool = False
    kept: bool = False


@dataclass(frozen=True)
class RowFinishing(Finishing):
    """A finish kernel of a row kernel. Its results are counted by two ``loops``, of which the outer one, or both, may
    be empty; ``accesses`` say how operands and results lie along them, operands first."""

    loops: tuple[Dim, Dim] = ((), ())
    accesses: tuple[Access, ...] = ()
    number: int = 1

    @property
    def inner(self) -> Size:
        return dim_size(self.loops[1])

    def counted(self, plan: Tiled) -> Dim:
        return (*self.loops[0], *self.loops[1])

    def extent(self, plan: Tiled) -> Size:
        """A mean is a sum, divided by an operand."""
        return sympy.Integer(0)

    @property
    def label(self) -> str:
        return self.kind if self.number == 1 else f"{self.kind}_{self.number}"


@dataclass(frozen=True)
class RowVariant:
    """A kernel: ``octets`` of each operand are held by a thread (0: it reads them again for each stage); ``vector``:
    all accesses are of 16 bytes."""

    symbol: str
    octets: int
    vector: bool


@dataclass(frozen=True)
class RowPart:
    """Values over the same rows and columns.

    ``stages``: the reductions over columns, in the order in which they become known; the values of the last stage are
    stored. A block stays within one step of each of the first ``fixed`` levels, so that what it totals belongs there.
    """

    levels: tuple[Dim, ...]
    spaces: tuple[Dim, ...]
    accesses: tuple[Access, ...]
    readings: tuple[Reading, ...]
    stages: tuple[tuple[Node, ...], ...]
    writings: tuple[Writing, ...]
    totals: tuple[Total, ...]
    fixed: int = 0

    @property
    def rows(self) -> Dim:
        return tuple(axis for level in self.levels for axis in level)

    @property
    def groups(self) -> Dim:
        """The axes of the fixed levels."""
        return tuple(axis for level in self.levels[: self.fixed] for axis in level)

    @property
    def column_totals(self) -> tuple[Total, ...]:
        return tuple(t for t in self.totals if t.space is not None)

    @property
    def held_words(self) -> int:
        """32-bit registers for an octet of each operand that a thread holds, and of each total."""
        read = {r.access for r in self.readings if r.space is not None and r.varies}
        return sum(OCTET * self.accesses[k].dtype.bytes // 4 for k in read) + OCTET * len(self.column_totals)


@dataclass(frozen=True)
class RowPlan:
    """A row or map kernel and the finish kernels of its partials, which lie in the slots ``stores`` of the workspace.
    ``program`` is the program after lanes and pieces are apart: what all nodes belong to."""

    name: str
    program: Program
    args: tuple[Arg, ...]
    parts: tuple[RowPart, ...]
    partials: tuple[Partials, ...]
    stores: tuple[Store, ...]  # the same, as the slots of any kernel
    finishings: tuple[Finishing, ...]

    @property
    def kind(self) -> str:
        return "row" if any(part.stages for part in self.parts) else "map"

    @property
    def rows(self) -> Dim:
        return self.parts[0].rows

    @property
    def columns(self) -> Dim:
        return self.parts[0].spaces[0]

    @property
    def variants(self) -> tuple[RowVariant, ...]:
        """The kernels that are built, in order of preference; the last one takes any layout."""
        words = max(part.held_words for part in self.parts)
        counts: tuple[int, ...] = (1, 2, 4)
        if self.kind == "map":  # what a thread asks for at once decides how much of the bandwidth is used
            counts = (1, 4 if 4 * words <= HELD_WORDS // 2 else 2)
        if (most := self._octets()) is not None:
            counts = counts[: next((i for i, n in enumerate(counts, 1) if n * TEAM_THREADS >= most), len(counts))]
        fitting = [n for n in counts if n == 1 or n * words <= HELD_WORDS]
        totals = any(part.column_totals for part in self.parts)
        any_layout = 1 if self.kind == "map" else counts[-1] if totals else 0
        stem = f"{self.name.removesuffix(f'_{self.kind}')}_{self.kind}"
        held = (RowVariant(f"{stem}_{n}", n, True) for n in fitting)
        return (*held, RowVariant(f"{stem}_any", any_layout, False))

    def _octets(self) -> int | None:
        """The most octets of a row, where all widths are numbers."""
        widths = [dim_size(space) for part in self.parts for space in part.spaces]
        return max(-(-int(w) // OCTET) for w in widths) if all(w.is_Integer for w in widths) else None

    def arg(self, name: str) -> Arg:
        return next(a for a in self.args if a.name == name)
