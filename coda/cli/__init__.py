"""The command line: one file for each command, each with ``add`` (its options) and ``run`` (what it does).

Exit codes: 0 good; 1 the input is wrong, or what was asked for failed; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from coda.cli import check, derive, doctor, explain, lower, run, tune, version
from coda.errors import CodaError

COMMANDS = (check, explain, derive, lower, run, tune, doctor, version)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = _parser().parse_args(argv)  # exits with 2 on a usage error
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except CodaError as error:
        if getattr(args, "json", False):
            diagnostics = [d.to_json() for d in error.diagnostics]
            print(json.dumps({"ok": False, "diagnostics": diagnostics}, indent=2))
        else:
            print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coda", description="Tensor math over named axes, lowered to fused kernels.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        name = command.__name__.rsplit(".", 1)[1]
        text = (command.__doc__ or "").split(": ", 1)[1]  # a command's help is the docstring of its file
        subparser = commands.add_parser(
            name,
            help=text.splitlines()[0].rstrip("."),
            description=text[0].upper() + text[1:],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add(subparser)
        subparser.set_defaults(run=command.run)
    return parser
