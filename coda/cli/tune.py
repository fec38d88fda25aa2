"""coda tune: measure the kernels of a program on this GPU and remember the best.

Each product of the program is built at about a dozen tiles, checked against float64, and timed beside separate kernels
(cuBLAS and torch.compile) in interleaved rounds. What spills, fails or is wrong is dropped. The choice is kept beside
the built artifacts and used from then on by coda.compile, run and lower, for sizes like these, on this GPU. Where
separate kernels are no slower, coda.compile runs those.
"""

from __future__ import annotations

import argparse

from coda import build
from coda.cli.common import add_json, add_request, print_json, table
from coda.cli.lower import Part, add_backward, parts_of
from coda.cli.progress import progress
from coda.cli.request import all_from_args
from coda.tuning.choice import Choice
from coda.tuning.decide import UNFUSED


def add(parser: argparse.ArgumentParser) -> None:
    add_request(parser, "a program (.coda) or a config (.toml)")
    add_backward(parser)
    parser.add_argument(
        "--jobs", type=_at_least_one, metavar="N", help="compile N kernels at a time (default: all cores)"
    )
    parser.add_argument(
        "--budget", type=_at_least_one, default=60, metavar="SECONDS",
        help="time for so long at most, all kernels together; building comes on top (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="measure also what was measured before")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from coda.tuning.tune import known_sizes, this_device, tune

    found = [part for request in all_from_args(args) for part in parts_of(request, args)]
    parts = [(p.request.program, p.request.dims, p.chunk) for p in found if isinstance(p, Part)]
    work = [(program, known_sizes(program, dims), chunk) for program, dims, chunk in parts]
    device = this_device()
    reports = []
    with progress("tuning " + ", ".join(program.name for program, _, _ in work)) as say:
        for program, sizes, chunk in work:
            kernels, seconds = build.lowered(program, chunk=chunk, dims=sizes), args.budget / len(work)
            reports.append(tune(kernels, sizes, jobs=args.jobs, seconds=seconds, again=args.again, say=say))
    if args.json:
        choices = [choice.to_json() for report in reports for choice in report.choices]
        saved = all(report.saved for report in reports)
        left_out = {name: reason for report in reports for name, reason in report.left_out.items()}
        about = {"device": device.name, "driver": device.driver, "saved": saved}
        print_json({**about, "choices": choices, "left_out": left_out})
        return 0
    print(f"on {device.name}, driver {device.driver}")
    print("\n\n".join(text(choice) for report in reports for choice in report.choices))
    for name, reason in (item for report in reports for item in report.left_out.items()):
        print(f"\nnot measured by itself: {name}, as {reason}")
    if not all(report.saved for report in reports):
        print("the cache cannot be written: this is not remembered; CODA_CACHE names another folder")
    return 0


def text(choice: Choice) -> str:
    """What was measured and what follows from it, for people."""
    sizes = ", ".join(f"{name}={size}" for name, size in choice.dims.items())
    rows = [("", "ms", "ratio", "quartiles", "")]
    for name, timing in sorted(choice.timings.items(), key=lambda item: item[1].ratio):
        note = choice.unfused if name == UNFUSED else "chosen" if name == choice.tile else ""
        low, high = timing.quartiles
        rows.append((name, f"{timing.ms:.4f}", f"{timing.ratio:.3f}", f"{low:.3f} to {high:.3f}", note))
    lines = [f"{choice.program} at {sizes}", table(rows)]
    lines += [f"  dropped {name}: {reason}" for name, reason in choice.dropped.items()]
    if choice.declined:
        lines.append(f"  not fused: {choice.reason}")
    elif choice.unfused_ms is None:
        lines.append(f"  nothing to compare with: {choice.unfused}")
    else:
        lines.append(f"  fused: {choice.fused_ms:.4g} ms; {choice.unfused} takes {choice.unfused_ms:.4g} ms")
    return "\n".join(lines)


def _at_least_one(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"'{value}' is not a whole number above 0")
    return int(value)
