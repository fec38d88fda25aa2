"""Lower a program with any number of products to a schedule.

What fits one kernel becomes one. Otherwise the passes cut the program into kernels (``coda.passes``), each a program of
its own, which are lowered one by one; a finish kernel joins the kernel whose partial results it adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coda.errors import CodaError
from coda.ir import Node, Output, Program, substitute
from coda.ops import build
from coda.ops.reduce import read_of
from coda.passes import optimize, partition
from coda.passes.bare import LABEL as BARE
from coda.passes.bare import products
from coda.passes.kernels import Kernel as Part
from coda.passes.kernels import Partition
from coda.passes.labels import Note, note
from coda.passes.numbers import with_head_sizes
from coda.passes.segments import has_calls
from coda.target.lower import lower, program_args
from coda.target.product import MAX_TERMS
from coda.target.rows import lower_rows
from coda.target.schedule import Kernel, Schedule, schedule_steps
from coda.target.twins import MOST_MEMBERS, are_twins, members
from coda.target.unfinished import finished_by_readers

# The products that one kernel takes: sums; weights side by side, which need sizes that are numbers, or gate
# and up alone; products with one right operand, where what follows is the same for all; then none together.
MERGES: tuple[dict[str, int], ...] = (
    {"K": MAX_TERMS, "N": 16, "M": MOST_MEMBERS},
    {"K": MAX_TERMS, "N": 16},
    {"K": MAX_TERMS, "N": 2, "M": MOST_MEMBERS},
    {"K": MAX_TERMS, "N": 2},
    {"N": 2},
    {},
)


@dataclass(frozen=True)
class Lowered:
    """A program as kernels, and how they came about: ``parts`` are the programs of the steps as the passes cut them,
    ``notes`` what the passes did."""

    schedule: Schedule
    parts: tuple[Program, ...]
    notes: tuple[Note, ...] = ()


def lower_program(program: Program, numerics: str = "fused", sizes: Mapping[str, int] | None = None) -> Schedule:
    """The kernels of a program; see ``lower_noting``."""
    return lower_noting(program, numerics, sizes).schedule


def lower_noting(
    program: Program, numerics: str = "fused", sizes: Mapping[str, int] | None = None, early: bool = True
) -> Lowered:
    """The kernels of a program. Raises CodaError that says why where it cannot be lowered. ``numerics`` is that of the
    passes that cut it: where it is eager, no rounding moves. Of ``sizes`` those of heads become part of the kernels.
    With ``early`` products finish the sums of rows that they read (unfinished.py)."""
    program = with_head_sizes(program, sizes or {})
    if has_calls(program):
        called = ", ".join(dict.fromkeys(n.attr("callee").name for n in program.nodes() if n.op == "call"))
        hint = "coda lower builds its segments, coda.compile also calls what is between them"
        raise CodaError.of(f"'{program.name}' calls {called}, which no kernel computes", hint)
    try:
        return Lowered(Schedule.of(lower_kernel(program)), (program,))
    except CodaError as one:
        refusals = [one]
    optimized, notes = optimize(program, numerics)
    candidates = _by_time(optimized, sizes or {})
    for give_up in (False, True):  # epilogues that cannot be lowered
        for most in candidates:
            try:
                lowered = _lower_block(optimized, most, give_up, early)
                return replace(lowered, notes=(*notes, *lowered.notes))
            except CodaError as error:
                error.source = error.source or refusals[0].source
                refusals.append(error)
    raise refusals[1]


def _by_time(program: Program, sizes: Mapping[str, int]) -> list[Mapping[str, int]]:
    """What may be merged, in the order of the estimated times; of ways to the same kernels the first."""
    ways: dict[tuple[Program, ...], tuple[float, Mapping[str, int]]] = {}
    for most in MERGES:
        cut = partition(program, most)
        ways.setdefault(tuple(k.program for k in cut.kernels), (cut.seconds(sizes), most))
    return [most for _, most in sorted(ways.values(), key=lambda way: way[0])]


def _lower_block(program: Program, most: Mapping[str, int], give_up: bool, early: bool) -> Lowered:
    """The kernels with these merges. With ``give_up`` what cannot be lowered behind a product is its own kernel."""
    bare: dict[int, Note] = {}
    while True:
        cut = partition(program, most, bare)
        results = [o.name for o in cut.program.outputs]
        kernels = {k.name: k for k in (finished_by_readers(cut.kernels, results, lower) if early else cut.kernels)}
        joined = joined_finishes(list(kernels.values()))
        parts: list[Program] = []
        launches: list[list[Kernel]] = []  # the steps that each launch runs
        try:
            for whole in joined:
                group = kernels[whole.name].group
                parts += members(whole) if group is not None and group.kind == "M" else [whole]
                launches.append(_launch(parts[sum(map(len, launches)) :]))
        except CodaError as error:
            more = _stored_plainly(cut, kernels[whole.name], bare, error) if give_up else {}
            if not more:
                raise
            bare |= more
            continue
        steps = [step for launch in launches for step in launch]
        counts = [n for launch in launches for n in (len(launch), *[0] * (len(launch) - 1))]
        schedule = schedule_steps(cut.program, program_args(cut.program), steps, groups=counts)
        return Lowered(schedule, tuple(parts), (*cut.notes, *bare.values()))


def _launch(parts: Sequence[Program]) -> list[Kernel]:
    """Programs as the steps of one launch."""
    steps = [lower_kernel(part) for part in parts]
    if len(steps) > 1 and not are_twins(steps):
        raise CodaError.of(f"what follows the products of '{parts[0].name}' and '{parts[1].name}' is not the same")
    return steps


def _stored_plainly(cut: Partition, kernel: Part, bare: Mapping[int, Note], reason: CodaError) -> dict[int, Note]:
    """The products of a kernel whose epilogue could not be lowered, by number, each with the sentence why."""
    if kernel.kind != "gemm" or kernel.group is None:
        return {}
    message = reason.diagnostics[0].message
    numbers = [i for i, dot in enumerate(products(cut.program)) if dot in kernel.group.dots and i not in bare]
    return {i: note("bare", f"what is behind a product is a kernel of its own: {message}", BARE, kernel.group.dots[0])
            for i in numbers}  # fmt: skip


def lower_kernel(program: Program) -> Kernel:
    """A program as one kernel: a GEMM where it has products, else a row or map kernel."""
    has_products = any(n.op == "dot" for n in program.nodes())
    return lower(program) if has_products else lower_rows(program)


# -- finish kernels join the kernel in front of them -----------------------------------------------------------------


def joined_finishes(kernels: Sequence[Part]) -> list[Program]:
    """The programs of the kernels, each with the finish kernel that adds up its partial results."""
    programs = {k.name: k.program for k in kernels if k.kind != "finish"}
    written = {o.name: k.name for k in kernels for o in k.program.outputs}
    for finish in (k for k in kernels if k.kind == "finish"):
        partial = {o.name for p in programs.values() for o in p.outputs if o.is_partial}
        before = {written[name] for name in finish.reads & partial}
        if len(before) != 1:
            raise CodaError.of(f"'{finish.name}' adds up partial results of {len(before)} kernels; one can be lowered")
        (name,) = before
        later = _behind(kernels, name, finish)
        if later & finish.reads:
            raise CodaError.of(
                f"'{finish.name}' reads {', '.join(sorted(later & finish.reads))}, which is not there yet"
            )
        programs[name] = _joined(programs[name], finish.program)
    return list(programs.values())


def _behind(kernels: Sequence[Part], name: str, finish: Part) -> set[str]:
    """What is written between a kernel and its finish kernel."""
    names = [k.name for k in kernels]
    between = kernels[names.index(name) + 1 : names.index(finish.name)]
    return {o.name for k in between for o in k.program.outputs}


def _joined(program: Program, finish: Program) -> Program:
    """A kernel and its finish kernel as one program: what the second reads of the first is computed in place."""
    made = {o.name: o for o in program.outputs}
    known = {read_of(o.name, o.type): _value(o) for o in program.outputs if o.into is None}
    new = substitute((o.value for o in finish.outputs), known)
    outputs = [o for o in program.outputs if not o.is_partial]
    outputs += [replace(o, value=new[o.value]) for o in finish.outputs]
    params = [*program.params, *(p for p in finish.params if p.name not in {q.name for q in program.params})]
    return Program.of(program.name, [p for p in params if p.name not in made or p.inout], outputs, dict(program.names))


def _value(output: Output) -> Node:
    """The value of an output with the dims that its readers see."""
    value = output.value.args[0] if output.is_partial else output.value
    return value if value.type.dims == output.type.dims else build("layout", value, dims=output.type.dims)
