"""Reverse mode: from a program to the program of its gradients.

Every operation's record carries its derivative as program text (``coda.ops``); this pass evaluates those texts over
the DAG, last operation first, and adds up what reaches each value. What is left to it is what no text can say, because
it is about axes:

* an operand that was broadcast gets the sum over the axes it lacks; a gradient that lacks an axis itself (that of a
  sum) counts once for each position along it;
* slices and parts of one value are put together again by ``stack`` and ``concat``, not padded and added;
* what only renames, groups or reorders axes passes the gradient on, and so does a rounding: a gradient is f32 until it
  is stored, as the operand of a product or as a result.

Only what is asked for is computed: a value that no wanted parameter reaches gets no gradient. A wanted path through an
operation without derivative is an error, never a silent zero. ``save.py`` then decides which values the forward keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import sympy

from coda.dtypes import BF16, F32, DType
from coda.errors import CodaError, Diagnostic, did_you_mean
from coda.frontend import expression
from coda.ir import Axis, Node, Output, Param, Program, substitute
from coda.ops import OPS, build
from coda.passes.axes import Part, add_all, arranged, conform, join_parts, join_slices, number, sum_to
from coda.passes.calls import call_gradients, leads
from coda.passes.chunk import chunk_axis
from coda.passes.labels import Note
from coda.passes.naming import Fresh, taken_names
from coda.passes.save import keep_for
from coda.passes.simplify import simplify
from coda.passes.steady import round_early

MEMORY = ("fast", "low")
_PASSES_ON = {"cast", "default", "layout", "partial", "finish"}


@dataclass(frozen=True)
class Backward:
    """A program and its gradients. ``forward`` is the program with further outputs for what has to be kept.
    ``backward`` takes operands of the forward, outputs of the forward (``saved``) and ``d_y`` for each output y; it
    returns for each parameter in ``gradients`` the output named there."""

    forward: Program
    backward: Program
    saved: tuple[str, ...]
    gradients: dict[str, str]
    notes: tuple[Note, ...] = ()
    chunk: str | None = None  # the axis in whose chunks ``backward`` is to be computed

    def joined(self) -> Program:
        """Gradients from operands and ``d_y`` alone: the forward in place of what it keeps. For proofs and tests."""
        kept = {o.name: o for o in self.forward.outputs if o.name in self.saved}
        replaced = {build("input", name=n, type=o.type): arranged(o.value, o.type) for n, o in kept.items()}
        new = substitute((o.value for o in self.backward.outputs), replaced)
        outputs = [replace(o, value=new[o.value]) for o in self.backward.outputs]
        own = {p.name for p in self.forward.params}
        seeds = [p for p in self.backward.params if p.name not in own | kept.keys()]
        return Program.of(self.backward.name, (*self.forward.params, *seeds), outputs)


def differentiate(
    program: Program,
    wrt: Sequence[str] | None = None,
    *,
    of: Sequence[str] | None = None,
    memory: str = "fast",
    numerics: str = "fused",
    accumulate: Collection[str] = (),
) -> Backward:
    """The gradients for the parameters ``wrt`` (by default every float tensor that is no frozen weight) of the outputs
    ``of`` (by default all that depend on them).

    A gradient has the type of its parameter, that of partial sums the type of their sum, each of which it is the
    gradient of; for the names in ``accumulate`` it is an inout f32 tensor and added to.
    ``memory="low"`` recomputes products instead of keeping their results. Where the backward has tensors over rows and
    columns of which the program returns nothing, as the gradient of the logits of a loss, it names their axis
    ``chunk``. ``numerics`` says whether row factors will leave the operands of products (``delay_norm.py``), which then
    are others. A parameter that the outputs do not depend on gets no gradient.
    """
    if memory not in MEMORY:
        raise CodaError.of(f"memory={memory!r} is not known", "it is 'fast' or 'low'")
    wanted = _wanted_params(program, wrt)
    sweep = _Sweep(program, {p.name for p in wanted})
    seeds = sweep.seed(_known(of, [o.name for o in program.outputs], "output"))
    sweep.run()
    found = {p: g for p in wanted if (g := sweep.gradient(p)) is not None}
    if not found:
        raise CodaError.of(
            f"no output of '{program.name}' depends on {', '.join(p.name for p in wanted) or 'a tensor'}"
        )
    mains = _known(accumulate, [p.name for p in found], "gradient")
    outputs = [_output(p, g, sweep.fresh(f"d_{p.name}"), p.name in mains) for p, g in found.items()]
    gradients = {p.name: o.name for p, o in zip(found, outputs, strict=True)}
    outputs.sort(key=lambda o: o.into is None)
    inouts = [Param(o.name, o.type, inout=True) for o in outputs if o.into]
    gradient_program = simplify(Program.of(f"{program.name}_backward", (), outputs, dict(program.names) | sweep.names))
    kept = keep_for(program, gradient_program, memory, numerics)
    if kept.unsteady:
        steady, notes = round_early(program, kept.unsteady)
        again = differentiate(steady, wrt, of=of, memory=memory, numerics=numerics, accumulate=accumulate)
        return replace(again, notes=(*notes, *again.notes))
    params = [*kept.params, *(s for s in seeds if kept.reads(s.name)), *inouts]
    backward = simplify(Program.of(gradient_program.name, params, kept.outputs, kept.names))
    return Backward(kept.forward, backward, kept.saved, gradients, kept.notes, chunk_axis(program, backward))


def _wanted_params(program: Program, wrt: Sequence[str] | None) -> list[Param]:
    if wrt is None:
        return [p for p in program.params if p.type.dims and not p.frozen and _why_none(p) is None]
    wanted = [program.param(name) for name in _known(wrt, [p.name for p in program.params], "parameter")]
    for param in wanted:
        if (why := _why_none(param)) is not None:
            raise CodaError.of(f"parameter '{param.name}' is {why} and has no gradient")
    return wanted


def _why_none(param: Param) -> str | None:
    """Why a parameter can have no gradient, if it cannot."""
    if param.inout:
        return "accumulated into"
    if param.type.partial and param.type.partial.kind != "sum":
        return str(param.type)
    return None if param.type.dtype.kind == "float" else f"of dtype {param.type.dtype}"


def _known(names: Collection[str] | None, known: Sequence[str], what: str) -> Collection[str]:
    """The names, checked; all where none are given."""
    for name in names or ():
        if name not in known:
            raise CodaError.of(f"there is no {what} '{name}'", did_you_mean(name, set(known)) or f"there are {known}")
    return known if names is None else names


def _output(param: Param, gradient: Node, name: str, accumulated: bool) -> Output:
    type_ = param.type.with_dtype(F32 if accumulated else param.type.dtype)
    value = conform(gradient, type_)
    if value.dtype != type_.dtype:
        value = build("cast", value, dtype=type_.dtype, saturate=False)
    return Output(name, value, type_, into=name if accumulated else None)


def gradient_dtype(dtype: DType) -> DType:
    """The dtype in which the gradient of a stored value is stored: fp8 has not the range, so bf16 there."""
    return BF16 if dtype.bits == 8 else dtype


class _Sweep:
    """What reaches each value from behind, collected from the last operation to the first."""

    def __init__(self, program: Program, wrt: Collection[str]):
        self.program, self.wrt = program, wrt
        self.fresh = Fresh(taken_names(program))
        self.names: dict[Node, str] = {}
        self.reaching: dict[Node, frozenset[str]] = {}  # the wanted parameters that a value depends on
        for node in program.nodes():
            self.reaching[node] = self._reaching(node)
        self.whole: dict[Node, list[Node]] = defaultdict(list)
        self.slices: dict[tuple[Node, str], dict[int, Node]] = defaultdict(dict)
        self.parts: dict[tuple[Node, str], list[Part]] = defaultdict(list)
        self.input_gradients: dict[str, Node] = {}
        self.leads = leads(program)
        self.results: dict[Node, dict[int, Node]] = defaultdict(dict)  # gradients of the results of calls

    def _reaching(self, node: Node) -> frozenset[str]:
        if node.dtype.kind != "float":
            return frozenset()
        if node.op == "input":
            return frozenset({node.attr("name")} & set(self.wrt))
        return frozenset().union(*(self.reaching[a] for a in node.args))

    def seed(self, of: Collection[str]) -> list[Param]:
        """A parameter d_y for each output y that depends on a wanted parameter."""
        seeds = []
        for output in self.program.outputs:
            if output.name in of and self.reaching[output.value]:
                type_ = output.type.with_dtype(gradient_dtype(output.type.dtype))
                seeds.append(Param(self.fresh(f"d_{output.name}"), type_))
                self.whole[output.value].append(build("input", name=seeds[-1].name, type=type_))
        return seeds

    def run(self) -> None:
        names = dict(self.program.names)
        for node in reversed(self.program.nodes()):
            if not self.reaching[node]:
                continue
            dy = self.total(node)
            if node.op == "call":
                self.through_call(node, dy)
            if node.op == "call" or dy is None:
                continue
            if node.op == "input":
                self.input_gradients[node.attr("name")] = dy
                continue
            if node in names:
                self.names.setdefault(dy, f"d_{names[node]}")
            self.pass_on(node, dy)

    def gradient(self, param: Param) -> Node | None:
        return self.input_gradients.get(param.name)

    def total(self, node: Node) -> Node | None:
        """The gradient of a value: all that reached it; None where nothing did."""
        reached = list(self.whole.get(node, ()))
        for axis in node.type.axes:
            if (node, axis.name) in self.slices:
                reached.append(join_slices(self.slices[node, axis.name], axis))
            if (node, axis.name) in self.parts:
                reached.append(join_parts(self.parts[node, axis.name], axis, self.fresh))
        return arranged(add_all(reached), node.type) if reached else None

    def pass_on(self, node: Node, dy: Node) -> None:
        """From the gradient of a value to those of its operands."""
        if node.op == "dot":
            dy = self.rounded(node, dy)
        for position, operand in enumerate(node.args):
            if not self.reaching[operand]:
                continue
            if node.op == "slice":
                self.slices[operand, node.attr("axis")][node.attr("index")] = dy
            elif node.op == "part":
                self.parts[operand, node.attr("axis")].append(Part(node.attr("start"), node.attr("into"), dy))
            else:
                gradient = self.local(node, position, dy)
                self.whole[operand].append(sum_to(gradient, operand.type, _broadcast_axes(node)))

    def through_call(self, node: Node, dy: Node | None) -> None:
        """Of an opaque call: once the gradients of all results are known, those of its operands."""
        lead = self.leads[node]
        if dy is not None:
            self.results[lead][node.attr("result")] = dy
            self.names.setdefault(dy, f"d_{node.attr('callee').results[node.attr('result')][0]}")
        if node is lead and self.results[lead]:
            wanted = [i for i, a in enumerate(node.args) if self.reaching[a]]
            try:
                gradients = call_gradients(node, self.results[lead], wanted)
            except CodaError as error:
                error.source = self.program.source
                raise
            for position, gradient in gradients.items():
                self.whole[node.args[position]].append(gradient)

    def local(self, node: Node, position: int, dy: Node) -> Node:
        """The gradient of one operand, from the text of the operation's record or the rule for its axes."""
        if node.op in _PASSES_ON:
            return dy
        if node.op in _AXIS_RULES:
            return _AXIS_RULES[node.op](node, position, dy)
        texts = OPS[node.op].derivative
        text = texts[position] if texts else None
        if text is None:
            raise self.no_derivative(node, position)
        return expression(text, node.span, **_names_in_text(node, dy))

    def no_derivative(self, node: Node, position: int) -> CodaError:
        params = ", ".join(sorted(self.reaching[node.args[position]]))
        which = "" if len(node.args) == 1 else f" for its {('first', 'second', 'third')[min(position, 2)]} operand"
        hint = f"leave {params} out of wrt, if the gradient is not wanted"
        message = f"'{node.op}' has no derivative{which}, which depends on {params}"
        return CodaError([Diagnostic(message, node.span, hint)], self.program.source)

    def rounded(self, dot: Node, dy: Node) -> Node:
        """The gradient of a product as an operand of products: with its dims, in a storage dtype."""
        name = self.names.pop(dy, "d_acc")
        dtype = gradient_dtype(dot.args[0].dtype)
        dy = conform(dy, dot.type)
        dy = dy if dy.dtype == dtype else build("cast", dy, dtype=dtype, saturate=False)
        if dy.op != "input":
            self.names.setdefault(dy, name)
        return dy


def _names_in_text(node: Node, dy: Node) -> dict[str, Node]:
    """What the derivative texts of ``coda.ops`` may name."""
    operands = list(node.args)
    if node.op == "dot":
        operands = [x if x.dtype == dy.dtype else build("cast", x, dtype=dy.dtype, saturate=False) for x in operands]
    names = dict(zip("abc", operands, strict=False)) | {"y": node, "dy": dy}
    if OPS[node.op].family == "reduce":
        over = node.attr("axes")
        sizes = [a.size for a in node.args[0].type.axes if a.name in over]
        names["count"] = build("size", expr=sympy.Mul(*sizes))
        names["ties"] = build("reduce_sum", build("eq", node.args[0], node), axes=over)
    return names


def _broadcast_axes(node: Node) -> list[Axis]:
    """The axes over which an operation broadcasts its operands: not the one along which it joins them, and none of
    a product."""
    joined = node.attr("axis") if node.op in ("stack", "concat") else None
    return [a for a in node.type.axes if a != joined and node.op != "dot"]


# Operations whose derivative is about axes.


def _stack(node: Node, position: int, dy: Node) -> Node:
    axis = node.attr("axis")
    return build("slice", dy, axis=axis.name, index=position) if dy.type.axis(axis.name) else dy


def _concat(node: Node, position: int, dy: Node) -> Node:
    axis, parts = node.attr("axis"), node.attr("parts")
    if dy.type.axis(axis.name) is None:
        return dy
    axes: list[Axis] = [a.type.axis(name) for a, name in zip(node.args, parts, strict=True)]  # type: ignore[misc]
    start = sympy.expand(sympy.Add(*(a.size for a in axes[:position])))
    return build("part", dy, axis=axis.name, start=start, into=axes[position])


def _pick(node: Node, position: int, dy: Node) -> Node:
    """dy at the picked position of each row: the label that lies outside matches none."""
    axis = node.args[0].type.axis(node.attr("axis"))
    return build("where", build("eq", node.args[1], build("index", axis=axis)), dy, number(0.0))


def _transpose(node: Node, position: int, dy: Node) -> Node:
    """Axes are matched by name, so the swap only serves what reads dims: products."""
    return build("transpose", dy) if dy.type.dims == node.type.dims else dy


_AXIS_RULES: dict[str, Callable[[Node, int, Node], Node]] = {
    "stack": _stack, "concat": _concat, "pick": _pick, "transpose": _transpose,
}  # fmt: skip
