"""The tables of a row or map kernel, for templates/host/rows.h."""

from __future__ import annotations

from collections.abc import Iterable

from coda.build.tables import Tables, absent, table
from coda.errors import CodaError
from coda.ir import Size, dim_size
from coda.target.rowplan import MAX_LEVELS, Access, RowPlan, Stride

MAX_OFFSETS, MAX_SPACES = 3, 4  # kMaxOffsets, kMaxSpaces of tables.h
NONE = "{-1, {0, -1, 0}}"


def row_tables(context: Tables, plan: RowPlan) -> list[str]:
    if len(plan.spaces) > MAX_SPACES:
        raise CodaError.of(f"'{plan.name}' cuts its columns into {len(plan.spaces)} parts; a kernel has {MAX_SPACES}")
    slots = {total.access: slot for slot, total in enumerate(plan.totals)}
    octets = {r.access for r in plan.readings if r.space is not None}
    octets |= {w.access for w in plan.writings if w.space is not None}
    rows = (_access(context, plan, a, i in octets, slots.get(i, -1)) for i, a in enumerate(plan.accesses))
    variants = (f"{{{context.kernel(v.symbol)}, {v.octets}, {_bool(v.vector)}}}" for v in plan.variants)
    fields = [
        f"{_extents(context, map(dim_size, plan.levels))}, {len(plan.levels)}",
        f"{_extents(context, map(dim_size, plan.spaces))}, {len(plan.spaces)}",
        "CODA_TABLE(accesses), CODA_TABLE(variants)",
        f"{_bool(plan.kind == 'map')}, {_bool(bool(plan.totals))}",
    ]
    return [
        table("RowAccess", "accesses", rows),
        table("RowVariant", "variants", variants),
        "constexpr RowKernel row = {" + ", ".join(fields) + "};",
    ]


def row_launch(plan: RowPlan) -> str:
    return f"launch_rows<{len(plan.levels)}, {len(plan.spaces)}, {len(plan.accesses)}>"


def _access(context: Tables, plan: RowPlan, access: Access, octets: bool, slot: int) -> str:
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
        f"{number}, {integer}, {slot}",
    ]
    return "{" + ", ".join(fields) + "}" + (f"  /* {access.arg} */" if access.arg else "")


def _stride(context: Tables, stride: Stride | None) -> str:
    return NONE if stride is None else f"{{{stride.dim}, {context.extent(stride.scale)}}}"


def _padded(rows: list[str], count: int) -> str:
    return "{" + ", ".join(rows + [NONE] * (count - len(rows))) + "}"


def _extents(context: Tables, sizes: Iterable[Size]) -> str:
    return "{" + ", ".join(map(context.extent, sizes)) + "}"


def _bool(value: bool) -> str:
    return str(value).lower()
