"""A row plan for people: what a row or map kernel reads, reduces and stores."""

from __future__ import annotations

from collections.abc import Iterable

from coda.cli.common import table
from coda.ir import Axis, Node
from coda.target.loops import is_leaf
from coda.target.rowplan import Access, Reading, RowPart, RowPlan, Writing

GRIDS = {"row": "a team of threads owns a row", "map": "elementwise"}


def document(plan: RowPlan) -> dict:
    """The plan as JSON."""
    return {
        "name": plan.name,
        "kind": plan.kind,
        "launches": 1 + len(plan.finishings),
        "parts": [_part(part) for part in plan.parts],
        "finishes": [{"kind": f.kind, "outputs": [name for _, name, _ in f.results]} for f in plan.finishings],
    }


def _part(part: RowPart) -> dict:
    named = [(part.accesses[r.access], r) for r in _read(part)]
    return {
        "rows": [_names(level) for level in part.levels],
        "columns": [_names(space) for space in part.spaces],
        "reads": [{"name": a.arg, "dtype": a.dtype.name, "space": _space(r)} for a, r in named],
        "reduces": [[_reduction(n) for n in stage] for stage in part.stages],
        "stores": [
            {"output": part.accesses[w.access].arg, "kind": "row" if w.space is None else "tile"} for w in _stored(part)
        ],
    }


def text(plan: RowPlan) -> list[str]:
    """The plan as lines."""
    launches = 1 + len(plan.finishings)
    count = "one launch" if launches == 1 else f"{launches} launches"
    rows: list[tuple[str, str, str]] = []
    for part in plan.parts:
        loops = f"rows ({_names(part.rows)}), columns {', '.join(f'({_names(s)})' for s in part.spaces)}"
        first = f"{GRIDS[plan.kind]}, {count}" if not rows else "in the same launch"
        rows += [("kernel" if not rows else "and", f"{plan.kind}: {loops}", first), *_lines(plan, part)]
    for finishing in plan.finishings:
        names = dict.fromkeys(name for _, name, _ in finishing.results)
        outputs = ", ".join(_typed(plan, _of(plan, name)) for name in names)
        rows.append(("finishes", outputs, "from the partials"))
    return table(rows).splitlines()


def _lines(plan: RowPlan, part: RowPart) -> list[tuple[str, str, str]]:
    rows = [("reads", _typed(plan, part.accesses[r.access]), _how(r)) for r in _read(part)]
    for number, stage in enumerate(part.stages, 1):
        rows.append(("reduces", ", ".join(map(_reduction, stage)), f"stage {number}"))
    for w in _stored(part):
        where = "for each row" if w.space is None else "for each element"
        rows.append(("stores", _typed(plan, part.accesses[w.access]), where))
    rows += [("adds up", _reduction(t.reduction), "over the rows of a block") for t in part.totals]
    rows += [("leaves", f"partials of ({_names(w.value.type.axes)})", "for each row") for w in _unfinished(part)]
    return list(dict.fromkeys(rows))


def _read(part: RowPart) -> list[Reading]:
    return [r for r in part.readings if is_leaf(r.leaf)]


def _stored(part: RowPart) -> list[Writing]:
    return [w for w in part.writings if part.accesses[w.access].slot is None]


def _unfinished(part: RowPart) -> list[Writing]:
    return [w for w in part.writings if part.accesses[w.access].slot is not None]


def _names(axes: Iterable[Axis]) -> str:
    return " ".join(a.name for a in axes)


def _reduction(node: Node) -> str:
    return f"{node.op.removeprefix('reduce_')} over ({' '.join(node.attr('axes'))})"


def _space(r: Reading) -> str:
    if r.space is None:
        return "row" if r.varies else "uniform"
    return "tile" if r.varies else "column"


def _how(r: Reading) -> str:
    where = {"uniform": "one value", "row": "for each row", "column": "for each column", "tile": "for each element"}
    return where[_space(r)] + (", at a position of the row" if r.index is not None else "")


def _of(plan: RowPlan, name: str) -> Access:
    return Access(name, plan.arg(name).dtype)


def _typed(plan: RowPlan, access: Access) -> str:
    return plan.arg(access.arg or "").text
