"""coda run: run a program on random inputs and compare it with float64.

FILE is a program, a config or an artifact (.so). On a GPU its kernel runs; without one the reference interpreter does,
and the report says so. Errors are relative to the whole output; the limit is twice eager PyTorch's error. Exit code 1
when an output is over it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import coda
from coda.cli.common import add_json, add_request, print_json
from coda.cli.request import from_args
from coda.errors import CodaError
from coda.ir import Program

BF16_ROUNDING = 2.0**-8

if TYPE_CHECKING:  # importing torch takes seconds, which the other commands need not wait for
    from coda.runtime.callable import CompiledProgram


def add(parser: argparse.ArgumentParser) -> None:
    add_request(parser, "a program (.coda), a config (.toml) or an artifact (.so)")
    parser.add_argument("--small", action="store_true", help="small odd sizes for the axes that --dims does not give")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda when there is a GPU")
    parser.add_argument("--tile", metavar="128x192", help="build this tile only")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: %(default)s)")
    parser.add_argument("--backward", action="store_true", help="the derived gradients, against autograd")
    parser.add_argument("--without-optional", action="store_true", help="leave optional operands absent")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from torch import Tensor

    from coda.runtime.compare import compare
    from coda.runtime.inputs import random_inputs

    if args.backward:
        return run_backward(args)
    function, dims = _function(args)
    program = function.program
    sizes = _sizes(program, dims, args.small)
    function.dims.update(sizes)  # the shapes of grouped dims, as in h: bf16[(B T), D], do not tell B and T apart
    device = args.device or _default_device()
    inputs = random_inputs(program, sizes, args.seed, device, optional=not args.without_optional)
    before = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    outputs = _outputs(program, function(**inputs), inputs)
    comparison = compare(program, before, outputs, dims=sizes)
    route = function.last_route
    assert route is not None  # set by every call
    ok = comparison.ok and not (args.device == "cuda" and route.kind == "reference")  # the kernel was asked for
    if args.json:
        report = {"program": program.name, "dims": sizes, "device": _device_name(device), "route": route.kind,
                  "route_reason": route.reason, "seed": args.seed}  # fmt: skip
        print_json({**report, **comparison.to_json(), "ok": ok})
    else:
        print(f"{program.name} at " + ", ".join(f"{name}={size}" for name, size in sizes.items()))
        print(f"ran: {_what_ran(function, device)}")
        print(comparison)
    return 0 if ok else 1


def run_backward(args: argparse.Namespace) -> int:
    """Forward and derived backward, each as it would be compiled, against autograd in float64. The yardstick is
    autograd through the program with eager roundings; a gradient whose eager error is smaller than a rounding of bf16
    may have that much."""
    from coda.passes import derive
    from coda.passes.eager import round_as_eager
    from coda.runtime.compare import Comparison, measure
    from coda.runtime.gradients import autograd, random_seeds
    from coda.runtime.inputs import random_inputs

    if args.file.endswith(".so"):
        raise CodaError.of("--backward derives the gradients of a program, and an artifact is compiled already")
    request = from_args(args)
    program = request.program
    backward, _ = derive(program)
    sizes = _sizes(program, request.dims, args.small)
    device = args.device or _default_device()
    inputs = random_inputs(program, sizes, args.seed, device, optional=not args.without_optional)
    seeds = random_seeds(program, backward.backward, sizes, args.seed + 1, device)
    routes = {}

    def call(part: Program, operands: dict[str, Any]) -> dict[str, Any]:
        known: Any = _known(part, sizes)
        function = coda.compile(part, device="cpu" if args.device == "cpu" else None, **known)
        results = function(**{p.name: operands[p.name] for p in part.params})
        routes[part.name] = str(function.last_route)
        return dict(
            zip((o.name for o in part.outputs), results if isinstance(results, tuple) else (results,), strict=True)
        )

    kept = call(backward.forward, inputs)
    got = call(backward.backward, {**inputs, **kept, **{f"d_{name}": seed for name, seed in seeds.items()}})
    exact = autograd(program, inputs, seeds, sizes)
    eager = autograd(round_as_eager(program), inputs, seeds, sizes, exact=False)
    outputs = {o.name: o for o in backward.backward.outputs}
    errors = []
    for param, name in backward.gradients.items():
        reference, yardstick = exact[param], eager[param]
        assert reference is not None and yardstick is not None  # differentiate leaves out what nothing depends on
        errors.append(measure(outputs[name], got[name], reference, yardstick.to(got[name].dtype)))
    comparison = Comparison(tuple(replace(e, limit=max(e.limit, BF16_ROUNDING)) for e in errors))
    if args.json:
        print_json({"program": program.name, "dims": sizes, "routes": routes, **comparison.to_json()})
    else:
        print(f"gradients of {program.name} at " + ", ".join(f"{name}={size}" for name, size in sizes.items()))
        print("\n".join(f"ran: {name}: {route}" for name, route in routes.items()))
        print(comparison)
    return 0 if comparison.ok else 1


def _known(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that a program has axes or symbols for."""
    symbols = {s.name for axis in program.axes for s in axis.size.free_symbols} | {a.name for a in program.axes}
    return {name: size for name, size in sizes.items() if name in symbols}


def _function(args: argparse.Namespace) -> tuple[CompiledProgram, dict[str, int]]:
    """The callable, and the sizes that were asked for."""
    if args.file.endswith(".so"):
        for option, given in (("--const", args.const), ("--tile", args.tile)):
            if given:
                raise CodaError.of(f"{option} has no meaning for an artifact, where it is fixed")
        return coda.load(args.file, program=args.program), args.dims
    request = from_args(args)
    device = "cpu" if args.device == "cpu" else None
    dims: Any = request.dims
    return coda.compile(request.program, tile=request.tile, device=device, **dims), request.dims


def _sizes(program: Program, dims: dict[str, int], small: bool) -> dict[str, int]:
    """A size for every axis."""
    from coda.runtime.binding import bind
    from coda.runtime.inputs import small_sizes

    if small:
        return small_sizes(program, dims)
    sizes = bind(program, {}, dims)
    missing = [axis.name for axis in program.free_axes if axis.name not in sizes]
    if missing:
        raise CodaError.of(f"the sizes of {', '.join(missing)} are not known", "give them with --dims, or use --small")
    return sizes


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _what_ran(function: CompiledProgram, device: str) -> str:
    """Whether it was the kernel, and if not, why."""
    route = function.last_route
    if route is not None and route.kind in ("kernel", "copy"):
        return f"the kernel on {_device_name(device)}" + (f", on a {route}" if route.kind == "copy" else "")
    if route is not None and route.kind == "unfused":
        return f"separate kernels on {_device_name(device)}: {route.reason}"
    why = "there is no GPU here" if device == "cpu" and _default_device() == "cpu" else route and route.reason
    return f"the reference interpreter on {_device_name(device)}, not the kernel" + (f": {why}" if why else "")


def _outputs(program: Program, results: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """All outputs by name, as the program declares them: those returned, and the inout parameters written."""
    returned = iter(() if results is None else results if isinstance(results, tuple) else (results,))
    return {o.name: inputs[o.into] if o.into else next(returned) for o in program.outputs}
