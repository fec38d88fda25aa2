"""A program with opaque calls, run: its segments by their own artifacts, the calls between them by torch functions.

All of it is queued on the current stream, so a whole forward or backward may be captured into a CUDA graph, if the
functions that are called may. On the CPU the reference interpreter runs the program as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import DType, torch_dtype
from coda.errors import CodaError
from coda.ir import Output, Program
from coda.passes.segments import Part
from coda.runtime.binding import type_shape
from coda.runtime.callable import Artifact, CompiledProgram, Route
from coda.runtime.operands import keywords, named, resolve, with_defaults
from coda.runtime.reference import Context, run_nodes
from coda.runtime.results import guard_gradient, preallocated, returned, shape_of


@dataclass
class ChainedProgram(CompiledProgram):
    """Called like any compiled program. ``parts`` are its segments and calls; ``build`` makes the artifact of one."""

    parts: tuple[Part, ...] = ()
    _artifacts: dict[str, Artifact] = field(default_factory=dict, repr=False, compare=False)
    _chains: dict[tuple, list[CompiledProgram | Program]] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the program; see ``CompiledProgram``. Each segment decides by itself how it runs: ``last_route`` is that
        of the first which is no plain kernel."""
        out, kwargs = keywords(self.program, out, kwargs)
        values = named(self.program, args, kwargs)
        operands = resolve(self.program, values, self.dims)
        on_device = any(x.dim() and x.device.type == self.device_type for x in operands.tensors.values())
        if not on_device or any(x.numel() == 0 for x in operands.tensors.values()):
            return super().__call__(*args, **kwargs if out is None else {**kwargs, "out": out})
        given = preallocated(self.program, out, operands)
        with torch.no_grad():
            results = self._run(with_defaults(self.program, operands.values), operands.sizes)
        outputs = []
        for output in returned(self.program):
            x = results[output.name].reshape(shape_of(output, operands))
            known = given.get(output.name)
            outputs.append(guard_gradient(self.program, operands, x) if known is None else known.copy_(x))
        return tuple(outputs) if len(outputs) > 1 else next(iter(outputs), None)

    def warmup(self, device: torch.device | str) -> None:
        """Build what is missing and load all kernels on a CUDA device."""
        for part in self.parts:
            if isinstance(part, Program):
                self._artifact(part, self.dims, self.tile).warmup(torch.device(device))

    def _run(self, tensors: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """All tensors by name, results among them, after all steps."""
        self.last_route = Route("kernel")
        for step in self._chain(sizes):
            if isinstance(step, Program):
                tensors |= call_stored(step, {p.name: tensors[p.name] for p in step.params}, sizes)
                continue
            results = step(**{p.name: tensors[p.name] for p in step.program.params})
            names = [o.name for o in returned(step.program)]  # none where it only accumulates
            tensors |= zip(names, results if len(names) > 1 else (results,), strict=False)
            if self.last_route.kind == "kernel" and step.last_route is not None:
                self.last_route = step.last_route
        return tensors

    def _chain(self, sizes: Mapping[str, int]) -> list[CompiledProgram | Program]:
        """The steps at these sizes. What a segment remembers of its calls holds for one set of sizes only."""
        key = tuple(sizes.items())
        if key not in self._chains:
            self._chains[key] = [self._step(part, sizes) for part in self.parts]
        return self._chains[key]

    def _step(self, part: Part, sizes: Mapping[str, int]) -> CompiledProgram | Program:
        if not isinstance(part, Program):
            return part.program
        symbols = {s.name for a in part.axes for s in a.size.free_symbols}
        known = {name: size for name, size in sizes.items() if name in symbols}
        return CompiledProgram(
            part, known, self.tile, self.fallback, self._artifact, self.device_type, measured=self.measured
        )

    def _artifact(self, part: Program, sizes: Mapping[str, int], tile: Any) -> Artifact:
        """The artifact of a segment, built once for all sizes."""
        if self.build is None:
            raise CodaError.of(f"program '{self.program.name}' was compiled for the reference interpreter only")
        if part.name not in self._artifacts:
            self._artifacts[part.name] = self.build(part, sizes, tile)
        return self._artifacts[part.name]


class _Stored(Context):
    """Values in the dtypes they are stored in: what a call between kernels sees."""

    def held(self, dtype: DType) -> torch.dtype:
        return torch_dtype(dtype)

    def round(self, x: Tensor, dtype: DType, saturate: bool = False) -> Tensor:
        return x.to(torch_dtype(dtype))


def call_stored(program: Program, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The results of a program that is one opaque call, in the dtypes and layouts that it declares."""
    device = next(x.device for x in tensors.values() if isinstance(x, Tensor))
    context = _Stored(program, tensors, sizes, torch.float32, False, device)
    values = run_nodes(program, context)
    return {o.name: _laid_out(context, o, values[o.value], sizes) for o in program.outputs}


def _laid_out(context: Context, output: Output, x: Tensor, sizes: Mapping[str, int]) -> Tensor:
    x = context.align_axes(x, output.value.type.axes, output.type.axes)
    return x.reshape(type_shape(output.type, sizes)).contiguous()
