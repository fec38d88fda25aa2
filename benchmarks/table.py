"""Write the tables of measured ratios into README.md, from the JSON files in benchmarks/results.

    python -m benchmarks.table            # rewrite the part between the markers
    python -m benchmarks.table --check    # exit 1 when README.md does not show what the files say

Of each workload and shape the newest run on each device counts; of several tiles the best is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.records import RESULTS, read_all

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- benchmarks: begin (written by benchmarks.table) -->", "<!-- benchmarks: end -->"
NOTHING = "Nothing has been measured yet."
BASELINE = "cublas"
IMPLEMENTATIONS = ("coda", "torch.compile")
PEERS = (
    "coda",
    "coda, graph",
    "coda's dRoPE",
    "coda, torch.compile",
    "quack",
    "coda-kernels",
    "liger",
    "torch.compile",
    "eager",
)

Shape = tuple[int, int, int]
Best = dict[str, dict]  # implementation -> its best row


@dataclass
class Table:
    """What one device says of one phase and dtype: workload and shape -> the newest run's best rows."""

    device: str
    phase: str
    dtype: str
    best: dict[tuple[str, Shape], Best] = field(default_factory=dict)
    dates: set[str] = field(default_factory=set)
    versions: dict[str, str] = field(default_factory=dict)

    def markdown(self) -> str:
        workloads = list(dict.fromkeys(workload for workload, _ in self.best))
        shapes = list(dict.fromkeys(shape for _, shape in self.best))
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        lines = [
            f"{self.device}, {self.phase}, {self.dtype}; {' to '.join(sorted({min(self.dates), max(self.dates)}))}; "
            f"{versions}. Each cell: {' / '.join(IMPLEMENTATIONS)}.",
            "",
            "| M, N, K | cuBLAS, ms | " + " | ".join(workloads) + " |",
            "|---" * (2 + len(workloads)) + "|",
        ]
        for shape in shapes:
            cells = [self._cell(workload, shape) for workload in workloads]
            lines.append("| " + " | ".join([", ".join(map(str, shape)), self._baseline(shape), *cells]) + " |")
        return "\n".join(lines)

    def _cell(self, workload: str, shape: Shape) -> str:
        best = self.best.get((workload, shape), {})
        return " / ".join(f"{best[i]['ratio']:.3f}" if i in best else "-" for i in IMPLEMENTATIONS)

    def _baseline(self, shape: Shape) -> str:
        rows = [best[BASELINE] for (_, s), best in self.best.items() if s == shape and BASELINE in best]
        return f"{rows[0]['median_ms']:.3f}" if rows else "-"


def table(documents: Iterable[dict]) -> str:
    """The markdown for products of any model, given oldest first: a table for each device, phase and dtype."""
    tables: dict[tuple[str, ...], Table] = {}
    for document in documents:
        for (phase, dtype, workload, shape), best in _best_rows(document["rows"]).items():
            key = (document["device"], phase, dtype)
            target = tables.setdefault(key, Table(*key))
            target.best[workload, shape] = best  # a newer run replaces what older ones said
            target.dates.add(document["date"][:10])
            target.versions = document["versions"]
    return "\n\n".join(t.markdown() for t in tables.values()) or NOTHING


def model_table(documents: Iterable[dict]) -> str:
    """The markdown for what belongs to a model, given oldest first: a line for each workload, phase and number of rows,
    the best of each implementation in the newest run."""
    lines: dict[tuple[str, str], dict[tuple[str, str, int], Best]] = {}
    heads: dict[tuple[str, str], str] = {}
    for document in documents:
        found: dict[tuple[str, str], dict[tuple[str, str, int], Best]] = {}
        for row in document["rows"]:
            if row["model"] is not None:
                best = found.setdefault((document["device"], row["model"]), {}).setdefault(
                    (row["workload"], row["phase"], row["M"]), {}
                )
                known = best.setdefault(row["impl"], row)
                best[row["impl"]] = max(known, row, key=lambda r: (r["rounds"], -r["ratio"]))  # few only chose a tile
        for key, measured in found.items():
            lines.setdefault(key, {}).update(measured)  # a newer run replaces what older ones said
            versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
            heads[key] = f"{key[1]} on {key[0]}, bf16; {document['date'][:10]}; {versions}."
    return "\n\n".join(_model(heads[key], lines[key]) for key in lines)


def _model(head: str, lines: dict[tuple[str, str, int], Best]) -> str:
    seen = [impl for impl in PEERS if any(impl in best for best in lines.values())]
    text = [head, "", f"| | M, N, K | products, ms | {' | '.join(seen)} |", "|---" * (3 + len(seen)) + "|"]
    for (workload, phase, rows), best in lines.items():
        any_row = next(iter(best.values()))
        name = f"{workload}, {phase}" if workload == "block" else workload
        shape = ", ".join(str(any_row[n]) for n in "MNK") if any_row["N"] else str(rows)
        bare = f"{best[BASELINE]['median_ms']:.3f}" if BASELINE in best else "-"
        cells = [f"{best[impl]['ratio']:.3f}" if impl in best else "-" for impl in seen]
        text.append("| " + " | ".join([name, shape, bare, *cells]) + " |")
    return "\n".join(text)


def step_table(documents: Iterable[dict]) -> str:
    """The markdown for whole models, from the newest run of each: a line for each way, with all phases."""
    newest = {(d["device"], d["rows"][0]["model"]): d for d in documents}
    return "\n\n".join(map(_steps, newest.values()))


def _steps(document: dict) -> str:
    rows, first = document["rows"], document["rows"][0]
    phases, ways = (list(dict.fromkeys(r[key] for r in rows)) for key in ("phase", "impl"))
    measured = {(r["phase"], r["impl"]): r for r in rows}
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    what = f"{first['model']} of transformers, {first['layers']} layers, {first['tokens']} tokens"
    columns = " | ".join(f"{p}, ms | thousand tokens/s | host, ms | peak, GiB" for p in phases)
    text = [f"{what}, on {document['device']}, bf16; {document['date'][:10]}; {versions}.", ""]
    text += [f"| | {columns} |", "|---" * (1 + 4 * len(phases)) + "|"]
    for way in ways:
        cells = [_step(measured[p, way]) if (p, way) in measured else "- | - | - | -" for p in phases]
        text.append("| " + " | ".join([way, *cells]) + " |")
    return "\n".join(text)


def _step(row: dict) -> str:
    numbers = row["median_ms"], row["tokens_per_s"] / 1e3, row["host_ms"]
    return " | ".join([*(f"{x:.1f}" for x in numbers), f"{row['peak_bytes'] / 2**30:.2f}"])


def _best_rows(rows: Iterable[dict]) -> dict[tuple[str, str, str, Shape], Best]:
    """For each phase, dtype, workload and shape the row with the lowest ratio of each implementation."""
    found: dict[tuple[str, str, str, Shape], Best] = {}
    for row in (r for r in rows if r["model"] is None):
        best = found.setdefault((row["phase"], row["dtype"], row["workload"], (row["M"], row["N"], row["K"])), {})
        if row["impl"] not in best or row["ratio"] < best[row["impl"]]["ratio"]:
            best[row["impl"]] = row
    return found


def splice(page: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with what stands between the markers replaced."""
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when README.md is out of date")
    args = parser.parse_args(argv)
    before = README.read_text()
    documents = read_all()
    steps = step_table(read_all(RESULTS / "models"))
    after = splice(before, "\n\n".join(filter(None, [table(documents), model_table(documents), steps])))
    if args.check:
        if after != before:
            print("README.md is out of date: run python -m benchmarks.table", file=sys.stderr)
        return int(after != before)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
