"""``coda explain --svg``: a program before and after, side by side, as a drawing that any browser shows.

Left a kernel for each operation, right the kernels that coda makes, with the operations fused into them. A tensor is an
arrow with its name and bytes on it. Parameters come in without a box, results leave without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from coda.cli.common import human_bytes
from coda.cli.launches import FREE, Tensor, known
from coda.cli.layout import Layout, layered
from coda.cli.report import Report, Side
from coda.cost import stored_bytes
from coda.ir import Node, Size

CHARACTER, LINE, PADDING = 6.7, 15.0, 8.0  # of the text, in pixels
LONGEST = 64  # characters of a line
MARGIN, BETWEEN = 24.0, 60.0
TITLE = 22.0
COLOURS = {"gemm": "#dbe9ff", "row": "#ffe8c7", "map": "#ececec", "finish": "#e0f2d9", "opaque": "#f0ddf5"}
STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1c1c1c; }
.title { font-size: 14px; font-weight: bold; }
.head { font-weight: bold; }
.tensor { fill: #35507a; }
rect { stroke: #55606e; stroke-width: 1; }
path { fill: none; stroke: #7a8796; stroke-width: 1.1; }
"""


@dataclass(frozen=True)
class Drawn:
    """A node of the drawing: a kernel with ``kind``, or a tensor's label without."""

    lines: tuple[str, ...]
    kind: str | None = None

    @property
    def size(self) -> tuple[float, float]:
        pad = PADDING if self.kind else 2.0
        return max(map(len, self.lines)) * CHARACTER + 2 * pad, len(self.lines) * LINE + 2 * pad


Graph = tuple[dict[object, Drawn], list[tuple[object, object]]]


def svg(reports: Sequence[Report]) -> str:
    """The drawing of reports, one below the other, and of each forward and backward."""
    parts: list[str] = []
    top, right = MARGIN, 0.0
    for report, side in ((r, side) for r in reports for side in r.sides):
        left, height = MARGIN, 0.0
        sizes = ", ".join(f"{n}={s}" for n, s in report.dims.items())
        name = side.program.name + (f" at {sizes}" if sizes else "")
        drawings = (f"{name}: {_before_title(side)}", before(side)), (_after_title(side), after(side))
        for title, (nodes, edges) in drawings:
            layout = layered({key: node.size for key, node in nodes.items()}, edges)
            parts += [f'<text class="title" x="{left:.1f}" y="{top:.1f}">{escape(title)}</text>']
            parts += _draw(nodes, layout, left, top + TITLE)
            left += max(layout.width, len(title) * 8.6) + BETWEEN
            height = max(height, layout.height)
        top, right = top + TITLE + height + BETWEEN, max(right, left)
    width, height = right - BETWEEN + MARGIN, top - BETWEEN + MARGIN
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0.5 L7.5,4 L0,7.5 z" style="fill:#7a8796;stroke:none"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.1f} {height:.1f}">'
    )
    body = [head, f"<style>{STYLE}</style>", marker, '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>']
    return "\n".join([*body, *parts, "</svg>"]) + "\n"


def _before_title(side: Side) -> str:
    count = sum(n.op not in FREE for n in side.program.nodes())
    return f"a kernel for each operation ({count} launches, {_amount(side.formulas.one_by_one, side.sizes)})"


def _after_title(side: Side) -> str:
    if not side.launches:
        return "not lowered"
    moved = side.moved()
    return f"coda ({side.count().total()} launches{'' if moved is None else f', {human_bytes(moved)}'})"


def before(side: Side) -> Graph:
    """A kernel for each operation: what only renames is passed through."""
    program = side.program
    nodes: dict[object, Drawn] = {}
    edges: list[tuple[object, object]] = []
    names, moved = dict(program.names), stored_bytes(program)
    results = {o.value: o.into or o.name for o in program.outputs}

    def tensor(node: Node) -> Node:
        """The node whose result is read: behind what only renames."""
        while node.op in FREE - {"input"} and node.args:
            node = node.args[0]
        return node

    named = {tensor(n): name for n, name in [*names.items(), *results.items()]}

    def label(node: Node) -> object:
        key = ("tensor", node)
        if key not in nodes:
            name = node.attr("name") if node.op == "input" else named.get(node, "")
            nodes[key] = Drawn((f"{name} {_amount(moved[node], side.sizes)}".strip(),))
            if node.op != "input":
                edges.append((node, key))
        return key

    for node in program.nodes():
        if node.op not in FREE:
            name = named.get(node)
            operation = "@" if node.op == "dot" else node.op.removeprefix("reduce_")
            text = f"{name} = {operation}" if name else operation
            nodes[node] = Drawn((text,), "gemm" if node.op == "dot" else "map")
            read = (tensor(a) for a in dict.fromkeys(node.args))
            edges += [(label(a), node) for a in read if a.op == "input" or a.op not in FREE]
    for value in results:
        if tensor(value).op not in FREE:
            label(tensor(value))
    return nodes, edges


def after(side: Side) -> Graph:
    """The launches, with the operations fused into each."""
    nodes: dict[object, Drawn] = {}
    edges: list[tuple[object, object]] = []
    if side.reason is not None:
        nodes["reason"] = Drawn(tuple(_wrapped(side.reason.diagnostics[0].message)), "opaque")
    for launch in side.launches:
        lines = [line for text in launch.statements for line in _wrapped(text)]
        nodes[launch.name] = Drawn((f"{launch.kind}: {launch.name}", *lines), launch.kind)
    made: dict[str, object] = {}  # by the launches so far: segments may use a name again
    for launch in side.launches:
        for tensor in launch.reads:
            source = made.get(tensor.name, ("tensor", tensor.name))
            nodes.setdefault(source, _label(tensor, side))
            edges.append((source, launch.name))
        for tensor in launch.writes:
            key = ("tensor", tensor.name, launch.name)
            nodes[key] = _label(tensor, side)
            edges.append((launch.name, key))
            made[tensor.name] = key
    return nodes, edges


def _label(tensor: Tensor, side: Side) -> Drawn:
    return Drawn((f"{tensor.name}: {tensor.type} {_amount(tensor.bytes, side.sizes)}".strip(),))


def _amount(size: Size, sizes: Mapping[str, int]) -> str:
    """Bytes as people read them; a formula where sizes are not known, nothing for scalars."""
    count = known(size, sizes)
    return f"{size} B" if count is None else human_bytes(count) if count else ""


def _wrapped(text: str) -> Iterable[str]:
    """A line as several that are not too wide, the rest indented."""
    indent = ""
    while len(indent + text) > LONGEST:
        at = text.rfind(" ", 1, LONGEST - len(indent) + 1)
        at = at if at > 0 else LONGEST - len(indent)
        yield indent + text[:at]
        text, indent = text[at:].lstrip(), "    "
    yield indent + text


def _draw(nodes: Mapping[object, Drawn], layout: Layout[object], left: float, top: float) -> list[str]:
    arrows = [
        f'<path d="{_curve([(x + left, y + top) for x, y in points])}"'
        + (' marker-end="url(#tip)"' if nodes[edge[1]].kind else "")
        + "/>"
        for edge, points in layout.arrows.items()
    ]
    boxes = [line for key, (x, y) in layout.places.items() for line in _node(nodes[key], x + left, y + top)]
    return arrows + boxes


def _node(node: Drawn, x: float, y: float) -> list[str]:
    """A kernel's box with its text, or the label of a tensor, around its middle."""
    width, height = node.size
    first = y - (len(node.lines) - 1) * LINE / 2 + 4.0
    if node.kind is None:
        return [f'<text class="tensor" x="{x:.1f}" y="{first:.1f}" text-anchor="middle">{escape(node.lines[0])}</text>']
    corner = f'x="{x - width / 2:.1f}" y="{y - height / 2:.1f}"'
    box = f'<rect {corner} width="{width:.1f}" height="{height:.1f}" rx="4" fill="{COLOURS[node.kind]}"/>'
    start = x - width / 2 + PADDING
    texts = [
        f'<text{_head(i, node)} x="{start:.1f}" y="{first + i * LINE:.1f}" xml:space="preserve">{escape(line)}</text>'
        for i, line in enumerate(node.lines)
    ]
    return [box, *texts]


def _head(line: int, node: Drawn) -> str:
    return ' class="head"' if line == 0 and len(node.lines) > 1 else ""


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """A path that leaves and reaches each point straight down."""
    (x, y), *rest = points
    parts = [f"M{x:.1f},{y:.1f}"]
    for to_x, to_y in rest:
        middle = (y + to_y) / 2
        parts.append(f"C{x:.1f},{middle:.1f} {to_x:.1f},{middle:.1f} {to_x:.1f},{to_y:.1f}")
        x, y = to_x, to_y
    return " ".join(parts)
