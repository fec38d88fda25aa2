"""The visitor plan: what one epilogue program becomes before it is C++.

``lower`` (lower.py) makes a ``Plan`` from a program; ``emit.py`` writes its device code, ``coda/build/host.py`` its
launcher, ``legality.py`` answers whether given tensors can run, ``explain`` prints it. A plan is independent of the
tile: one plan is emitted once for each tile variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from coda.dtypes import BF16, F8E4M3, F8E5M2, F16, F32, S8, DType
from coda.ir import Axis, Dim, Node, Partial, Program, Size, dim_size

FLOATS = (BF16, F16, F32)  # what tiles are prefetched in, and values of rows, columns and heads are stored in
STORED = (*FLOATS, F8E4M3, F8E5M2, S8)  # what tiles are stored in


def dtype_list(dtypes: tuple[DType, ...]) -> str:
    """ "bf16, f16 and f32"."""
    *most, last = (d.name for d in dtypes)
    return f"{', '.join(most)} and {last}"


def counted_axes(node: Node) -> Dim:
    """The axes that a value is the position along, of several the position in their group; else none."""
    return (node.attr("axis"),) if node.op == "index" else node.attr("axes") if node.op == "position" else ()


def is_run(axes: Dim, dim: Dim) -> bool:
    """Whether axes are neighbours in a group, in its order."""
    return any(dim[i : i + len(axes)] == axes for i in range(len(dim)))


def place_in(axes: Dim, dim: Dim) -> tuple[Size, Size | None]:
    """How the position along neighbours in a group follows from that in the group: ``position / step % size``. The size
    is None where no axis is in front."""
    at = dim.index(axes[0])
    return dim_size(dim[at + len(axes) :]), dim_size(axes) if at else None


class Space(Enum):
    """Over which part of the output tile a value varies, hence where it is computed."""

    UNIFORM = "uniform"  # one value: scalars
    ROW = "row"  # one for each row: f32[M]
    COLUMN = "column"  # one for each column: bf16[N]
    TILE = "tile"  # one for each element


class Lanes(Enum):
    """How a tensor holds the two lanes of a paired product along its column dim."""

    NONE = "none"  # no lane axis
    OUTER = "outer"  # (s F): concatenated halves
    INNER = "inner"  # (F s): interleaved


class Major(Enum):
    """Which dim of a product operand is adjacent in memory."""

    K = "k"  # the contracted one: x of x @ w.T, [M, K], and w, [N, K]
    MN = "mn"  # the other one: x of x.T @ w, [K, M], and w, [K, N]


@dataclass(frozen=True)
class Arg:
    """One position of ``NAME_run``: parameters, then outputs, in order. ``dims`` are sizes over the free axes. What
    accumulates into an ``inout`` parameter has no position of its own. Partial results have a dim more, in front."""

    name: str
    dtype: DType
    dims: tuple[Size, ...]
    axes: tuple[str, ...]  # each dim as written, for messages: "M", "(s F)"
    is_output: bool = False
    optional: bool = False
    default: float | int | None = None
    inout: bool = False
    partial: Partial | None = None

    @property
    def is_written(self) -> bool:
        return self.is_output or self.inout

    @property
    def text(self) -> str:
        """With its type, as written in the program: its axes tell how it lies in memory."""
        before = f"{self.partial} " if self.partial else ""
        axes = f"[{', '.join(self.axes)}]" if self.axes else ""
        return f"{self.name}: {before}{self.dtype}{axes}" + "?" * self.optional


@dataclass(frozen=True)
class Walk:
    """How a head-wise kernel steps through a tensor: the dims that carry rows, batches of rows, heads and columns
    within a head (None: it does not vary). A dim that groups heads and columns steps ``head_scale`` columns a head."""

    row: int | None = None
    batch: int | None = None
    head: int | None = None
    column: int | None = None
    head_scale: int = 1


@dataclass(frozen=True)
class Operand:
    """An entry of ``Launch.operands``: parameter ``arg`` read by the epilogue. ``row_dim``/``column_dim``/``batch_dim``
    are the tensor dims that carry rows, columns and the batch (None: broadcast); where it shares a dim with one of the
    others, the batch is outside. A TILE operand is fetched through TMA map ``map`` (its index in ``Launch.tiles``).
    ``size``: not a parameter, but a size as a number; its ``arg`` is "".
    """

    arg: str
    space: Space
    dtype: DType
    row_dim: int | None = None
    column_dim: int | None = None
    lanes: Lanes = Lanes.NONE
    identity: float = 0.0  # what an absent optional operand stands for
    map: int | None = None
    walk: Walk | None = None  # head-wise kernels: how rows, heads and columns step through the tensor
    gathered: bool = False  # a table [P, columns] whose rows are selected by a position
    size: Size | None = None
    partial: str | None = None  # "sum", ..: partials [count, rows], which are reduced where they are read
    batch_dim: int | None = None


@dataclass(frozen=True)
class Store:
    """An entry of ``Launch.outputs``.

    kind "tile": a value for each element (``values`` has one node, or one for each lane), to output ``arg``.
    kind "row": one f32 for each row and tile column, combined over the columns of the tile; "column": likewise over
    the rows. Partials go to output ``arg`` as [count][length] where the program returns them unfinished, else to the
    workspace, from where a Finishing reads them. kind "pick": one f32 for each row, the element of ``values[0]`` at the
    column ``values[1]``. kind "each": a value of each row, stored by the first tile that has the row.

    Partials of columns are kept apart by batch where there is a ``batch_dim``; else they are of all batches.
    """

    kind: str
    values: tuple[Node, ...]
    dtype: DType
    arg: str | None = None
    lanes: Lanes = Lanes.NONE
    row_dim: int | None = None
    column_dim: int | None = None
    reduction: str | None = None  # "sum", "max", ... for row and column
    finished: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether its values are memory words of two columns rather than pairs of f32."""
        return self.kind == "tile" and self.dtype.bits < 32

    walk: Walk | None = None  # head-wise kernels, as in Operand
    batch_dim: int | None = None


class Tiled(Protocol):
    """What finish kernels ask of the plan they belong to."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> Dim: ...
    @property
    def columns(self) -> Dim: ...


@dataclass(frozen=True)
class Finishing:
    """A finish kernel. Kind "row" or "column" combines the partials of one direction; "total" reduces the values of all
    rows to scalars.

    ``partials`` are slots of the workspace, first among its operands, and ``reductions`` the nodes they stand for: slot
    i < len(Plan.stores) is what store i left, the rest are the ``kept`` values of the row kernel, an f32 for each row.
    A slot that is ``plain`` holds values that nothing has reduced before. Then come ``operands``. ``results``: (value
    node, output arg, dtype).
    """

    kind: str
    partials: tuple[int, ...]
    reductions: tuple[Node, ...]
    operands: tuple[Operand, ...]
    results: tuple[tuple[Node, str, DType], ...]
    kept: tuple[Node, ...] = ()
    leaves: tuple[Node, ...] = ()  # of a row kernel: the values that the operands are
    batch: Dim = ()  # reduced over as well
    plain: tuple[bool, ...] = ()  # by slot

    @property
    def label(self) -> str:
        """What tells it from the other finish kernels of its plan."""
        return self.kind

    def counted(self, plan: Tiled) -> Dim:
        """The axes that results are counted by, as one group."""
        return {"row": plan.rows, "column": plan.columns}.get(self.kind, ())

    def extent(self, plan: Tiled) -> Size:
        """The number of elements reduced over: ``Finish::extent``."""
        return dim_size(plan.columns if self.kind == "row" else (*self.batch, *plan.rows))


@dataclass(frozen=True)
class Piece:
    """A result of a block: ``value`` is stored to columns ``offset`` and on of its head in ``Plan.stores[store]``."""

    value: Node
    store: int
    offset: int


@dataclass(frozen=True)
class Block:
    """``width`` columns of a head that are computed together with those at the other ``offsets``: lane i of the block
    is product ``products[i]``, columns [offsets[i], offsets[i] + width) of the head."""

    width: int
    offsets: tuple[int, ...]
    products: tuple[Node, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Segment:
    """A run of heads with math of its own (q, k or v): ``start`` its first head, ``count`` heads (None: all there are).
    ``product`` is the accumulator over a whole head, ``reductions`` run over it, ``head_values`` are (value for each
    row and head, index of its store)."""

    name: str
    start: int
    count: int | None
    product: Node
    reductions: tuple[Node, ...]
    head_values: tuple[tuple[Node, int], ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Strip:
    """Columns that a tile may hold of a head without the rest: of each of its ``parts`` of equal width (1, or 2 halves
    that are rotated together) the same ``run`` of columns."""

    run: int
    parts: int


@dataclass(frozen=True)
class Heads:
    """A head-wise epilogue: heads of ``dim`` columns, in segments of ascending ``start``. A tile holds whole heads, or
    whole strips of them where there is a ``strip``."""

    dim: int
    head_axis: Axis
    column_axis: Axis
    segments: tuple[Segment, ...]
    strip: Strip | None = None

    @property
    def unit(self) -> int:
        """Columns that a tile holds whole."""
        return self.strip.run * self.strip.parts if self.strip else self.dim

    @property
    def strips(self) -> int:
        """How many strips a head is cut into; 1 where it is not cut."""
        return self.dim // self.unit


@dataclass(frozen=True)
class Term:
    """A product of the sum that is accumulated: of parameters ``a`` and ``b`` over their own contracted axis. ``b`` has
    two weights of equal shape where each lane has its own. In memory the last dim of each is adjacent; ``a_at`` and
    ``b_at`` are the dims of the batch and of what is left, where that is not the order of the dims."""

    a: str
    b: tuple[str, ...]
    contraction: Dim
    a_at: tuple[int, int] | None = None
    b_at: tuple[int, int] | None = None


@dataclass(frozen=True)
class Plan:
    """A GEMM with a visitor epilogue, and the finish kernels of its reductions.

    The accumulators hold the sum of ``terms``, whose operands all lie in memory as ``a_major`` and ``b_major`` say.
    ``lanes`` is 1 or 2; with 2, either the term has two weights or one whose column dim holds both lanes as ``b_lanes``
    says. ``columns`` is the column dim of one lane. Where there is a ``batch``, each of its elements is a product of
    ``rows`` of its own. ``program`` is the program after lane unrolling: what the nodes in the stores belong to, and
    ``products``, the value that each lane accumulates.
    """

    name: str
    program: Program
    args: tuple[Arg, ...]
    terms: tuple[Term, ...]
    a_major: Major
    b_major: Major
    products: tuple[Node, ...]
    b_lanes: Lanes
    rows: Dim
    columns: Dim
    lane_axis: Axis | None
    operands: tuple[Operand, ...]
    stores: tuple[Store, ...]
    finishings: tuple[Finishing, ...]
    heads: Heads | None = None
    joined: tuple[int, ...] = ()  # not empty: the terms are not summed but lie side by side, beginning at these columns
    batch: Dim = ()

    def arg(self, name: str) -> Arg:
        return next(a for a in self.args if a.name == name)

    @property
    def kind(self) -> str:
        return "gemm"

    @property
    def lanes(self) -> int:
        return len(self.products)

    @property
    def factors(self) -> tuple[str, ...]:
        """The parameters that are multiplied, each once."""
        return tuple(dict.fromkeys(name for term in self.terms for name in (term.a, *term.b)))

    @property
    def tile_operands(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if o.map is not None)


@dataclass(frozen=True)
class Tile:
    """A tile configuration: TileM x TileN of accumulators, 64 along K, the schedule of its two warp groups, and the
    order in which tiles are computed: ``swizzle`` clusters of them at a time, side by side, ``along`` N or M. The order
    belongs to the launch: the device code knows nothing of it."""

    m: int
    n: int
    schedule: str = "pingpong"  # or "cooperative"
    cluster_m: int = 2
    cluster_n: int = 1
    k: int = 64
    swizzle: int = 8
    along: str = "n"  # or "m"

    @property
    def cost(self) -> int:
        """What a tile costs beside others, in products of one step along K: its area, and something for the rows of A
        and B that it reads from shared memory (fitted to the items of benchmarks/results/2026-12-01-032539)."""
        return self.m * self.n + 8 * (self.m + self.n)

    @property
    def kernel(self) -> str:
        """What its device code is called; ``_c1``: in clusters of one, where others have two below each other."""
        schedule = "" if self.schedule == "pingpong" else "_coop"
        return f"{self.m}x{self.n}{schedule}" + ("" if self.cluster_m == 2 else f"_c{self.cluster_m}")

    @property
    def name(self) -> str:
        """``128x192``; ``128x192_s4``: in groups of 4; ``128x192_s8m``: in groups of 8 along M."""
        usual = (self.swizzle, self.along) == ORDERS[0]
        return self.kernel + ("" if usual else f"_s{self.swizzle}" + ("m" if self.along == "m" else ""))

    @property
    def slab_rows(self) -> int:
        """Rows of the tile that one warp group's accumulators cover in one slab."""
        return 64 if self.schedule == "pingpong" else 128


ORDERS = ((8, "n"), (4, "n"), (8, "m"))  # of tiles, as (swizzle, along); the first is the default
TILES = (Tile(128, 128), Tile(128, 160), Tile(128, 192), Tile(128, 256, "cooperative"), Tile(192, 128))


@dataclass(frozen=True)
class Variant:
    """A plan at one tile: a kernel of the artifact. ``chunk`` is the columns (of one lane) of an operand chunk.

    ``symbol`` is the kernel's name in the cubin. Every kernel is launched with 384 threads and ``SHARED_BYTES``.
    """

    plan: Plan
    tile: Tile
    symbol: str

    @property
    def columns(self) -> int:
        """Columns of one lane in a tile."""
        return self.tile.n // self.plan.lanes

    @property
    def chunk(self) -> int:
        """Columns of an operand chunk: a TMA box of slab_rows x chunk elements, at most 128 bytes wide."""
        widest = max((o.dtype.bytes for o in self.plan.tile_operands), default=2)
        return 64 if widest == 2 and self.columns % 64 == 0 and self.tile.schedule == "pingpong" else 32

    def row_partials(self, columns: int) -> int:
        """How many partials a row reduction has: one for each tile column. ``columns``: size of the column dim."""
        return -(-columns // self.columns)

    def column_partials(self, rows: int) -> int:
        """How many partials a column reduction has: one for each band of rows."""
        return -(-rows // BAND)


BAND = 16  # rows that one partial of a column reduction covers: those of a warp
THREADS = 384
SHARED_BYTES = 232448  # all of the opt-in shared memory of an sm_90 multiprocessor: 227 KiB (CUDA programming guide)
