"""What several commands share: options, and how values on the command line are read."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from coda.errors import CodaError


def add_consts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--const", type=parse_consts, default={}, metavar="NAME=VALUE,..", help="values of const parameters"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")


def add_request(parser: argparse.ArgumentParser, files: str) -> None:
    """The options that say which program at which sizes; see ``coda.cli.request``."""
    parser.add_argument("file", metavar="FILE", help=files)
    parser.add_argument("--program", metavar="NAME", help="which program, when the file has several")
    parser.add_argument(
        "--dims", type=parse_dims, default={}, metavar="M=8192,N=..", help="sizes of axes (override those of a .toml)"
    )
    add_consts(parser)


def parse_dims(text: str) -> dict[str, int]:
    """``M=8192,N=4096`` as a dict."""
    dims = {}
    for name, value in _pairs(text, "M=8192,N=4096"):
        if not value.isdecimal():
            raise argparse.ArgumentTypeError(f"the size of {name} is '{value}', not a whole number")
        dims[name] = int(value)
    return dims


def parse_consts(text: str) -> dict[str, int | str]:
    """``act=gelu_erf,HQ=32`` as a dict: sizes are numbers, choices are names."""
    pairs = _pairs(text, "act=gelu_erf,HQ=32")
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def _pairs(text: str, example: str) -> list[tuple[str, str]]:
    pairs = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\S+)\s*", item)
        if match is None:
            raise argparse.ArgumentTypeError(f"'{item}' is not NAME=VALUE; write it as {example}")
        pairs.append((match[1], match[2]))
    return pairs


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CodaError.of(f"cannot write {path}: {error.strerror}") from None


def table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> str:
    """Rows as aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(indent + line.rstrip() for line in cells)


def human_bytes(count: float) -> str:
    """Bytes in decimal units, as bandwidths are quoted."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
