"""Where the grammar and the C++ templates lie: at the top of a source checkout, or packaged inside a wheel."""

from __future__ import annotations

from pathlib import Path

from coda.errors import CodaError

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """The folder ``name``: packaged data first, so that an installed coda never reads a stray folder next to it."""
    candidates = (PACKAGE / "_resources" / name, PACKAGE.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    looked_in = " and ".join(map(str, candidates))
    raise CodaError.of(f"coda's folder '{name}' is missing; looked in {looked_in}", "install coda again")


def grammar_file() -> Path:
    return resource("grammar") / "coda.lark"


def templates_dir() -> Path:
    return resource("templates")


def library_dir() -> Path:
    """The functions that ship as source: norms, GLU, RoPE."""
    return PACKAGE / "library"
