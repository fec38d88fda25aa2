"""The drawings of ``coda explain --svg``: valid, complete, nothing overlaps, arrows pass between the boxes."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from coda.cli import main
from coda.cli.explain import explain
from coda.cli.layout import layered
from coda.cli.request import Request
from coda.cli.svg import after, before, svg
from coda.frontend import load_path
from tests.unit.test_explain import BLOCKS, EXAMPLES, LLAMA, SIZES

NAMESPACE = "{http://www.w3.org/2000/svg}"


def report(name: str):
    program = BLOCKS[name]
    symbols = {s.name for a in program.axes for s in a.size.free_symbols}
    return explain(Request(program, {n: s for n, s in SIZES.items() if n in symbols}), backward=True)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_drawn_whole(name):
    drawn = report(name)
    root = ElementTree.fromstring(svg([drawn]))
    texts = [t.text or "" for t in root.iter(f"{NAMESPACE}text")]
    boxes = [tuple(float(r.get(k)) for k in ("x", "y", "width", "height"))
             for r in root.iter(f"{NAMESPACE}rect") if r.get("rx")]  # fmt: skip
    for (x, y, w, h), (u, v, s, t) in combinations(boxes, 2):
        assert x + w <= u or u + s <= x or y + h <= v or v + t <= y
    width, height = (float(root.get(k)) for k in ("width", "height"))
    assert all(x >= 0 and y >= 0 and x + w <= width + 1 and y + h <= height + 1 for x, y, w, h in boxes)
    for side in drawn.sides:
        for launch in side.launches:
            assert f"{launch.kind}: {launch.name}" in texts
            for tensor in (*launch.reads, *launch.writes):
                assert any(text.startswith(f"{tensor.name}: {tensor.type}") for text in texts), tensor
        inside = "".join(texts).replace(" ", "")
        assert all(line.replace(" ", "") in inside for launch in side.launches for line in launch.statements)
        before_nodes, _ = before(side)
        assert sum(node.kind is not None for node in before_nodes.values()) == len(
            [n for n in side.program.nodes() if n in before_nodes]
        )


@pytest.mark.parametrize("name", ["llama3_mlp", "gemma2_mlp", "vit_mlp"])
def test_labels_do_not_overlap_and_arrows_avoid_boxes(name):
    for side in report(name).sides:
        for nodes, edges in (before(side), after(side)):
            layout = layered({key: node.size for key, node in nodes.items()}, edges)
            assert layout.places.keys() == nodes.keys() and set(layout.arrows) == set(edges)
            spans = {key: (x, y, *nodes[key].size) for key, (x, y) in layout.places.items()}
            for (x, y, w, h), (u, v, s, t) in combinations(spans.values(), 2):
                assert abs(x - u) >= (w + s) / 2 or abs(y - v) >= (h + t) / 2
            for (a, b), points in layout.arrows.items():
                heights = [y for _, y in points]
                assert heights == sorted(heights)  # arrows run down
                for key, (x, y, w, h) in spans.items():
                    if key not in (a, b):
                        assert not any(abs(px - x) < w / 2 and abs(py - y) < h / 2 for px, py in points), (a, b, key)


def test_a_layer_runs_down_through_its_opaque_call():
    """Segments use names again; each reads what was written before it."""
    program = load_path(EXAMPLES / "llama3_layer.coda", {"HQ": 4, "HK": 2, "f": 32}).programs["llama3_layer"]
    sizes = {n: SIZES[n] for n in ("B", "T", "D", "F", "P")}
    for side in explain(Request(program, sizes), backward=True).sides:
        nodes, edges = after(side)
        layout = layered({key: node.size for key, node in nodes.items()}, edges)
        tops = [layout.places[launch.name][1] for launch in side.launches]
        call = next(i for i, x in enumerate(side.launches) if x.kind == "opaque")
        assert max(tops[:call]) > tops[0] and tops[call] < max(tops[call + 1 :])
        assert all(layout.places[a][1] < layout.places[b][1] for a, b in edges)


def test_a_program_without_kernels_shows_why(tmp_path, capsys):
    source, path = tmp_path / "pool.coda", tmp_path / "pool.svg"
    source.write_text("program pool(x: i64[B, T, D]) {\n    return sum(x, T): i64\n}\n")
    assert main(["explain", str(source), "--svg", str(path)]) == 0
    text = path.read_text()
    assert "not lowered" in text and "a reduction of integers" in text
    ElementTree.fromstring(text)


def test_the_option_writes_a_file(tmp_path, capsys):
    path = tmp_path / "llama.svg"
    sizes = "M=8192,D=4096,A=4096,F=14336"
    assert main(["explain", LLAMA, "--program", "llama3_mlp", "--dims", sizes, "--svg", str(path)]) == 0
    capsys.readouterr()
    text = path.read_text()
    assert re.search(r"a kernel for each operation \(\d+ launches, 3.5 GB\)", text)
    assert re.search(r"coda \(\d launches, 1.3 GB\)", text) and "w_gate: bf16[F, D] 117.4 MB" in text
    assert main(["explain", LLAMA, "--program", "llama3_mlp", "--svg", str(tmp_path / "no" / "x.svg")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_layout_without_edges_or_nodes():
    assert layered({}, []).width == 0
    layout = layered({"a": (10.0, 10.0), "b": (20.0, 10.0)}, [])
    assert layout.places["a"] != layout.places["b"]
