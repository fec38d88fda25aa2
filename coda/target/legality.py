"""``can_lower``: whether given tensors can run on a kernel, asked by CLI, tuner, callable and launcher alike.

``checks(schedule)`` lists everything the kernels of a program ask of its arguments, in the order in which a user would
want to hear it: presence, dtype, rank; then sizes; then memory layout. The reasons behind the layout rules: operands
of the product and [M, N] operands are fetched by TMA, which wants a unit inner stride and 16-byte aligned bases and
row pitches; all index arithmetic beside them is 64-bit. Row kernels take any layout. What lies between kernels is ours,
and always legal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import sympy

from coda.errors import OK, CodaError, Ok, Reason
from coda.ir import Size, dim_size
from coda.target import plan as p
from coda.target.requirements import MAX_RANK, Arg, Binding, Checks, Extent, Kind, Requirement, View, failure
from coda.target.rowplan import OCTET, ROW_THREADS, RowFinishing, RowPlan
from coda.target.schedule import Kernel, Schedule

TMA_ALIGN = 16
TMA_PITCH = 1 << 40  # strides of a tensor map are below this many bytes
INT32 = (1 << 31) - 1
MOST_BATCHES = 1 << 30  # tiles are counted in 32 bits
MAP_COLUMNS = 65535 * 256 * OCTET  # a grid has so many blocks along a row, of so many threads
DESIGN_SMS = 132  # the variant is chosen for this many multiprocessors, so that a program's partial sums, and with
#                   them its bits, do not depend on which Hopper board it runs


def can_lower(
    plan: Kernel | Schedule, tensors: Sequence[Any], tiles: p.Tile | Sequence[p.Tile] = p.TILES[0]
) -> Ok | Reason:
    """Whether the kernels of ``plan`` built for these tiles take these arguments (in ABI order: parameters, then
    outputs; None for absent ones, Python numbers for scalars)."""
    schedule = as_schedule(plan)
    tiles = [tiles] if isinstance(tiles, p.Tile) else tiles
    for gemm in schedule.gemms if len(schedule.steps) == 1 else ():
        for tile in tiles:
            legal = legal_tile(tile, gemm)
            if not legal:
                return legal
    if len(tensors) != len(schedule.args):
        return Reason(argument_count(schedule, len(tensors)))
    views = [View.of(t, arg.dtype) for t, arg in zip(tensors, schedule.args, strict=True)]
    counted = partial_step(schedule)
    variants = [p.Variant(counted, t, "") for t in tiles] if counted else []
    text = failure(Binding(checks(schedule), views, partial_counts(variants)))
    return OK if text is None else Reason(text)


def as_schedule(plan: Kernel | Schedule) -> Schedule:
    return plan if isinstance(plan, Schedule) else Schedule.of(plan)


def legal_tile(tile: p.Tile, plan: p.Plan | None = None) -> Ok | Reason:
    """Only tiles from the proven list are offered (cases B7, B10, M4), for a plan those that fit its operands."""
    known = {(t.m, t.n, t.schedule, t.k): t.name for t in p.TILES}
    if (tile.m, tile.n, tile.schedule, tile.k) not in known:
        return Reason(f"tile {tile.name} is not one of {', '.join(known.values())}")
    if (tile.cluster_m, tile.cluster_n) not in ((1, 1), (2, 1)):
        return Reason(f"cluster {tile.cluster_m}x{tile.cluster_n} is not one of 1x1, 2x1")
    if (tile.swizzle, tile.along) not in p.ORDERS:
        offered = ", ".join(f"{swizzle} along {along.upper()}" for swizzle, along in p.ORDERS)
        return Reason(f"tiles in groups of {tile.swizzle} along {tile.along.upper()}: not one of {offered}")
    strip = plan.heads.strip if plan is not None and plan.heads is not None else None
    if plan is not None and strip is None and any(first % tile.n for first in plan.joined):
        names = ", ".join(term.b[0] for term in plan.terms)
        return Reason(
            f"tile {tile.name} crosses from one weight to the next ({names}): their columns are no multiple of {tile.n}"
        )
    if plan is not None and plan.heads is not None and tile.n % plan.heads.unit:
        what = "strips" if strip else "heads"
        return Reason(f"tile {tile.name} does not hold whole {what} of {plan.heads.unit} columns")
    if strip is not None and tile.n % (strip.run * tile.cluster_m):
        return Reason(f"the blocks of a cluster do not share tile {tile.name} by whole runs of {strip.run} columns")
    return OK


def argument_count(plan: Kernel | Schedule, got: int) -> str:
    names = ", ".join(a.name for a in plan.args)
    return f"'{plan.name}' takes {len(plan.args)} arguments ({names}), got {got}"


def select(variants: Sequence[p.Variant], rows: int, columns: int, batches: int = 1) -> p.Variant:
    """The variant with the least waves x cost of a tile; the first of equals."""

    def cost(variant: p.Variant) -> int:
        tiles = -(-rows // variant.tile.m) * -(-columns // variant.columns) * batches
        return -(-tiles // DESIGN_SMS) * variant.tile.cost

    return min(variants, key=cost)


def partial_counts(variants: Sequence[p.Variant]) -> Callable[[int, int], tuple[int, int]]:
    def counts(rows: int, columns: int) -> tuple[int, int]:
        variant = select(variants, rows, columns)
        return variant.row_partials(columns), variant.column_partials(rows)

    return counts


@lru_cache(maxsize=256)
def checks(plan: Kernel | Schedule) -> Checks:
    """Everything the kernels of a program ask of its arguments."""
    return _Derivation(as_schedule(plan)).derive()


def partial_outputs(plan: Kernel | Schedule) -> dict[str, p.Store]:
    """Outputs that are unfinished reductions: tensors [count, length]."""
    schedule = as_schedule(plan)
    stores = [s for step in schedule.gemms for s in step.stores if s.kind in ("row", "column") and not s.finished]
    args = {a.name for a in schedule.args}
    return {s.arg: s for s in stores if s.arg is not None and s.arg in args}


def partial_step(schedule: Schedule) -> p.Plan | None:
    """The kernel whose unfinished reductions are outputs, if there is one."""
    found = [step for step in schedule.gemms if partial_outputs(step).keys() & partial_outputs(schedule).keys()]
    if len(found) > 1:
        raise CodaError.of(f"'{schedule.name}' returns partial results of several kernels", "return them finished")
    return found[0] if found else None


def counted_partials(plan: Schedule) -> list[tuple[p.Arg, Size]]:
    """The operands that are partial results, with the size that they are parts of where some argument tells it: there
    are no more of them."""
    told = {sympy.sympify(size) for arg in plan.args for size in arg.dims}
    read = [(arg, dim_size(arg.partial.axes)) for arg in plan.args if arg.partial and not arg.is_output]
    return [(arg, size) for arg, size in read if size.is_Integer or size in told]


# {who} and {type} of the argument, {dim}, {extent}, {limit} (the value) and {why} are filled here; the rest when a
# requirement is not met.
_SENTENCES = {
    Kind.PRESENT: "{who} is missing: {type} is not optional",
    Kind.DTYPE: "{who} is {dtype}, the program declares {type}",
    Kind.RANK: "{who} has {got} dims (shape {shape}), the program declares {type}",
    Kind.DIVISIBLE: "{who} has shape {shape}: dim {dim} must be {extent}, not {got}",
    Kind.SIZE: "{who} has shape {shape}: dim {dim} must be {want}{why}",
    Kind.PARTIALS: "{who} has shape {shape}: dim {dim} must be {want}, one partial result for each {why}",
    Kind.COUNT: "{who} has shape {shape}: dim {dim} counts partial results of {why}: there are 1 to {want}",
    Kind.PRODUCT: "{extent} is {want} by the sizes of {why}, but {got} elsewhere",
    Kind.AT_LEAST: "the contracted axis {extent} is empty: there is no product to compute",
    Kind.AT_MOST: "{extent} = {got} is too large: a kernel counts up to {limit}",
    Kind.MULTIPLE: "{extent} = {got} is not a multiple of {limit}, {why}",
    Kind.ALIGNED: "{who} starts {got} bytes past a multiple of {limit}, {why}",
    Kind.UNIT: "{who} has stride {got} along {why} (dim {dim}); TMA reads it with stride 1: pass a contiguous copy",
    Kind.PITCH_BYTES: "{who} has rows {got} bytes apart; TMA needs a multiple of {limit}",
    Kind.PITCH_MIN: "{who} has overlapping rows: {got} elements apart, {want} wide",
    Kind.PITCH_MAX: "{who} has rows {got} bytes apart; TMA takes less than {limit}",
    Kind.SAME_PITCH: "the rows of {who} are {got} elements apart, those of {why} {want}; "
    "one tensor map over both weights needs equal row strides",
    Kind.LANES: "{who} and {why} are {got} bytes apart; "
    "one tensor map over both weights needs a nonzero multiple of 16 below {want}",
    Kind.DISTINCT: "{who} has overlapping elements",
    Kind.APART: "{who} shares memory with {why}",
}


@dataclass
class _Derivation:
    plan: Schedule
    variables: list[Size] = field(default_factory=list)
    found: list[Requirement] = field(default_factory=list)

    def derive(self) -> Checks:
        plan = self.plan
        self.index = {a.name: i for i, a in enumerate(plan.args)}
        self.partials, partial = partial_outputs(plan), partial_step(plan)
        self.parts = {part.name: part.of for part in plan.loop.parts} if plan.loop else {}
        self.factors = {self.parts.get(name, name) for step in plan.gemms for name in step.factors}
        for arg in plan.args:
            self._signature(arg)
        for arg in plan.args:
            self._shape(arg, partial)
        fixed = len(self.variables)
        extents = {size: self._extent(size) for size in sizes_of(plan)}
        self._products(fixed)
        for arg, size in counted_partials(plan):
            self._need(Kind.COUNT, arg, str(arg.partial), dim=0, extent=self._extent(size))
        for step in plan.steps:
            if isinstance(step, p.Plan):
                self._sizes(step)
            else:
                self._row_sizes(step)
        self._layouts()
        self._outputs()
        args = tuple(Arg(a.name, self._is_vector(a)) for a in plan.args)
        names = tuple(_text(v) for v in self.variables)
        counted = partial or plan.steps[0]
        rows, columns = (extents[dim_size(dim)] for dim in (counted.rows, counted.columns))
        return Checks(args, names, tuple(self.found), rows, columns, tuple(extents.items()))

    def _need(
        self, kind: Kind, arg: p.Arg | None = None, why: str = "", sentence: str | None = None, **fields: Any
    ) -> None:
        need = Requirement(kind, sentence or _SENTENCES[kind], self.index[arg.name] if arg else 0, **fields)
        words = {"dim": str(need.dim), "extent": need.extent.text, "limit": str(need.value), "why": why}
        if arg is not None:
            words |= {"who": _who(arg), "type": self._type(arg)}
        text = need.sentence
        for word, value in words.items():
            text = text.replace("{" + word + "}", value)
        self.found.append(replace(need, sentence=text))

    # -- presence, dtype, rank --

    def _signature(self, arg: p.Arg) -> None:
        if not arg.optional and arg.default is None:
            self._need(Kind.PRESENT, arg)
        code, bits = arg.dtype.dlpack
        self._need(Kind.DTYPE, arg, value=code << 8 | bits)
        self._need(Kind.RANK, arg, value=self._rank(arg))

    def _rank(self, arg: p.Arg) -> int:
        rank = 2 if arg.partial else len(arg.dims)
        if rank > MAX_RANK:
            raise CodaError.of(f"'{arg.name}' has {rank} dims; a kernel takes up to {MAX_RANK}")
        return rank

    def _type(self, arg: p.Arg) -> str:
        axes = ("partials", *arg.axes) if arg.partial else arg.axes
        return f"{arg.dtype}[{', '.join(axes)}]"

    def _is_vector(self, arg: p.Arg) -> bool:
        """Whether one element may stand for all: the scale that is per tensor in one call, per row in the next."""
        plain = not (arg.is_output or arg.inout or arg.partial)
        plain = plain and arg.name not in (*self.factors, *self.parts.values())
        return plain and len(arg.dims) == 1 and arg.dtype.kind == "float"

    # -- sizes --

    def _extent(self, size: Size) -> Extent:
        """``coefficient * variable + offset``: whatever is left of the size is a variable of its own."""
        offset, rest = sympy.sympify(size).as_coeff_Add()
        coefficient, rest = rest.as_coeff_Mul()
        if rest == 1 or rest == 0:
            value = int(offset + coefficient * rest)
            return Extent(str(value), 0, None, value)
        if not (offset.is_Integer and coefficient.is_Integer and coefficient > 0):
            rest, coefficient, offset = sympy.sympify(size), sympy.Integer(1), sympy.Integer(0)
        if rest not in self.variables:
            self.variables.append(rest)
        return Extent(_text(size), int(coefficient), self.variables.index(rest), int(offset))

    def _whole_extent(self, size: Size) -> Extent:
        """A size as the arguments tell it: what a whole axis meets, each chunk of it meets."""
        return self._extent(self.plan.loop.whole(size) if self.plan.loop else size)

    def _shape(self, arg: p.Arg, partial: p.Plan | None) -> None:
        store = self.partials.get(arg.name)
        if store is None or partial is None:
            for dim, size in enumerate(arg.dims, bool(arg.partial)):
                self._dim(arg, dim, self._extent(size))
            return
        row = store.kind == "row"
        self._dim(arg, 1, self._extent(dim_size(partial.rows if row else partial.columns)))
        self._need(Kind.PARTIALS, arg, "tile column" if row else "band of 16 rows", dim=0, value=0 if row else 1)

    def _dim(self, arg: p.Arg, dim: int, extent: Extent) -> None:
        if extent.variable is None:
            return self._need(Kind.SIZE, arg, dim=dim, extent=extent)
        if extent.coefficient > 1 or extent.offset:
            self._need(Kind.DIVISIBLE, arg, dim=dim, extent=extent)
        return self._need(Kind.SIZE, arg, f" ({extent.text}, fixed by '{{by}}')", dim=dim, extent=extent)

    def _products(self, fixed: int) -> None:
        """A variable like B*T must be the product of B and T where those are sizes of dims, too. Where no argument has
        it, it is given by them, or B by the other two: the first ``fixed`` variables are those of arguments."""
        given = self.variables[:fixed]
        for index, variable in enumerate(self.variables):
            factors = _factors(variable, [v for v in given if v != variable])
            if factors:
                self._product(variable, factors)
            elif index >= fixed and not (self.plan.loop and variable == self.plan.loop.part.size):
                found = _quotient(variable, given)
                if found is None:
                    which = f"'{self.plan.name}': the size {_text(variable)}"
                    hint = "declare its size, as in (B T=128), or pass a tensor with each axis as a dim of its own"
                    raise CodaError.of(f"{which} does not follow from the shapes of the arguments", hint)
                product, factors = found
                known = "*".join(map(_text, factors[1:]))
                self._product(product, factors, f"{{extent}} = {{got}} is not a multiple of {known} = {{want}}")

    def _product(self, variable: Size, factors: Sequence[Size], sentence: str | None = None) -> None:
        mask = sum(1 << self.variables.index(f) for f in factors)
        index = self.variables.index(variable)
        extent = Extent(_text(variable), 1, index)
        why = ", ".join(map(_text, factors))
        self._need(Kind.PRODUCT, why=why, sentence=sentence, dim=index, value=mask, extent=extent)

    def _row_sizes(self, plan: RowPlan) -> None:
        """Rows and columns are counted in 32 bits; a thread holds the sums over rows of all its columns."""
        for part in plan.parts:
            self._need(Kind.AT_MOST, extent=self._whole_extent(dim_size(part.rows)), value=INT32)
            held = bool(part.column_totals) and plan.kind == "row"
            limit = ROW_THREADS * OCTET * plan.variants[-1].octets if held else MAP_COLUMNS
            for space in part.spaces:
                self._need(Kind.AT_MOST, extent=self._whole_extent(dim_size(space)), value=limit)

    def _sizes(self, plan: p.Plan) -> None:
        rows, columns = (self._whole_extent(dim_size(d)) for d in (plan.rows, plan.columns))
        contractions = list(dict.fromkeys(self._whole_extent(dim_size(t.contraction)) for t in plan.terms))
        for extent in contractions:
            self._need(Kind.AT_LEAST, extent=extent, value=1)
        inner = INT32 // len(plan.terms) // 64 * 64  # the kernel counts whole tiles along K, of all terms
        limits = [(rows, INT32), (columns, INT32 // plan.lanes), *((extent, inner) for extent in contractions)]
        if plan.batch:
            counted = [self._whole_extent(size) for size in _of_batches(plan)]
            limits += zip(counted, (MOST_BATCHES, INT32, INT32), strict=True)
        for extent, limit in limits:
            self._need(Kind.AT_MOST, extent=extent, value=limit)
        for term in plan.terms:
            contracted = self._whole_extent(dim_size(term.contraction))
            sides = ((term.a, term.a_at, plan.a_major, rows), (term.b[0], term.b_at, plan.b_major, columns))
            for name, at, major, others in sides:
                if at is not None and at[0] == len(plan.arg(name).dims) - 1:
                    why = f"as the batches of '{name}' start at multiples of {TMA_ALIGN} bytes"
                    extent = contracted if major is p.Major.K else others
                    self._need(Kind.MULTIPLE, why=why, extent=extent, value=TMA_ALIGN // plan.arg(name).dtype.bytes)
        if any(store.kind == "each" for store in plan.stores):
            self._need(Kind.AT_LEAST, extent=columns, value=1)
        if plan.lanes == 2:
            self._need(Kind.MULTIPLE, why="the columns paired at a time", extent=columns, value=8)
        for operand in plan.tile_operands:
            step = TMA_ALIGN // operand.dtype.bytes
            if operand.lanes is p.Lanes.OUTER and step > 8:
                why = f"as the halves of '{operand.arg}' start at multiples of {TMA_ALIGN} bytes"
                self._need(Kind.MULTIPLE, why=why, extent=columns, value=step)
            if operand.batch_dim is not None and operand.batch_dim == operand.column_dim:
                why = f"as the batches of '{operand.arg}' start at multiples of {TMA_ALIGN} bytes"
                self._need(Kind.MULTIPLE, why=why, extent=columns, value=step)

    # -- layout --

    def _layouts(self) -> None:
        read: dict[str, _Read] = {}
        for step in self.plan.gemms:
            for tensor, found in _read_by_tma(step).items():
                name = self.parts.get(tensor, tensor)
                read[name] = replace(found, limit=min(found.limit, read.get(name, found).limit))
        for arg in self.plan.args:
            if arg.name in read:
                self._tma(arg, read[arg.name])
            elif arg.dtype.bytes > 1:
                self._need(Kind.ALIGNED, arg, "its element size", value=arg.dtype.bytes)
        for step in self.plan.gemms:
            weights = [self.parts.get(name, name) for name in step.terms[0].b]
            if len(weights) == 2 and set(weights) <= self.index.keys():
                first, second = map(self.plan.arg, weights)
                rows = len(first.dims) - 2
                self._need(Kind.SAME_PITCH, first, _who(second), dim=rows, other=self.index[second.name])
                if step.batch:
                    sentence = _SENTENCES[Kind.SAME_PITCH].replace("rows", "batches").replace("row", "batch")
                    self._need(Kind.SAME_PITCH, first, _who(second), sentence, other=self.index[second.name])
                self._need(Kind.LANES, first, _who(second), other=self.index[second.name])

    def _tma(self, arg: p.Arg, read: _Read) -> None:
        self._need(Kind.UNIT, arg, arg.axes[read.column], dim=read.column)
        self._need(Kind.ALIGNED, arg, "as TMA needs", value=TMA_ALIGN)
        for what, dim, limit in (("rows", read.row, read.limit), ("batches", read.batch, TMA_PITCH)):
            if dim is None:
                continue
            for kind, value in ((Kind.PITCH_BYTES, TMA_ALIGN), (Kind.PITCH_MIN, 0), (Kind.PITCH_MAX, limit)):
                other = read.column if kind is Kind.PITCH_MIN else 0
                sentence = _SENTENCES[kind].replace("rows", what)
                self._need(kind, arg, sentence=sentence, dim=dim, other=other, value=value)

    def _table(self, arg: p.Arg, pair: int) -> None:
        """A table that is gathered from: never empty, its rows read in aligned pairs."""
        empty, apart = (
            "{who} has no rows to select from",
            "{who} has rows {got} bytes apart, not a multiple of {limit}, ",
        )
        self._need(Kind.AT_LEAST, arg, sentence=empty, extent=self._extent(arg.dims[0]), value=1)
        self._need(Kind.UNIT, arg, sentence="{who} has stride {got} along its columns (dim {dim}), not 1", dim=1)
        why = "as pairs of columns are read"
        self._need(Kind.ALIGNED, arg, why, value=pair)
        self._need(Kind.PITCH_BYTES, arg, why, sentence=apart + "{why}", dim=0, value=pair)

    def _outputs(self) -> None:
        """What is written overlaps neither itself, nor anything else that is written or read."""
        for index, output in enumerate(self.plan.args):
            if not output.is_written:
                continue
            self._need(Kind.DISTINCT, output)
            for other, peer in enumerate(self.plan.args):
                if other == index or (other > index and peer.is_written):  # told once, of the later one
                    continue
                in_place = self._in_place(output, peer)
                why = _who(peer) + (" without being the same tensor" if in_place else "")
                self._need(Kind.APART, output, why, other=other, value=int(in_place))

    def _in_place(self, output: p.Arg, operand: p.Arg) -> bool:
        """Whether the output may be the operand: each element is read just before it is overwritten, by one thread."""
        steps = [s for s in self.plan.steps if any(a.name in (output.name, operand.name) for a in s.args)]
        if len(steps) != 1:
            return False
        plan = steps[0]
        if isinstance(plan, RowPlan):
            return _in_place_rows(plan, output.name, operand.name)
        stores = [s for s in plan.stores if s.arg == output.name and s.kind == "tile"]
        reads = [o for o in plan.operands if o.arg == operand.name]
        if len(stores) != 1 or len(reads) != 1 or operand.is_written or operand.name in plan.factors:
            return False
        if any(o.arg == operand.name for f in plan.finishings for o in f.operands):
            return False
        (store,), (read,) = stores, reads
        places = [(x.batch_dim, x.row_dim, x.column_dim, x.lanes) for x in (store, read)]
        return places[0] == places[1]


@dataclass(frozen=True)
class _Read:
    """How TMA reads a tensor: its dims, and the limit of the pitch of its rows in bytes."""

    row: int
    column: int
    batch: int | None = None
    limit: int = TMA_PITCH


def _read_by_tma(plan: p.Plan) -> dict[str, _Read]:
    """What a GEMM reads through TMA."""
    weight_rows = 1 if plan.lanes == 1 else 16  # the map over paired weights steps up to 16 rows at a time
    read: dict[str, _Read] = {}
    for term in plan.terms:
        read[term.a] = _factor(plan, term.a, term.a_at)
        read |= {b: replace(_factor(plan, b, term.b_at), limit=TMA_PITCH // weight_rows) for b in term.b}
    for o in plan.tile_operands:
        own = o.batch_dim not in (o.row_dim, o.column_dim)  # else it follows from the dim it shares
        read.setdefault(o.arg, _Read(o.row_dim or 0, o.column_dim or 0, o.batch_dim if own else None))
    return read


def _factor(plan: p.Plan, name: str, at: tuple[int, int] | None) -> _Read:
    """How an operand of the product is read."""
    last = len(plan.arg(name).dims) - 1
    batch, row = at or (0 if plan.batch else None, last - 1)
    return _Read(row, last, None if batch in (row, last) else batch)


def _of_batches(plan: p.Plan) -> list[Size]:
    """What is counted over all batches: these, rows and columns."""
    return [dim_size((*plan.batch, *dim)) for dim in ((), plan.rows, plan.columns)]


def _in_place_rows(plan: RowPlan, output: str, operand: str) -> bool:
    """Whether a row kernel reads an operand only where, and just before, it stores the output."""
    if any(o.arg == operand for f in plan.finishings for o in f.operands):
        return False
    stored, found = set(), set()
    for part in plan.parts:
        places = [(part, access.levels, access.column, access.offsets) for access in part.accesses]
        stored |= {(places[w.access], w.space) for w in part.writings if part.accesses[w.access].arg == output}
        reads = [r for r in part.readings if part.accesses[r.access].arg == operand]
        if any(part.accesses[r.access].gather is not None or r.space is None for r in reads):
            return False
        found |= {(places[r.access], r.space) for r in reads}
    return bool(stored) and found <= stored


def sizes_of(plan: Schedule) -> list[Size]:
    """The sizes that kernels are told, beside those of arguments."""
    sizes: list[Size] = []
    for step in plan.steps:
        sizes += [dim_size(step.rows), dim_size(step.columns)]
        sizes += [o.size for f in step.finishings for o in f.operands if o.size is not None]
        if isinstance(step, p.Plan):
            sizes += [dim_size(term.contraction) for term in step.terms]
            sizes += _of_batches(step) if step.batch else []
            sizes += [o.size for o in step.operands if o.size is not None]
            continue
        sizes += _row_sizes(step)
    sizes += [size for t in plan.temporaries for size in t.dims]
    sizes += [size for _, size in counted_partials(plan)]
    sizes += [plan.loop.axis.size, plan.loop.part.size] if plan.loop else []
    return list(dict.fromkeys(map(sympy.sympify, sizes)))


def _row_sizes(plan: RowPlan) -> list[Size]:
    """The sizes that a row kernel and its finish kernels are told."""
    sizes = [size for p in plan.partials for size in (p.length, p.count)]
    accesses = [a for part in plan.parts for a in part.accesses]
    for part in plan.parts:
        sizes += map(dim_size, (part.rows, part.groups, *part.levels, *part.spaces))
    for finishing in plan.finishings:
        assert isinstance(finishing, RowFinishing)
        sizes.append(finishing.inner)
        accesses += finishing.accesses
    for access in accesses:
        strides = [s for s in (*access.levels, access.column) if s is not None]
        sizes += [s.scale for s in strides] + [elements for _, elements in access.offsets]
        sizes += [access.gather[0].scale, access.gather[1]] if access.gather else []
        sizes += [access.size] if access.size is not None else []
    return sizes


def _factors(variable: Size, others: Sequence[Size]) -> tuple[Size, ...] | None:
    """Two or more of the others whose product is the variable; None where there are none."""
    if not variable.is_Mul:
        return None
    for i, other in enumerate(others):
        rest, divisor = sympy.fraction(sympy.cancel(variable / other))
        if divisor != 1 or rest == 1:
            continue
        if rest in others[i + 1 :]:
            return other, rest
        if (more := _factors(rest, others[i + 1 :])) is not None:
            return other, *more
    return None


def _quotient(variable: Size, given: Sequence[Size]) -> tuple[Size, tuple[Size, ...]] | None:
    """A given size that is the variable times other given ones, and all its factors."""
    for product in given:
        rest, divisor = sympy.fraction(sympy.cancel(product / variable))
        if divisor != 1 or rest == 1:
            continue
        factors = (rest,) if rest in given else _factors(rest, given)
        if factors:
            return product, (variable, *factors)
    return None


def _who(arg: p.Arg) -> str:
    return f"{'output' if arg.is_output else 'operand'} '{arg.name}'"


def _text(size: Size) -> str:
    return str(size).replace(" ", "")
