"""A program as a function of torch tensors.

A call takes one of five routes, and ``last_route`` says which:

* ``kernel``: CUDA operands that the artifact accepts as they are;
* ``copy``: the artifact refused their layout, and runs on aligned copies of the operands named;
* ``reference``: the interpreter of ``reference.py``: CPU operands, no compiler, or a refusal nothing cures;
* ``unfused``: at these sizes separate kernels were measured to be no slower (``coda.tuning``), and run instead;
* ``empty``: some axis has size 0. No kernel is launched; empty sums are zeros.

The policy ``fallback`` limits this: ``copy`` allows all five, ``reference`` forbids copies, ``strict`` turns every
refusal of a CUDA call into a CodaError and runs the kernel even where it is slower. Operands are never modified, except
``inout`` ones. Launches go to the operands' device and its current stream. Nothing here keeps a tensor alive after the
call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from coda.errors import CodaError
from coda.ir import Output, Program
from coda.runtime.device import capturing
from coda.runtime.layout import cure
from coda.runtime.operands import Operands, keywords, named, resolve, with_defaults
from coda.runtime.reference import evaluate_sized
from coda.runtime.repeat import REMEMBERED, Repeat, Separate, layout_key, views_of, wants_gradient
from coda.runtime.results import allocate, guard_gradient, preallocated, returned, shape_of
from coda.runtime.unfused import Unfused

FALLBACKS = ("copy", "reference", "strict")
Arguments = list[Any]


class Prepared(Protocol):
    """Calls with known layouts, whatever the addresses."""

    def run(self, addresses: Sequence[int], workspace: Tensor | None, stream: int) -> None: ...


class Artifact(Protocol):
    """Built kernels of one program. ``args`` are in ABI order, parameters then outputs: CUDA tensors, numbers or 0-dim
    CPU tensors for scalars, None for absent operands. An inout parameter has no output of its own."""

    def check(self, args: Arguments) -> str | None:
        """The sentence why these arguments are refused, or None."""

    def output_shapes(self, sizes: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        """The shape of each output, by name: a ``partial`` one has a dim of tile partials in front."""

    def workspace_bytes(self, args: Arguments) -> int: ...

    def run(self, args: Arguments, workspace: Tensor | None, stream: int) -> None: ...

    def prepare(self, args: Arguments) -> Prepared:
        """These arguments, as the layouts of later calls with other addresses. Scalars are tensors."""

    def warmup(self, device: torch.device) -> None:
        """Load the kernels on a device, so that ``run`` may be captured into a CUDA graph."""


Builder = Callable[[Program, Mapping[str, int], Any], Artifact]


class Measured(Protocol):
    """What measuring led to."""

    def declined(self, program: Program, sizes: Mapping[str, int]) -> str | None:
        """The sentence why a program is not to be fused at these sizes, or None."""


@dataclass(frozen=True)
class Route:
    """How a call ran: ``kind`` (see the module), the operands copied, and why it was not simply the kernel."""

    kind: str
    copied: tuple[str, ...] = ()
    reason: str | None = None

    def __str__(self) -> str:
        text = f"copy of {', '.join(self.copied)}" if self.copied else self.kind
        return text + (f": {self.reason}" if self.reason else "")


@dataclass
class CompiledProgram:
    """Call it with tensors, by position or parameter name; see ``coda.compile``.

    ``build`` makes the artifact when a CUDA call first needs it, or is None where the program must not be built.
    """

    program: Program
    dims: dict[str, int] = field(default_factory=dict)
    tile: Any = None
    fallback: str = "copy"
    build: Builder | None = None
    device_type: str = "cuda"  # where the artifact runs; tests put a fake one on the CPU
    artifact: Artifact | None = None
    measured: Measured | None = None
    last_route: Route | None = field(default=None, compare=False)
    _failure: CodaError | None = field(default=None, repr=False, compare=False)
    _accepted: dict[tuple, Repeat | Separate] = field(default_factory=dict, repr=False, compare=False)
    _unfused: Unfused | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.fallback not in FALLBACKS:
            raise CodaError.of(f"fallback is '{self.fallback}'", f"one of {', '.join(FALLBACKS)}")

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the program. Returns a tensor, a tuple of tensors, or None where it only accumulates into inouts.

        ``out`` preallocates outputs: a tensor, a sequence in output order or a dict by name; of a program with a
        parameter ``out`` it is that operand. Raises CodaError for operands that do not fit the program and, under
        ``fallback="strict"``, for what the kernel refuses.
        """
        out, kwargs = keywords(self.program, out, kwargs)
        values = named(self.program, args, kwargs)
        key = layout_key(values)
        outputs = None if out is not None or wants_gradient(values) else self._again(key, values)
        if outputs is None:
            outputs = self._anew(key, values, out)
        return tuple(outputs) if len(outputs) > 1 else next(iter(outputs), None)

    def _again(self, key: tuple, values: Mapping[str, Any]) -> list[Tensor] | None:
        """The outputs of a call like an earlier one; None where there was none or the addresses differ in kind."""
        repeat = self._accepted.get(key)
        if repeat is None:
            return None
        if isinstance(repeat, Separate):
            self.last_route = Route("unfused", reason=repeat.reason)
            return repeat.run(values, self._separately)
        try:
            outputs = repeat.run(list(with_defaults(self.program, values).values()), partial(launch, self.built()))
        except CodaError:
            return None
        self.last_route = Route("kernel")
        return outputs

    def _anew(self, key: tuple, values: Mapping[str, Any], out: Any) -> list[Tensor]:
        operands = resolve(self.program, values, self.dims)
        given = preallocated(self.program, out, operands)
        with torch.no_grad():
            results, self.last_route = self._dispatch(operands, given)
            if (repeat := self._repeated(self.last_route, values, operands, results)) is not None:
                if len(self._accepted) >= REMEMBERED:
                    self._accepted.clear()
                self._accepted[key] = repeat
        outputs = []
        for output in returned(self.program):
            x = given.get(output.name)
            if x is None:
                x = self._seen(output, results[output.name], operands)
                x = guard_gradient(self.program, operands, x)
            outputs.append(x)
        return outputs

    def _seen(self, output: Output, x: Tensor, operands: Operands) -> Tensor:
        """An output in the shape in which the caller sees it."""
        return x if output.is_partial else x.reshape(shape_of(output, operands))

    def _repeated(
        self, route: Route, values: Mapping[str, Any], operands: Operands, results: Mapping[str, Tensor]
    ) -> Repeat | Separate | None:
        """What the layouts of a call led to, if another one may simply do the same."""
        inout = [i for i, p in enumerate(self.program.params) if p.inout]
        seen = {o.name: tuple(self._seen(o, results[o.name], operands).shape) for o in returned(self.program)}
        if route.kind == "unfused" and not inout:
            views = views_of(list(values.values()), list(operands.values.values()))
            return None if views is None else Separate(str(route.reason), views, operands.sizes, seen)
        if route.kind != "kernel":
            return None
        used = list(with_defaults(self.program, operands.values).values())
        given = list(with_defaults(self.program, values).values())
        outputs = [(results[name], shape) for name, shape in seen.items()]
        size = self.built().workspace_bytes([*used, *results.values()])
        return Repeat.of(given, used, outputs, inout, size, _device(operands))

    def remembered(self, values: Mapping[str, Any]) -> Repeat | None:
        """What a call with operands like these led to; None where none did, or it did not simply run the kernel."""
        found = self._accepted.get(layout_key(values))
        return found if isinstance(found, Repeat) else None

    def warmup(self, device: torch.device | str) -> None:
        """Build if necessary and load the kernels on a CUDA device, as is needed before graph capture."""
        self.built().warmup(torch.device(device))

    def _dispatch(self, operands: Operands, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Route]:
        """The results by name, in the given tensors where there are any, and how they came about."""
        if any(x.numel() == 0 for x in operands.tensors.values()):  # an axis of the math alone may be empty
            return self._reference(operands, given), Route("empty")
        device = _device(operands)
        if device.type != self.device_type:
            return self._reference(operands, given), Route("reference", reason=f"the operands are on {device}")
        if (reason := self._declined(operands.sizes)) is not None:
            return self._computed(self._separately, operands, given), Route("unfused", reason=reason)
        try:
            artifact = self.built(operands.sizes)
        except CodaError as failure:
            if self.fallback == "strict":
                raise
            return self._slowly(operands, given, failure.diagnostics[0].message)
        return self._kernel(artifact, operands, given, device)

    def _separately(self, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> Mapping[str, Tensor]:
        self._unfused = self._unfused or Unfused(self.program)
        return self._unfused(inputs, sizes)

    def _declined(self, sizes: Mapping[str, int]) -> str | None:
        """Why separate kernels are to run; None where ours do, or must."""
        if self.measured is None or self.fallback == "strict":
            return None
        return self.measured.declined(self.program, sizes)

    def built(self, sizes: Mapping[str, int] | None = None) -> Artifact:
        """The artifact; built once, for any sizes, and a failure to build is remembered. ``sizes`` are those of the
        first call: they guide the choice of the tile where ``dims`` does not fix them."""
        if self.artifact is not None:
            return self.artifact
        if self._failure is not None:
            raise self._failure
        if self.build is None:
            raise CodaError.of(f"program '{self.program.name}' was compiled for the reference interpreter only")
        if capturing():
            raise CodaError.of(f"program '{self.program.name}' is not built, and a CUDA graph is being captured",
                               "call .warmup(device) before the capture")  # fmt: skip
        try:
            self.artifact = self.build(self.program, {**(sizes or {}), **self.dims}, self.tile)
        except CodaError as failure:
            self._failure = failure
            raise
        return self.artifact

    def _kernel(
        self, artifact: Artifact, operands: Operands, given: Mapping[str, Tensor], device: torch.device
    ) -> tuple[dict[str, Tensor], Route]:
        """Launch, on copies where that is needed and allowed; else the reference, or an error in strict mode."""
        results = allocate(self.program, artifact.output_shapes(operands.sizes), given, device)
        inputs = with_defaults(self.program, operands.values)
        names, arguments = [*inputs, *results], [*inputs.values(), *results.values()]
        refusal = artifact.check(arguments)
        used, copied, left = arguments, list[int](), refusal
        if refusal is not None and self.fallback == "copy":
            used, copied, left = cure(arguments, names, artifact.check)
        if left is not None:
            if self.fallback == "strict":
                raise CodaError.of(f"program '{self.program.name}': {left}")
            return self._slowly(operands, given, left)
        launch(artifact, used, artifact.workspace_bytes(used), device)
        written = {p.name for p in self.program.params if p.inout} | results.keys()
        _write_back([i for i, name in enumerate(names) if name in written], arguments, used)
        return results, Route("copy" if copied else "kernel", tuple(names[i] for i in copied), refusal)

    def _slowly(self, operands: Operands, given: Mapping[str, Tensor], reason: str) -> tuple[dict[str, Tensor], Route]:
        """The reference, where the caller has reason to expect a kernel: they hear of it, once for each reason."""
        what = f"program '{self.program.name}' runs in the reference interpreter, many times slower than a kernel"
        warnings.warn(f"{what}: {reason}", stacklevel=2)
        return self._reference(operands, given), Route("reference", reason=reason)

    def _reference(self, operands: Operands, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._computed(partial(evaluate_sized, self.program), operands, given)

    def _computed(
        self,
        compute: Callable[[Mapping[str, Any], Mapping[str, int]], Mapping[str, Tensor]],
        operands: Operands,
        given: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """What torch computes, also in the tensors that were given."""
        results = dict(compute(operands.values, operands.sizes))
        for output in self.program.outputs:
            target = given.get(output.name) if output.into is None else operands.values[output.into]
            if target is not None:
                target.copy_(results[output.name].reshape(target.shape))
        return results


def _device(operands: Operands) -> torch.device:
    """Where the operands with dims are."""
    return next((x.device for x in operands.tensors.values() if x.dim()), torch.device("cpu"))


def launch(artifact: Artifact, args: Arguments, size: int, device: torch.device) -> None:
    """Run on the operands' device and its current stream, with ``size`` bytes of workspace from torch's allocator."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        artifact.run(args, workspace, stream)


def _write_back(positions: Sequence[int], arguments: Arguments, used: Arguments) -> None:
    """Results from aligned copies go into the caller's tensors; autograd is told of what was written in place."""
    for position in positions:
        original, current = arguments[position], used[position]
        if current is original:
            torch.autograd.graph.increment_version(original)
        else:
            original.copy_(current)
