"""Which program, at which sizes, for which target: from a ``.coda`` file and options, or from a ``.toml`` config.

The keys of a config are those of ``_CONFIG``; ``coda lower --help`` shows one. Options on the command line override it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coda.errors import CodaError, Source, did_you_mean
from coda.frontend import Module, load
from coda.frontend.parse import parse_module
from coda.ir import Program

ARCHES = ("sm_90a",)

Const = int | str

# The keys of a config and the type each value has; a dict describes a table, "*" any key.
_CONFIG: dict[str, Any] = {
    "program": str,
    "name": str,
    "dims": {"*": int},
    "consts": {"*": (int, str)},
    "dtypes": {"*": str},
    "target": {"arch": str, "tile": str},
}


@dataclass(frozen=True)
class Request:
    """A checked program and what to do with it."""

    program: Program
    dims: dict[str, int] = field(default_factory=dict)
    arch: str = ARCHES[0]
    tile: str | None = None


def load_module(
    path: str | Path,
    consts: Mapping[str, Const] | None = None,
    program: str | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> Module:
    """Read, parse and check a program file; ``dtypes`` replaces those of parameters of ``program`` (None: of all)."""
    try:
        source = Source(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CodaError.of(f"cannot read {path}: {_cause(error)}") from None
    return load(_with_dtypes(source, program, dtypes) if dtypes else source, dict(consts or {}))


def _with_dtypes(source: Source, program: str | None, dtypes: Mapping[str, str]) -> Source:
    """The text as it would read with other parameter dtypes: what is built is what the artifact's source text says."""
    programs = [d for d in parse_module(source) if d.kind == "program" and program in (None, d.name.name)]
    types = [(p.name.name, p.type.dtype) for d in programs for p in d.parameters if p.type is not None]
    known = {name for name, _ in types}
    for name in dtypes:
        if name not in known:
            raise CodaError.of(f"dtypes: there is no parameter '{name}'", did_you_mean(name, known))
    lines = source.text.split("\n")
    for name, written in reversed(types):  # from the end, so that the places of the others stay right
        if name in dtypes:
            row, start, end = written.span.line - 1, written.span.column - 1, written.span.end_column - 1
            lines[row] = lines[row][:start] + dtypes[name] + lines[row][end:]
    return Source("\n".join(lines), source.name)


def from_args(args: argparse.Namespace) -> Request:
    """The request that FILE and the options of ``add_request`` describe. Warnings go to stderr."""
    config = read_config(args.file) if args.file.endswith(".toml") else {}
    target = config.get("target", {})
    source = Path(args.file).parent / config["program"] if config else Path(args.file)
    name = args.program or config.get("name")
    module = load_module(source, {**config.get("consts", {}), **args.const}, name, config.get("dtypes", {}))
    for warning in module.warnings:
        print(warning.render(module.source), file=sys.stderr)
    arch = getattr(args, "arch", None) or target.get("arch", ARCHES[0])
    if arch not in ARCHES:
        raise CodaError.of(f"target.arch is '{arch}'", "kernels are made for " + ", ".join(ARCHES))
    return Request(
        program=select(module, name, source),
        dims={**config.get("dims", {}), **args.dims},
        arch=arch,
        tile=getattr(args, "tile", None) or target.get("tile"),
    )


def select(module: Module, name: str | None, path: Path) -> Program:
    """The program of that name, or the only one."""
    programs = module.programs
    if name is None:
        if len(programs) == 1:
            return next(iter(programs.values()))
        if not programs:
            raise CodaError.of(f"{path} has no program")
        raise CodaError.of(f"{path} has {len(programs)} programs", f"choose one: --program {' | '.join(programs)}")
    if name not in programs:
        raise CodaError.of(f"{path} has no program '{name}'", did_you_mean(name, set(programs)))
    return programs[name]


def read_config(path: str) -> dict[str, Any]:
    """A checked config. Unknown keys and wrong types are errors, all reported together."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        config = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CodaError.of(f"cannot read {path}: {_cause(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise CodaError.of(f"{path}: {error}") from None
    problems = list(_problems(config, _CONFIG, ""))
    if "program" not in config:
        problems.append(CodaError.of("'program' is missing", 'name the program file: program = "mlp.coda"'))
    if problems:
        raise CodaError([d for p in problems for d in p.diagnostics], Source("", path))
    return config


def _problems(config: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[CodaError]:
    for key, value in config.items():
        kind = schema.get(key, schema.get("*"))
        name = where + key
        if kind is None:
            hint = did_you_mean(key, set(schema)) or "known keys: " + ", ".join(schema)
            yield CodaError.of(f"unknown key '{name}'", hint)
        elif isinstance(kind, dict):
            if isinstance(value, dict):
                yield from _problems(value, kind, name + ".")
            else:
                yield CodaError.of(f"'{name}' must be a table, as in [{name}]")
        elif not isinstance(value, kind) or isinstance(value, bool):
            yield CodaError.of(f"'{name}' must be {_kind_name(kind)}, not {value!r}")


def _kind_name(kind: Any) -> str:
    names = {str: "a string", int: "a whole number"}
    return " or ".join(names[k] for k in (kind if isinstance(kind, tuple) else (kind,)))


def _cause(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
