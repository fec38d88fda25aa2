"""The rules of the IR, as a table. ``verify`` runs between passes in tests and names the rule a pass has broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from coda.dtypes import TABLE
from coda.errors import CodaError, Diagnostic
from coda.frontend.rounding import round_operands
from coda.frontend.syntax import KEYWORDS
from coda.ir import Node, Output, Param, Program, appearing_axes, intern, size_symbol
from coda.ops import OPS, OpError
from coda.ops.reduce import PARTIALS


@dataclass(frozen=True)
class Rule:
    """``holds(program, subject)`` for each subject; ``sentence`` says what is wrong with a {subject} that breaks it."""

    name: str
    holds: Callable[[Program, Any], bool]
    sentence: str


def verify(program: Program) -> None:
    """Raises CodaError with every broken rule of an IR program."""
    broken = [
        Diagnostic(f"program '{program.name}': {rule.sentence.format(subject=describe(subject))} [{rule.name}]")
        for rules, subjects in (
            (PROGRAM_RULES, [program]),
            (PARAM_RULES, program.params),
            (NODE_RULES, program.nodes()),
            (OUTPUT_RULES, program.outputs),
        )
        for rule in rules
        for subject in subjects
        if not rule.holds(program, subject)
    ]
    if broken:
        raise CodaError(broken, program.source)


def describe(subject: Program | Param | Node | Output) -> str:
    return f"node {subject!r}" if isinstance(subject, Node) else f"'{subject.name}'"


def _is_name(name: str) -> bool:
    return name.isidentifier() and name.isascii() and name not in KEYWORDS and name not in TABLE


def _distinct(names: Iterable[str]) -> bool:
    names = list(names)
    return len(set(names)) == len(names)


def _find(program: Program, name: str) -> Param | None:
    return next((p for p in program.params if p.name == name), None)


# Programs.


def _one_size_per_axis(program: Program, _: Program) -> bool:
    return _distinct(a.name for a in program.axes)


def _symbols_are_free_axes(program: Program, _: Program) -> bool:
    """A size symbol that has the name of an axis is the size of that axis."""
    derived = {size_symbol(a.name) for a in program.axes if not a.is_free}
    return not any(derived & a.size.free_symbols for a in program.axes)


PROGRAM_RULES = (
    Rule("name", lambda p, _: _is_name(p.name), "the name is not an identifier of the language"),
    Rule("results", lambda p, _: bool(p.outputs), "there is no output"),
    Rule("axes", lambda p, _: p.axes == appearing_axes(p.params, p.outputs),
         "'axes' must be ir.appearing_axes(params, outputs)"),
    Rule("axis-size", _one_size_per_axis, "an axis name has two sizes"),
    Rule("size-symbol", _symbols_are_free_axes, "a size uses the symbol of an axis whose size is another expression"),
    Rule("distinct-params", lambda p, _: _distinct(q.name for q in p.params), "two parameters have one name"),
    Rule("distinct-outputs", lambda p, _: _distinct(o.name for o in p.outputs), "two outputs have one name"),
    Rule("accumulations-first", lambda p, _: list(p.outputs) == sorted(p.outputs, key=lambda o: o.into is None),
         "outputs that accumulate into a parameter come before the others"),
)  # fmt: skip


# Parameters.


def _inout_is_written(program: Program, param: Param) -> bool:
    return not param.inout or any(o.into == param.name for o in program.outputs)


PARAM_RULES = (
    Rule("param-name", lambda p, q: _is_name(q.name) and q.name not in {a.name for a in p.axes},
         "parameter {subject} is not an identifier, or is the name of an axis"),
    Rule("default", lambda p, q: q.default is None or q.is_scalar,
         "parameter {subject} has a default but is no scalar"),
    Rule("inout", _inout_is_written, "no output accumulates into inout parameter {subject}"),
    Rule("inout-given", lambda p, q: not (q.inout and q.optional), "parameter {subject} is both inout and optional"),
)  # fmt: skip


# Nodes.


def _is_interned(program: Program, node: Node) -> bool:
    return intern(node.op, node.args, dict(node.attrs), node.type) is node


def _type_is_inferred(program: Program, node: Node) -> bool:
    try:
        return OPS[node.op].infer([a.type for a in node.args], dict(node.attrs)) == node.type
    except (OpError, KeyError):
        return False


def _operands_are_stored(program: Program, node: Node) -> bool:
    return node.op != "dot" or round_operands(*node.args) == node.args


def _input_is_declared(program: Program, node: Node) -> bool:
    if node.op != "input":
        return True
    param = _find(program, node.attr("name"))
    return param is not None and param.type == node.type and not param.inout


def _reads_optional(program: Program, node: Node) -> bool:
    if node.op != "input":
        return False
    param = _find(program, node.attr("name"))
    return param is not None and param.optional


def _optional_has_identity(program: Program, node: Node) -> bool:
    return node.op == "default" or not any(_reads_optional(program, a) for a in node.args)


def _default_is_of_optional(program: Program, node: Node) -> bool:
    return node.op != "default" or _reads_optional(program, node.args[0])


def _constant_has_dtype(program: Program, node: Node) -> bool:
    if node.op != "const":
        return True
    return type(node.attr("value")) is {"bool": bool, "i64": int, "f32": float}.get(node.dtype.name)


NODE_RULES = (
    Rule("operation", lambda p, n: n.op in OPS, "{subject} is not in the operation table"),
    Rule("interned", _is_interned, "{subject} was not made with ops.build or ir.intern"),
    Rule("typed", _type_is_inferred, "the type of {subject} is not the one inferred from its operands"),
    Rule("axes-distinct", lambda p, n: _distinct(a.name for a in n.type.axes), "{subject} has an axis name twice"),
    Rule("stored-operands", _operands_are_stored, "{subject} needs operands in a storage dtype: a cast is missing"),
    Rule("declared", _input_is_declared, "{subject} is not a declared parameter, or reads an inout one"),
    Rule("identity", _optional_has_identity, "{subject} reads an optional parameter without a 'default'"),
    Rule("default-of", _default_is_of_optional, "{subject} is not over an optional parameter"),
    Rule("constant", _constant_has_dtype, "{subject} has a value that is not of its dtype"),
    Rule("partial-of", lambda p, n: n.op != "partial" or n.args[0].op.removeprefix("reduce_") in PARTIALS,
         "{subject} is not over a reduction, or over a mean, which has none"),
    Rule("partial-result", lambda p, n: not any(a.op == "partial" for a in n.args),
         "{subject} reads an unfinished reduction, which can only be an output"),
)  # fmt: skip


# Outputs.


def _into_is_inout(program: Program, output: Output) -> bool:
    if output.into is None:
        return _find(program, output.name) is None
    param = _find(program, output.into)
    return param is not None and param.inout and param.type == output.type and output.name == output.into


OUTPUT_RULES = (
    Rule("output-name", lambda p, o: _is_name(o.name) and o.name not in {a.name for a in p.axes},
         "output {subject} is not an identifier, or is the name of an axis"),
    Rule("output-dtype", lambda p, o: o.value.dtype == o.type.dtype, "output {subject} is not cast to its dtype"),
    Rule("output-axes", lambda p, o: sorted(map(str, o.value.type.axes)) == sorted(map(str, o.type.axes)),
         "output {subject} has other axes than its value"),
    Rule("output-partial", lambda p, o: o.is_partial == (o.type.partial is not None),
         "output {subject} is partial results by its value or by its type, but not both"),
    Rule("output-optional", lambda p, o: not _reads_optional(p, o.value),
         "output {subject} is a bare optional parameter"),
    Rule("into", _into_is_inout, "output {subject} has the name of a parameter that it does not accumulate into"),
)  # fmt: skip
