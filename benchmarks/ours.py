"""coda's side: the kernels of blocks.coda, forward and derived backward, one by one for the items of models.py and as
whole artifacts for the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import coda
from benchmarks.candidates import CHECKED_ROWS, LeftOut, NotTimed, Ready, sets
from benchmarks.models import Item, Model
from coda.build import load
from coda.dtypes import torch_dtype
from coda.errors import CodaError
from coda.ir import Program
from coda.passes import derive, fuse
from coda.printer import print_program
from coda.runtime.binding import bind, shapes_of
from coda.runtime.compare import compare
from coda.runtime.inputs import poisoned_outputs, random_inputs
from coda.runtime.library import Artifact
from coda.runtime.timing import rotating
from coda.target.blocks import MERGES, joined_finishes

BLOCKS = Path(__file__).with_name("blocks.coda")
WEIGHTS = {"w_o": "out_proj", "w_gate": "gate_up", "w_up": "gate_up", "w_down": "down", "w_q": "qkv", "w_k": "qkv",
           "w_v": "qkv"}  # fmt: skip


@lru_cache
def block(model: Model) -> dict[str, Program]:
    """The block as it is written, which keeps nothing for a backward; the forward that does; and the backward."""
    program = coda.parse(BLOCKS, **model.consts).programs["llama_layer"]
    derived = derive(program)[0]
    return {"inference": program, "forward": derived.forward, "backward": derived.backward}


@lru_cache
def phases(model: Model) -> dict[str, Program]:
    """What is built and called of a block: its phases, and the first kernel of the backward by itself, dRoPE with the
    sums that the norm's backward needs. It runs on what attention's backward returns, before any product."""
    first = _cut(block(model)["backward"])[0]
    (drope,) = coda.parse(print_program(first), D=model.d).programs.values()  # D is the size of none of its operands
    return {**block(model), "drope": drope}


def _cut(program: Program) -> list[Program]:
    """The kernels of a phase."""
    return joined_finishes(fuse(program, most=MERGES[0]).forward.kernels)


@lru_cache
def kernels(model: Model) -> dict[str, list[Program]]:
    """The kernels of each item: one, but for weight gradients that are not merged. qkv is that of inference, as the
    peers have no other; gate_up keeps its preactivation."""
    programs = block(model)
    found: dict[str, list[Program]] = {"lm_head": [coda.parse(BLOCKS, **model.consts).programs["lm_head"]]}
    for phase, program in programs.items():
        for kernel in _cut(program):
            name = _item(kernel, phase)
            if name is not None:
                found.setdefault(name, []).append(kernel)
    return found


def _item(kernel: Program, phase: str) -> str | None:
    """The item a kernel of the block belongs to: by the weight it reads, or whose gradient it writes."""
    read = next((WEIGHTS[p.name] for p in kernel.params if p.name in WEIGHTS), None)
    if phase == "backward":
        written = next((WEIGHTS[o.name[2:]] for o in kernel.outputs if o.name[2:] in WEIGHTS), None)
        return f"{read}_dgrad" if read else f"{written}_wgrad" if written else None
    return read if phase == ("inference" if read == "qkv" else "forward") else None


def file(folder: Path, model: Model, kernel: Program, tile: str) -> Path:
    """Where benchmarks.build puts the artifact of a kernel."""
    return folder / model.name / f"{kernel.name}.{tile}.so"


def block_file(folder: Path, model: Model, phase: str, rows: int) -> Path:
    """Where benchmarks.build puts the artifact of a phase of the block, with tiles for so many rows."""
    return folder / model.name / f"block_{phase}.{rows}.so"


def offer_ready(item: Item, model: Model, rows: int, folder: Path) -> Iterator[Ready | LeftOut]:
    """The kernels of an item at each tile that was built for all of them, checked."""
    programs = kernels(model)[item.name]
    tiles = [{p.name.split(".")[1] for p in folder.glob(f"{model.name}/{k.name}.*.so")} for k in programs]
    operands = [[inputs_of(k, model, rows, seed) for seed in range(sets(item, model, rows))] for k in programs]
    for tile in sorted(set.intersection(*tiles)):
        try:
            built = [load(file(folder, model, k, tile)) for k in programs]
            worst = max(check(a, model, min(rows, CHECKED_ROWS)) for a in built)
            calls = [call_of(a, known(a.program, model, rows), x) for a, x in zip(built, operands, strict=True)]
            yield Ready("coda", tile, _each(calls), worst)
        except (NotTimed, CodaError, RuntimeError) as error:
            yield LeftOut("coda", tile, str(error))


def _each(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    return lambda: [call() for call in calls]


def sizes_of(model: Model, rows: int) -> dict[str, int]:
    return {**model.dims, **model.consts, "M": rows}


def known(program: Program, model: Model, rows: int) -> dict[str, int]:
    """Those of the sizes that the program has axes for."""
    axes = {axis.name for axis in program.free_axes}
    return {name: size for name, size in sizes_of(model, rows).items() if name in axes}


def inputs_of(program: Program, model: Model, rows: int, seed: int, device: str = "cuda") -> dict[str, Any]:
    """Random operands. What a kernel takes from another, such as 1/rms, is as small as it is there."""
    inputs = random_inputs(program, sizes_of(model, rows), seed, device)
    for name, value in inputs.items():
        if name in ("r", "r_2") and isinstance(value, Tensor):
            value.abs_().add_(0.5)
    return inputs


def check(artifact: Artifact, model: Model, rows: int) -> float:
    """The largest error of a result against float64, which the gate accepts, or NotTimed."""
    program = artifact.program
    inputs = inputs_of(program, model, rows, seed=99)
    sizes = bind(program, shapes_of(inputs), known(program, model, rows))
    outputs = poisoned_outputs(program, sizes, "cuda")
    artifact.run([*inputs.values(), *outputs.values()])
    result = compare(program, inputs, outputs, dims=sizes)
    if not result.ok:
        raise NotTimed(str(result))
    return max(o.error for o in result.outputs)


def call_of(artifact: Artifact, dims: Mapping[str, int], inputs: Sequence[Mapping[str, Any]]) -> Callable[[], object]:
    """A call by the artifact's own entry point, which takes the next of these operand sets each time."""
    allocate = outputs_of(artifact, inputs[0], dims)
    return rotating(lambda *values: artifact.run([*values, *allocate()]), [list(x.values()) for x in inputs])


def outputs_of(artifact: Artifact, inputs: Mapping[str, Any], dims: Mapping[str, int]) -> Callable[[], list[Tensor]]:
    """Allocates the outputs of a call with such operands."""
    program = artifact.program
    shapes = artifact.output_shapes(bind(program, shapes_of(inputs), dims))
    kinds = [(tuple(shapes[o.name]), torch_dtype(o.type.dtype)) for o in program.outputs]
    return lambda: [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in kinds]
