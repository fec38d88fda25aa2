"""The tables of a row or map kernel, for templates/host/rows.h."""

from __future__ import annotations

from collections.abc import Iterable

from coda.build.tables import Tables, absent, reference, table
from coda.errors import CodaError
from coda.ir import Size, dim_size
from coda.target.rowplan import MAX_LEVELS, Access, Partials, RowFinishing, RowPart, RowPlan, Stride

MAX_OFFSETS, MAX_SPACES = 3, 4  # kMaxOffsets, kMaxSpaces of tables.h
NONE = "{-1, {0, -1, 0}}"


def row_tables(context: Tables, plan: RowPlan) -> list[str]:
    variants = (f"{{{context.kernel(v.symbol)}, {v.octets}, {_bool(v.vector)}}}" for v in plan.variants)
    fields = [
        "CODA_TABLE(parts)",
        reference("partials", plan.partials),
        f"CODA_TABLE(variants), {_bool(plan.kind == 'map')}",
    ]
    return [
        *(_accesses(context, plan, i, part) for i, part in enumerate(plan.parts)),
        table("RowPart", "parts", (_part(context, plan, i, part) for i, part in enumerate(plan.parts))),
        table("RowPartials", "partials", (_partials(context, p) for p in plan.partials)),
        table("RowVariant", "variants", variants),
        "constexpr RowKernel row = {" + ", ".join(fields) + "};",
    ]


def row_launch(plan: RowPlan) -> str:
    counts = ((part.levels, part.spaces, part.accesses) for part in plan.parts)
    return f"launch_rows<{', '.join(f'coda::Rows<{len(x)}, {len(y)}, {len(z)}>' for x, y, z in counts)}>"


def finish_accesses(context: Tables, plan: RowPlan, finishing: RowFinishing) -> str:
    """How the operands and results of a finish kernel lie."""
    rows = (_access(context, plan, a, False) for a in finishing.accesses)
    return table("RowAccess", f"{finishing.label}_accesses", rows)


def _part(context: Tables, plan: RowPlan, i: int, part: RowPart) -> str:
    if len(part.spaces) > MAX_SPACES:
        raise CodaError.of(f"'{plan.name}' cuts its columns into {len(part.spaces)} parts; a kernel has {MAX_SPACES}")
    fields = [
        f"{_extents(context, map(dim_size, part.levels))}, {len(part.levels)}",
        f"{_extents(context, map(dim_size, part.spaces))}, {len(part.spaces)}",
        f"CODA_TABLE(accesses{i})",
        f"{context.extent(dim_size(part.rows))}, {context.extent(dim_size(part.groups))}, {_bool(bool(part.totals))}",
    ]
    return "{" + ", ".join(fields) + "}"


def _accesses(context: Tables, plan: RowPlan, i: int, part: RowPart) -> str:
    octets = {r.access for r in part.readings if r.space is not None}
    octets |= {w.access for w in part.writings if w.space is not None}
    rows = (_access(context, plan, a, k in octets) for k, a in enumerate(part.accesses))
    return table("RowAccess", f"accesses{i}", rows)


def _partials(context: Tables, p: Partials) -> str:
    sizes = f"{context.extent(p.length)}, {context.extent(p.count)}"
    return f"{{{p.part}, {sizes}, {_bool(p.blocks)}, {_bool(p.kept)}}}"


def _access(context: Tables, plan: RowPlan, access: Access, octets: bool) -> str:
    number, integer = "0.0f", 0
    if access.arg is not None:
        number, integer = absent(plan.arg(access.arg), access.identity)
    if len(access.offsets) > MAX_OFFSETS:
        raise CodaError.of(f"'{access.arg}' is cut {len(access.offsets)} times; a kernel takes {MAX_OFFSETS}")
    offsets = [f"{{{dim}, {context.extent(elements)}}}" for dim, elements in access.offsets]
    levels = [_stride(context, s) for s in access.levels]
    size = access.gather[1] if access.gather else access.size
    fields = [
        str(-1 if access.arg is None else context.index(access.arg)),
        _bool(octets),
        _padded(levels, MAX_LEVELS),
        _stride(context, access.column),
        _padded(offsets, MAX_OFFSETS),
        _stride(context, access.gather[0] if access.gather else None),
        context.extent(size) if size is not None else "{0, -1, 0}",
        f"{number}, {integer}, {-1 if access.slot is None else access.slot}, {_bool(access.partial is not None)}",
    ]
    return "{" + ", ".join(fields) + "}" + (f"  /* {access.arg} */" if access.arg else "")


def _stride(context: Tables, stride: Stride | None) -> str:
    if stride is None:
        return NONE
    return f"{{{-2 if stride.dim is None else stride.dim}, {context.extent(stride.scale)}}}"


def _padded(rows: list[str], count: int) -> str:
    return "{" + ", ".join(rows + [NONE] * (count - len(rows))) + "}"


def _extents(context: Tables, sizes: Iterable[Size]) -> str:
    return "{" + ", ".join(map(context.extent, sizes)) + "}"


def _bool(value: bool) -> str:
    return str(value).lower()
