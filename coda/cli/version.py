"""coda version: print the version of coda."""

from __future__ import annotations

import argparse

from coda.version import __version__


def add(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    print(f"coda {__version__}")
    return 0
