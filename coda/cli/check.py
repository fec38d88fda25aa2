"""coda check: parse and check programs; report every mistake.

All mistakes of all files are reported, each with its place and a hint. Warnings do not change the exit code.
"""

from __future__ import annotations

import argparse
import sys

from coda.cli.common import add_consts, add_json, print_json
from coda.cli.request import load_module
from coda.errors import CodaError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="program files (.coda)")
    add_consts(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    reports = []
    for path in args.files:
        report, text, ok = _check(path, args.const)
        reports.append(report)
        if not args.json:
            print(text, file=sys.stdout if ok else sys.stderr)
    ok = all(report["ok"] for report in reports)
    if args.json:
        print_json({"ok": ok, "files": reports})
    return 0 if ok else 1


def _check(path: str, consts: dict[str, int | str]) -> tuple[dict, str, bool]:
    """The report on one file as JSON and as text, and whether it is good."""
    try:
        module = load_module(path, consts)
    except CodaError as error:
        diagnostics = [d.to_json() for d in error.diagnostics]
        return {"file": path, "ok": False, "programs": [], "diagnostics": diagnostics}, str(error), False
    names = [program.name for program in module.programs.values()]
    text = "\n".join([*(w.render(module.source) for w in module.warnings), f"{path}: ok ({', '.join(names)})"])
    diagnostics = [w.to_json() for w in module.warnings]
    return {"file": path, "ok": True, "programs": names, "diagnostics": diagnostics}, text, True
