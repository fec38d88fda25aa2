"""The plan of a kernel without a product: teams of threads own whole rows, or parts of them where nothing is reduced.

``lower_rows`` (rows.py) makes a ``RowPlan``, ``emit_rows.py`` writes its device code over ``templates/row.h``.

The axes of a program are *rows*, counted by a few nested loops (``levels``), and *columns*, which the threads of a team
share. Columns lie in one or more ``spaces``: a head of which two halves are rotated and the rest is not has two. Values
over columns are computed eight at a time; values of a row once by each thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from coda.dtypes import DType
from coda.ir import Dim, Node, Program, Size
from coda.target.plan import Arg, Finishing, Store

MAX_LEVELS = 4  # kMaxLevels of templates/launch.h
OCTET = 8  # columns that a thread computes at a time
ROW_THREADS = 512  # of a block at most
TOTAL_BLOCKS = 264  # blocks of a kernel that reduces over the rows: two for each multiprocessor of an H100 or H200
HELD_WORDS = 64  # 32-bit registers for the operands of a row that a thread holds


@dataclass(frozen=True)
class Stride:
    """How one loop steps through a tensor: ``scale`` times the stride of a dim. A dim may group several axes."""

    dim: int
    scale: Size


@dataclass(frozen=True)
class Access:
    """A tensor as a kernel reads or writes it: an entry of ``Rows.tensors``. ``arg`` None stands for the number
    ``size``.

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
    """A reduction over all rows: of a value for each column (``space``) or for each row, to partial results of each
    block at access ``access``."""

    reduction: Node
    access: int
    space: int | None


@dataclass(frozen=True)
class RowVariant:
    """A kernel: ``octets`` of each operand are held by a thread (0: it reads them again for each stage); ``vector``:
    all accesses are of 16 bytes."""

    symbol: str
    octets: int
    vector: bool


@dataclass(frozen=True)
class RowPlan:
    """A row or map kernel and the finish kernels of its reductions over the rows.

    ``stages``: the reductions over columns, in the order in which they become known; the values of the last stage are
    stored. ``program`` is the program after lanes and pieces are apart: what all nodes belong to.
    """

    name: str
    program: Program
    args: tuple[Arg, ...]
    levels: tuple[Dim, ...]
    spaces: tuple[Dim, ...]
    accesses: tuple[Access, ...]
    readings: tuple[Reading, ...]
    stages: tuple[tuple[Node, ...], ...]
    writings: tuple[Writing, ...]
    totals: tuple[Total, ...]
    stores: tuple[Store, ...]  # the partials of ``totals``, as slots of the workspace
    finishings: tuple[Finishing, ...]

    @property
    def kind(self) -> str:
        return "row" if self.stages else "map"

    @property
    def rows(self) -> Dim:
        return tuple(axis for level in self.levels for axis in level)

    @property
    def columns(self) -> Dim:
        return self.spaces[0]

    @property
    def variants(self) -> tuple[RowVariant, ...]:
        """The kernels that are built, in order of preference; the last one takes any layout."""
        read = {r.access for r in self.readings if r.space is not None and r.varies}
        words = sum(OCTET * self.accesses[k].dtype.bytes // 4 for k in read) + OCTET * len(self.column_totals)
        counts = (1, 2) if self.kind == "map" else (1, 2, 4)
        fitting = [n for n in counts if n == 1 or n * words <= HELD_WORDS]
        any_layout = 1 if self.kind == "map" else 4 if self.column_totals else 0
        stem = f"{self.name.removesuffix(f'_{self.kind}')}_{self.kind}"
        held = (RowVariant(f"{stem}_{n}", n, True) for n in fitting)
        return (*held, RowVariant(f"{stem}_any", any_layout, False))

    @property
    def column_totals(self) -> tuple[Total, ...]:
        return tuple(t for t in self.totals if t.space is not None)

    def arg(self, name: str) -> Arg:
        return next(a for a in self.args if a.name == name)
