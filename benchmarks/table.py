"""Write the table of measured ratios into README.md, from the JSON files in benchmarks/results.

    python -m benchmarks.table            # rewrite the part between the markers
    python -m benchmarks.table --check    # exit 1 when README.md does not show what the files say

Of each workload and shape the newest run on each device counts; of several tiles the best is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.records import read_all

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- benchmarks: begin (written by benchmarks.table) -->", "<!-- benchmarks: end -->"
NOTHING = "Nothing has been measured yet."
IMPLEMENTATIONS = ("coda", "torch.compile")


def table(documents: Iterable[dict]) -> str:
    """The markdown for all results, one table a device."""
    newest = _newest(documents)
    if not newest:
        return NOTHING
    devices = list(dict.fromkeys(device for device, *_ in newest))
    return "\n\n".join(_device_table(device, newest) for device in devices)


def _newest(documents: Iterable[dict]) -> dict[tuple, dict]:
    """(device, workload, phase, M, N, K, dtype) -> implementation -> (row, date); later runs replace earlier ones."""
    newest: dict[tuple, dict] = {}
    for document in documents:
        seen: dict[tuple, dict] = {}
        for row in document["rows"]:
            key = (document["device"], *(row[k] for k in ("workload", "phase", "M", "N", "K", "dtype")))
            best = seen.setdefault(key, {"date": document["date"], "versions": document["versions"]})
            if row["impl"] not in best or row["ratio"] < best[row["impl"]]["ratio"]:
                best[row["impl"]] = row
        newest.update(seen)
    return newest


def _device_table(device: str, newest: dict[tuple, dict]) -> str:
    entries = {key: best for key, best in newest.items() if key[0] == device}
    dates = sorted(best["date"][:10] for best in entries.values())
    versions = max(entries.values(), key=lambda best: best["date"])["versions"]
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    lines = [
        f"{device}, {span}, " + ", ".join(f"{name} {version}" for name, version in versions.items() if version) + ".",
        "",
        "| workload | phase | M | N | K | dtype | coda | tile | torch.compile |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (_, *key), best in entries.items():
        cells = [_ratio(best.get(impl)) for impl in IMPLEMENTATIONS]
        tile = (best.get("coda") or {}).get("tile") or "-"
        if cells != ["-", "-"]:
            lines.append("| " + " | ".join([*map(str, key), cells[0], tile, cells[1]]) + " |")
    return "\n".join(lines)


def _ratio(row: dict | None) -> str:
    return "-" if row is None else f"{row['ratio']:.3f}"


def splice(readme: str, content: str) -> str:
    """The README with what stands between the markers replaced."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when README.md is out of date")
    args = parser.parse_args(argv)
    before = README.read_text()
    after = splice(before, table(read_all()))
    if args.check:
        if after != before:
            print("README.md is out of date: run python -m benchmarks.table", file=sys.stderr)
        return int(after != before)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
