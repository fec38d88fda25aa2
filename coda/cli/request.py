"""Which program, at which sizes, for which target: from a ``.coda`` file and options, or from a ``.toml`` config.

The keys of a config are those of ``_CONFIG``; ``coda lower --help`` shows one. Options on the command line override it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    "name": (str, list),
    "backward": bool,
    "wrt": list,
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
    backward: bool = False
    wrt: tuple[str, ...] | None = None  # parameters that want gradients; None: all that can


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
    requests = all_from_args(args)
    if len(requests) > 1:
        names = " | ".join(r.program.name for r in requests)
        raise CodaError.of(f"{args.file} names {len(requests)} programs", f"choose one: --program {names}")
    return requests[0]


def all_from_args(args: argparse.Namespace) -> list[Request]:
    """The requests for all programs that a config names, one otherwise."""
    config = read_config(args.file) if args.file.endswith(".toml") else {}
    target = config.get("target", {})
    source = Path(args.file).parent / config["program"] if config else Path(args.file)
    named = config.get("name")
    listed: list[str] = named if isinstance(named, list) else []
    names: list[str | None] = [args.program] if args.program else [*listed] or [named]
    one = names[0] if len(names) == 1 else None
    module = load_module(source, {**config.get("consts", {}), **args.const}, one, config.get("dtypes", {}))
    for warning in module.warnings:
        print(warning.render(module.source), file=sys.stderr)
    arch = getattr(args, "arch", None) or target.get("arch", ARCHES[0])
    if arch not in ARCHES:
        raise CodaError.of(f"target.arch is '{arch}'", "kernels are made for " + ", ".join(ARCHES))
    programs = [select(module, name, source) for name in names]
    sharing = [select(module, name, source) for name in listed]  # the sizes of the config
    wrt = config.get("wrt")
    return [
        Request(
            program=program,
            dims={**_dims_of(program, sharing, config.get("dims", {})), **args.dims},
            arch=arch,
            tile=getattr(args, "tile", None) or target.get("tile"),
            backward=config.get("backward", False),
            wrt=None if wrt is None else tuple(wrt),
        )
        for program in programs
    ]


def _dims_of(program: Program, sharing: Sequence[Program], dims: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a config that a program knows, where several share them; each must be known to one of them."""
    if not sharing:
        return dict(dims)
    known = [size_names(p) for p in sharing]
    for name in dims:
        if not any(name in names for names in known):
            raise CodaError.of(f"dims: no program has an axis '{name}'", did_you_mean(name, set().union(*known)))
    return {name: size for name, size in dims.items() if name in size_names(program)}


def size_names(program: Program) -> set[str]:
    """The axes of a program, and what their sizes are made of."""
    return {s.name for axis in program.axes for s in axis.size.free_symbols} | {axis.name for axis in program.axes}


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
        elif not _is_a(value, kind):
            yield CodaError.of(f"'{name}' must be {_kind_name(kind)}, not {value!r}")


def _is_a(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):  # which Python counts as an int
        return kind is bool
    return isinstance(value, kind) and (not isinstance(value, list) or all(isinstance(x, str) for x in value))


def _kind_name(kind: Any) -> str:
    names = {str: "a string", int: "a whole number", bool: "true or false", list: "a list of strings"}
    return " or ".join(names[k] for k in (kind if isinstance(kind, tuple) else (kind,)))


def _cause(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
