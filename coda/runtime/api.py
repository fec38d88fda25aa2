"""``coda.parse``, ``coda.compile`` and ``coda.load``: from text, a path or an artifact to something to call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda.errors import CodaError, Source, did_you_mean
from coda.ir import Program

if TYPE_CHECKING:
    from coda.frontend import Module
    from coda.runtime.callable import Artifact, CompiledProgram
    from coda.tuning.use import Tuning

Const = int | str  # what frontend.load takes as the value of a const parameter
NUMERICS = ("fused", "eager")


def parse(source: str | Path, **consts: Const) -> Module:
    """Parse and check program text, or a file. ``parse(text).programs[name]`` is the IR of one program.

    ``consts`` are the values of ``const`` parameters. Raises CodaError with every mistake found.
    """
    from coda.frontend import load

    return load(_read(source), consts)


def compile(
    source: str | Path | Program,
    *,
    program: str | None = None,
    numerics: str = "fused",
    tile: str | None = None,
    fallback: str = "copy",
    chunk: str | None = None,
    tune: bool | str = "cached",
    device: Any = None,
    consts: Mapping[str, Const] | None = None,
    **dims: int,
) -> CompiledProgram:
    """A program as a function of torch tensors.

    ``source`` is program text, the path of a ``.coda`` file, or IR; ``program`` chooses when it has several.
    ``dims`` fixes sizes, of axes or consts (``N=4096``); ``consts`` gives const choices and sizes that are then known
    to the checker.
    ``numerics="eager"`` rounds where eager PyTorch rounds. ``fallback`` says what a CUDA call may do when the kernel
    refuses its operands: ``copy``, ``reference`` or ``strict`` (see ``coda.runtime.callable``). ``chunk`` names an axis
    in whose chunks the kernels run, so that of temporaries over it only a part is ever there.
    ``tune="cached"`` uses what the tuner found at these sizes on this GPU before: tiles, or that separate kernels are
    faster and run instead. ``True`` measures at the sizes of the first CUDA call, where nothing was found before, which
    takes minutes; ``False`` chooses tiles by a formula. A ``tile`` that is given is used.

    Kernels are built when a CUDA call first needs them; ``device="cuda"`` builds and loads them now,
    ``device="cpu"`` never builds. On CPU tensors the reference interpreter runs.
    """
    from coda.passes import fuse
    from coda.passes.segments import has_calls, segments
    from coda.runtime.callable import CompiledProgram
    from coda.runtime.chain import ChainedProgram

    if numerics not in NUMERICS:
        raise CodaError.of(f"numerics is '{numerics}'", f"one of {', '.join(NUMERICS)}")
    ir = source if isinstance(source, Program) else _choose(parse(source, **(consts or {})), program)
    if numerics == "eager":
        from coda.passes.eager import round_as_eager

        ir = round_as_eager(ir)
    tuning = _tuning(tune, numerics, chunk)
    never = str(device) == "cpu"
    build = None if never else partial(_build, numerics=numerics, chunk=chunk, tuning=tuning)
    measured = tuning if tile is None and chunk is None else None  # those were asked for
    compiled = CompiledProgram(ir, dims, tile, fallback, build, measured=measured)
    if has_calls(ir):
        parts = segments(fuse(ir, numerics=numerics).forward)
        compiled = ChainedProgram(ir, dims, tile, fallback, build, measured=measured, parts=parts)
    if device is not None and not never:
        compiled.warmup(device)
    return compiled


def load(path: str | Path, *, program: str | None = None, fallback: str = "copy") -> CompiledProgram:
    """The program of an artifact that ``coda lower`` wrote; ``program`` chooses where it has several. What its kernels
    refuse, ``fallback`` decides.

    Raises CodaError where the file is no artifact or was built for another architecture or version.
    """
    from coda.build import load as load_artifact
    from coda.runtime.callable import CompiledProgram

    artifact = load_artifact(path, program)
    return CompiledProgram(artifact.program, fallback=fallback, artifact=artifact)


def _build(
    program: Program, dims: Mapping[str, int], tile: str | None, numerics: str, chunk: str | None, tuning: Tuning
) -> Artifact:
    from coda.build import artifact

    return artifact(program, dims, tile, numerics=numerics, chunk=chunk, measured=tuning.tiles)


def _tuning(mode: bool | str, numerics: str, chunk: str | None) -> Tuning:
    from coda.build import lowered
    from coda.tuning.use import Tuning

    return Tuning(partial(lowered, numerics=numerics, chunk=chunk), mode)


def _choose(module: Module, name: str | None) -> Program:
    programs = module.programs
    if name is None and len(programs) == 1:
        return next(iter(programs.values()))
    if name is None or name not in programs:
        have = ", ".join(programs) or "none"
        wanted = "which program?" if name is None else f"there is no program '{name}'"
        hint = did_you_mean(name or "", set(programs)) or "pass program=NAME"
        raise CodaError.of(f"{wanted} {module.source.name} has: {have}", hint)
    return programs[name]


def _read(source: str | Path) -> Source:
    """Program text as it is, or the content of the file named. Text has a brace or more than one line; paths do not."""
    if isinstance(source, str) and ("{" in source or "\n" in source):
        return Source(source)
    try:
        return Source(Path(source).read_text(encoding="utf-8"), str(source))
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CodaError.of(f"cannot read {source}: {cause}") from None
