"""What the forward keeps for the backward, and what the backward computes again.

A kept value costs its bytes, once read and once written, unless the forward has it in memory anyway. Pointwise math
done again costs nothing that shows beside a product, but an operand of a product must be in memory: computed again it
is written again. So what to keep is the cheapest set that separates what the gradients read from what must not be
computed again: products, reductions and opaque calls. That is a minimum cut, weighted in bytes; of equal ones the one
closest to the gradients is taken, so a preactivation is kept with its bias, and 1/rms, not the mean. With
``memory="low"`` products are computed again, and operands of products, whatever that costs. What the calls of both
read (q, k and v) is kept before all else.

Parameters and outputs of the program cost nothing: they are there. A value of which an output is the rounding (``z``
and the ``bf16`` it is returned as) is read from that output. A kept value is stored in the dtype of the matrices around
it, a statistic in f32: label ``algebraic (rounding moved)``, unless the program itself rounds there. Where that would
spoil an exponential, the forward has to round it before (``steady.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from coda.dtypes import F32, DType
from coda.frontend.rounding import is_stored, nearest_storage
from coda.ir import Node, Output, Param, Program, nominal, substitute, topological
from coda.ops import OPS, build
from coda.passes.delay_norm import delayed_operands
from coda.passes.edges import stored_values
from coda.passes.labels import BITWISE, Label, Note, note
from coda.passes.merge import core, merge
from coda.passes.mincut import INFINITE, vertex_cut
from coda.passes.naming import Fresh, source_name, taken_names
from coda.passes.schedule import Schedule
from coda.passes.steady import unsteady

_LEAVES = {"input", "const", "index", "size"}
_STEMS = {"dot": "acc", "rsqrt": "r", "reduce_mean": "mean", "reduce_logsumexp": "lse", "reduce_max": "top"}


@dataclass(frozen=True)
class Kept:
    """The forward with what it keeps, and the gradients over what is there then."""

    forward: Program
    params: tuple[Param, ...]  # operands of the forward, then kept values
    saved: tuple[str, ...]
    outputs: tuple[Output, ...]
    names: dict[Node, str]
    notes: tuple[Note, ...]
    unsteady: tuple[Node, ...]  # of the program: see steady.py

    def reads(self, name: str) -> bool:
        return any(n.op == "input" and n.attr("name") == name for n in topological(o.value for o in self.outputs))


def keep_for(program: Program, gradients: Program, memory: str, numerics: str = "fused") -> Kept:
    """Decide what ``program`` keeps so that ``gradients``, which read values of it, can be computed."""
    there = _there(program)
    fresh = Fresh(taken_names(program) | taken_names(gradients))
    extra = _outputs(program, {n: n.dtype for n in _called(program, gradients, there)}, fresh)
    there = _there(replace(program, outputs=(*program.outputs, *extra.values())))
    gradients, recovered = _recover(program, gradients, there)
    cheapest = _cheapest(program, gradients, there, memory, numerics)
    extra |= _outputs(program, {n: stored_dtype(n) for n in cheapest}, fresh)
    notes = (*recovered, *(_note(node, output) for node, output in extra.items()))
    forward = program.with_outputs((*program.outputs, *extra.values())) if extra else program
    there |= extra
    new = substitute((o.value for o in gradients.outputs), {n: _read(o, n) for n, o in there.items()})
    results = tuple(replace(o, value=new[o.value]) for o in gradients.outputs)
    read = {n.attr("name") for n in topological(o.value for o in results) if n.op == "input"}
    saved = [o for o in dict.fromkeys(there.values()) if o.name in read]
    params = [p for p in program.params if p.name in read] + [Param(o.name, o.type) for o in saved]
    names = {new[node]: name for node, name in gradients.names if node in new}
    open_ = unsteady(gradients, {n for n in there if is_statistic(n)}, there)
    return Kept(forward, tuple(params), tuple(o.name for o in saved), results, names, notes, open_)


def _called(program: Program, gradients: Program, there: dict[Node, Output]) -> list[Node]:
    """The values of the forward that opaque calls of the gradients read, which must have just their dtype. Most are
    operands and results of the forward's own calls, so in memory."""
    forward = set(program.nodes())
    read = dict.fromkeys(_in(forward, a) for n in gradients.nodes() if n.op == "call" for a in n.args)
    exact = {n for n, output in there.items() if output.type.dtype == n.dtype}
    return [n for n in read if n in forward - exact and n.op not in _LEAVES]


def _in(forward: set[Node], value: Node) -> Node:
    """A value without what only moves its axes, as the forward has it."""
    while value not in forward and value.op in ("layout", "transpose"):
        (value,) = value.args
    return value


def _there(program: Program) -> dict[Node, Output]:
    """The values that outputs hold, exactly or (a computed one that is no statistic) in their rounding."""
    there: dict[Node, Output] = {}
    outputs = [o for o in program.outputs if o.into is None and not o.is_partial and o.value.op not in _LEAVES]
    for output in outputs:
        there.setdefault(output.value, output)
        there.setdefault(_without_layout(output.value), output)
    for output in outputs:
        value = _without_layout(output.value)
        if value.op == "cast" and not value.attr("saturate") and output.type.dtype.bits >= 16:
            (exact,) = value.args
            if exact.dtype == F32 and exact.op not in _LEAVES and not is_statistic(exact):
                there.setdefault(exact, output)
    return there


def _without_layout(value: Node) -> Node:
    return value.args[0] if value.op == "layout" and value.args[0].op not in _LEAVES else value


def _recover(program: Program, gradients: Program, there: dict[Node, Output]) -> tuple[Program, tuple[Note, ...]]:
    """The gradients with ``acc`` read as ``z / r``, where ``z = r * acc`` is there and r, a 1/rms, is never 0."""
    found = {}
    for z in there:
        for r, acc in ((z.args[i], z.args[1 - i]) for i in (0, 1) if z.op == "mul"):
            if is_never_zero(r) and acc.dtype == F32 and acc.op not in _LEAVES and acc not in there:
                found[acc] = (z, r)
    if not found:
        return gradients, ()
    replacements = {z: z for z in there} | {acc: build("div", z, r, span=acc.span) for acc, (z, r) in found.items()}
    new = substitute((o.value for o in gradients.outputs), replacements)
    results = tuple(replace(o, value=new[o.value]) for o in gradients.outputs)
    names = {new[n]: name for n, name in gradients.names if n in new}
    used = {n for o in results for n in topological([o.value])}
    notes = tuple(
        note(
            "save",
            f"a product is recovered from '{there[z].name}'",
            Label(f"divided by the factor of '{there[z].name}'"),
            acc,
        )
        for acc, (z, _) in found.items()
        if replacements[acc] in used
    )
    return Program.of(gradients.name, gradients.params, results, names), notes


def _cheapest(
    program: Program, gradients: Program, there: dict[Node, Output], memory: str, numerics: str
) -> list[Node]:
    """The values to keep besides what is there."""
    forward = set(program.nodes())
    computed = topological((o.value for o in gradients.outputs), lambda n: () if n in forward else n.args)

    def again(node: Node) -> tuple[Node, ...]:
        """The values from which a value can be computed again."""
        return () if node in there or node in never else node.args

    never = {n for n in forward if _is_over_an_axis(n) or n.op == "call" or (n.op == "dot" and memory != "low")}
    operands = _operands(forward, gradients, never, numerics) if memory != "low" else set()
    read = [n for n in computed if n in forward]
    around = [n for n in topological(read, again) if n not in there and n.op not in _LEAVES]
    written = {n for n in stored_values(program, Schedule(program, merge(program)[0])) if n.dtype == stored_dtype(n)}
    to_keep = {n: _bytes(n) * (1 if n in written else 2) for n in around}
    to_compute = {n: INFINITE if n in never else 2 * _bytes(n) for n in around if n in never or n in operands}
    edges = [(a, n) for n in around for a in again(n) if a in to_keep]
    return vertex_cut(to_keep, edges, to_compute, [n for n in read if n in to_keep])


def _operands(forward: Collection[Node], gradients: Program, never: Collection[Node], numerics: str) -> set[Node]:
    """The values of the forward that products of the gradients read from memory: ``h`` of ``dy.T @ (h * g)``, of which
    the vector moves behind the product, but all of ``dy.T @ (h * r * g)``, as ``h * r`` would be a matrix of its own.
    What is not computed again, ``never``, has no operands here."""
    given = {n: build("input", name=f"kept {i}", type=n.type) for i, n in enumerate(never)}
    new = substitute((o.value for o in gradients.outputs), given)
    known = {new[n]: n for n in forward if n in new}
    apart = gradients.with_outputs(replace(o, value=new[o.value]) for o in gradients.outputs)
    operands = delayed_operands(apart, numerics)
    pairs = [(core(a), core(b)) for dot, args in operands.items() for a, b in zip(dot.args, args, strict=True)]
    return {known[b if b in known else a] for a, b in pairs if a in known or b in known}


def _bytes(node: Node) -> int:
    return max(1, nominal(node.type.elements)) * stored_dtype(node).bytes


def _is_over_an_axis(node: Node) -> bool:
    """Whether a value is made of all along an axis: a reduction, or the one element that is picked."""
    return OPS[node.op].family == "reduce" or node.op == "pick"


def stored_dtype(node: Node) -> DType:
    """The dtype in which a value is kept."""
    if node.dtype != F32 or is_stored(node) or is_statistic(node):
        return node.dtype
    return nearest_storage(node)


def is_statistic(node: Node) -> bool:
    """Whether a value is made of reductions, picked elements and vectors, no wider than one of them: 1/rms, a mean, a
    log-sum-exp."""
    found: dict[Node, bool] = {}
    for n in topological([node]):
        if n.op == "input" or not n.type.dims:
            found[n] = len(n.type.axes) <= 1
        elif _is_over_an_axis(n):
            found[n] = True
        else:
            wide = [a for a in n.args if a.type.dims]
            narrow = any(a.type.names == n.type.names for a in wide)
            found[n] = n.op != "dot" and narrow and all(found[a] for a in wide)
    return found[node]


def is_never_zero(node: Node) -> bool:
    """Whether a value is a statistic that one may divide by: 1/rms of finite rows."""
    return node.op == "rsqrt" and is_statistic(node)


def _outputs(program: Program, kept: Mapping[Node, DType], fresh: Fresh) -> dict[Node, Output]:
    """An output for each kept value, in the dtype given, named as in the source or after what makes it."""
    known = dict(program.names)
    outputs = {}
    for node, dtype in kept.items():
        stored = node if node.dtype == dtype else build("cast", node, dtype=dtype, saturate=False, span=node.span)
        name = source_name(node, known) or _STEMS.get(node.op, "kept")
        outputs[node] = Output(fresh(name), stored, stored.type)
    return outputs


def _read(output: Output, node: Node) -> Node:
    """An output as the backward reads it, with the dims of the value it stands for."""
    value = build("input", name=output.name, type=output.type)
    return value if value.type.dims == node.type.dims else build("layout", value, dims=node.type.dims)


def _note(node: Node, output: Output) -> Note:
    rounds = node.dtype != output.type.dtype
    label = Label(f"the backward reads '{output.name}' rounded to {output.type.dtype}") if rounds else BITWISE
    return note("save", f"'{output.name}': {output.type} is kept for the backward", label, node)
