"""An IR program as text in the language, which parses and checks back to the identical program.

Everything implicit is printed explicitly: casts, the identity of an absent operand, the axis names of ``concat``, the
sizes of axes. A value used twice gets a name, one used once is written where it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, count
from typing import Any

import sympy
from sympy.printing.str import StrPrinter

from coda.dtypes import TABLE
from coda.frontend.syntax import KEYWORDS
from coda.ir import Axis, Dim, Node, Output, Param, Program, Type
from coda.ops import OPS
from coda.ops.calls import Extern, same_call

# Binding strength of an expression's outermost operator; an operand that binds less strongly gets parentheses.
COMPARISON, SUM, PRODUCT, UNARY, POSTFIX = range(5)
STRENGTH = {"+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT, "@": PRODUCT}

SELECTIONS = {"transpose", "slice", "gather"}  # written behind their operand
LEAVES = {"input", "const", "index", "size", "default"}  # short: repeated rather than named
LINE = 110
LONGEST_OPERAND = 60  # a longer one gets a line of its own


def print_program(program: Program) -> str:
    """The source text of a program, with the externs that it calls."""
    return "\n".join(filter(None, [print_externs([program]), print_body(program)]))


def print_body(program: Program) -> str:
    """A program without the externs."""
    lines = [f"    {line}" for line in (*_dims(program), *statements(program))]
    return "\n".join([*_header(program), *lines, "}"]) + "\n"


def print_externs(programs: Iterable[Program]) -> str:
    """The declarations of the opaque functions that programs call, each once, with those of their derivatives."""
    called = dict.fromkeys(n.attr("callee") for p in programs for n in p.nodes() if n.op == "call")
    declared = dict.fromkeys(f for callee in called for f in (callee, callee.backward) if f is not None)
    return "".join(declaration(extern) + "\n" for extern in declared)


def statements(program: Program) -> list[str]:
    """What a program computes and returns, line by line."""
    body = _Statements(program, _Names(program))
    return [*body.lines, *_results(program, body)]


# Externs.


def declaration(extern: Extern) -> str:
    """An extern as it is written: ``extern f(x: bf16[M, D]) -> y: bf16[M, D]``."""
    sized: set[str] = set()
    params = [f"{name}: {_sized_type(t, sized)}" for name, t in extern.params]
    results = [f"{name}: {_sized_type(t, sized)}" for name, t in extern.results]
    lines = _wrapped(f"extern {extern.name}(", params, ")")
    last = f"{lines[-1]} -> {', '.join(results)}"
    return "\n".join([*lines[:-1], *([last] if len(last) <= LINE else [lines[-1], *_wrapped("    -> ", results, "")])])


# The header: parameters and sizes.


def _header(program: Program) -> list[str]:
    sized: set[str] = set()
    items = [_param(p, sized) for p in program.params] + [f"const {name}" for name in _const_sizes(program)]
    return _wrapped(f"program {program.name}(", items, ") {")


def _param(param: Param, sized: set[str]) -> str:
    qualifier = "inout " if param.inout else "const " if param.frozen else ""
    default = "" if param.default is None else f" = {literal(param.default)}"
    return f"{qualifier}{param.name}: {_sized_type(param.type, sized)}{'?' * param.optional}{default}"


def _sized_type(type_: Type, sized: set[str]) -> str:
    """The type with the size of each static axis at its first mention: bf16[M, (s=2 F)], partial[sum, D] f32[M]."""

    def factor(axis: Axis) -> str:
        if axis.static is None or axis.name in sized:
            return axis.name
        sized.add(axis.name)
        return f"{axis.name}={axis.static}"

    partial = type_.partial
    before = "" if partial is None else f"partial[{partial.kind}, {_dim_text(partial.axes, factor)}] "
    return f"{before}{type_.dtype}{_dims_text(type_.dims, factor)}"


def _dims_text(dims: tuple[Dim, ...], factor: Callable[[Axis], str] = str) -> str:
    """[M, (s F)]; nothing for a scalar."""
    if not dims:
        return ""
    return "[" + ", ".join(_dim_text(dim, factor) for dim in dims) + "]"


def _dim_text(dim: Dim, factor: Callable[[Axis], str]) -> str:
    text = " ".join(map(factor, dim))
    return f"({text})" if len(dim) > 1 else text


def _param_axes(program: Program) -> set[str]:
    """The axes that the types of the parameters name."""
    return {a.name for p in program.params for a in p.type.named}


def _const_sizes(program: Program) -> list[str]:
    """Size symbols that no parameter's axis binds: ``const`` parameters of the program."""
    expressions = [a.size for a in program.axes]
    for node in program.nodes():
        expressions += [value for _, value in node.attrs if isinstance(value, sympy.Expr)]
    symbols = {s.name for e in expressions for s in e.free_symbols}
    bound = {a.name for a in program.axes if a.is_free} & _param_axes(program)
    return sorted(symbols - bound)


def _dims(program: Program) -> list[str]:
    """Sizes of the axes that the parameter types do not give."""
    in_params = _param_axes(program)
    given = [a for a in program.axes if not a.is_free and (a.static is None or a.name not in in_params)]
    return [f"dim {a.name} = {size_text(a.size)}" for a in given]


class _SizePrinter(StrPrinter):
    """The language has no power operator."""

    def _print_Pow(self, expr: sympy.Pow, rational: bool = False) -> str:
        if expr.exp.is_Integer and expr.exp > 1:
            return "(" + "*".join([self.parenthesize(expr.base, 100)] * int(expr.exp)) + ")"
        return super()._print_Pow(expr, rational)


def size_text(size: sympy.Expr) -> str:
    """A size in the language: HQ + 2*HK, D/2."""
    return _SizePrinter().doprint(size)


def literal(value: float | int | bool) -> str:
    """A number that reads back exactly."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


# The body.


class _Names:
    """Names for values that meet no parameter, axis, size or reserved word."""

    def __init__(self, program: Program):
        self.taken = {p.name for p in program.params} | {a.name for a in program.axes} | set(_const_sizes(program))
        self.taken |= KEYWORDS | set(TABLE) | {n.attr("callee").name for n in program.nodes() if n.op == "call"}
        self.wanted: dict[Node, str] = {}
        for output in program.outputs:
            if output.into is None and output.name not in self.taken:
                self.wanted.setdefault(output.value, output.name)
        self.taken |= {o.name for o in program.outputs}
        self.hints = dict(program.names)

    def of(self, node: Node) -> str:
        """The name of the result that the node is, or that it has in the source; else acc1 for a product, t1 for
        anything else."""
        if node in self.wanted:
            return self.wanted[node]
        if node in self.hints:
            return self.first_free([self.hints[node]], f"{self.hints[node]}_", 2)
        if node.op == "call":
            result, _ = node.attr("callee").results[node.attr("result")]
            return self.first_free([result], f"{result}_", 2)
        stem = "acc" if node.op == "dot" else "t"
        return self.first_free([], stem, 1)

    def first_free(self, names: list[str], stem: str, start: int) -> str:
        """The first of the names, then stem1, stem2 ..., that nothing else has."""
        numbered = (f"{stem}{n}" for n in count(start))
        name = next(n for n in chain(names, numbered) if n not in self.taken)
        self.taken.add(name)
        return name


class _Statements:
    """The assignments of a program, and for each node the text and strength by which others refer to it."""

    def __init__(self, program: Program, names: _Names):
        self.lines: list[str] = []
        self.texts: dict[Node, tuple[str, int]] = {}
        nodes = program.nodes()
        uses = Counter(a for n in nodes for a in n.args) + Counter(o.value for o in program.outputs)
        negated = {n.args[0] for n in nodes if n.op == "neg"}
        results = {o.value for o in program.outputs}
        called = {a for n in nodes if n.op == "call" for a in n.args if a.op not in LEAVES}
        for node in nodes:
            if node.op == "call":
                if node not in self.texts:
                    self.call(node, [n for n in nodes if n.op == "call" and same_call(n, node)], names)
                continue
            text, strength = self.write(node)
            shared = uses[node] > 1 and node.op not in LEAVES and not _is_plain_transpose(node)
            long = len(text) > LONGEST_OPERAND and node not in results
            ambiguous = node.op == "const" and node in negated  # -(5) would read as -5
            if shared or long or ambiguous or node.op == "dot" or node in called:
                name = names.of(node)
                self.lines.append(f"{name} = {text}")
                text, strength = name, POSTFIX
            self.texts[node] = text, strength

    def call(self, node: Node, results: list[Node], names: _Names) -> None:
        """One statement for all results of an opaque call; those that nothing reads begin with a _."""
        callee = node.attr("callee")
        read = {n.attr("result"): names.of(n) for n in results}
        targets = [read.get(i) or names.first_free([f"_{r}"], f"_{r}", 2) for i, (r, _) in enumerate(callee.results)]
        operands = ", ".join(self.operand(a, COMPARISON) for a in node.args)
        self.lines.append(f"{', '.join(targets)} = {callee.name}({operands})")
        self.texts |= {n: (read[n.attr("result")], POSTFIX) for n in results}

    def operand(self, node: Node, least: int) -> str:
        text, strength = self.texts[node]
        return text if strength >= least else f"({text})"

    def write(self, node: Node) -> tuple[str, int]:
        symbol = OPS[node.op].symbol
        if node.op == "const":
            value = node.attr("value")
            return literal(value), UNARY if literal(value).startswith("-") else POSTFIX
        if symbol and len(node.args) == 2:
            strength = STRENGTH.get(symbol, COMPARISON)
            left = self.operand(node.args[0], strength + (strength == COMPARISON))
            return f"{left} {symbol} {self.operand(node.args[1], strength + 1)}", strength
        if node.op == "neg":
            return f"-{self.operand(node.args[0], UNARY)}", UNARY
        if node.op in SPELLING:
            least = [POSTFIX if node.op in SELECTIONS and i == 0 else COMPARISON for i in range(len(node.args))]
            operands = map(self.operand, node.args, least)
            return SPELLING[node.op](dict(node.attrs), *operands), POSTFIX
        return f"{node.op}({', '.join(self.operand(a, COMPARISON) for a in node.args)})", POSTFIX


def _is_plain_transpose(node: Node) -> bool:
    return node.op == "transpose" and node.args[0].op in LEAVES


def _group(names: Iterable[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def _gather(attrs: dict[str, Any], table: str, index: str) -> str:
    return f"{table}[{attrs['axis']} = {index}]"


def _cast(attrs: dict[str, Any], x: str) -> str:
    return f"cast({x}, {attrs['dtype']}{', saturate' * attrs['saturate']})"


def _reduction(kind: str) -> Callable[..., str]:
    return lambda attrs, x: f"{kind}({x}, {_group(attrs['axes'])})"


# How an operation with attributes is written: its attributes and the texts of its operands.
SPELLING: dict[str, Callable[..., str]] = {
    "input": lambda attrs: attrs["name"],
    "index": lambda attrs: f"index({attrs['axis']})",
    "position": lambda attrs: f"position({_group(a.name for a in attrs['axes'])})",
    "size": lambda attrs: f"size({size_text(attrs['expr'])})",
    "cast": _cast,
    "default": lambda attrs, x: f"default({x}, {literal(attrs['identity'])})",
    "transpose": lambda attrs, x: f"{x}.T",
    "slice": lambda attrs, x: f"{x}.{attrs['axis']}[{attrs['index']}]",
    "gather": _gather,
    "part": lambda attrs, x: f"part({x}, {attrs['axis']}, {size_text(attrs['start'])}, {attrs['into']})",
    "stack": lambda attrs, *xs: f"stack({', '.join(xs)}, {attrs['axis']})",
    "concat": lambda attrs, *xs: f"concat({', '.join(xs)}, {attrs['axis']} = {' | '.join(attrs['parts'])})",
    "layout": lambda attrs, x: f"layout({x}, {_dims_text(attrs['dims'])})",
    "pick": lambda attrs, z, index: f"pick({z}, {attrs['axis']}, {index})",
    "rand": lambda attrs, seed, offset: f"rand({seed}, {offset}, [{', '.join(map(str, attrs['axes']))}])",
    **{f"reduce_{kind}": _reduction(kind) for kind in ("sum", "mean", "max", "min", "logsumexp")},
    "maximum": lambda attrs, a, b: f"max({a}, {b})",
    "minimum": lambda attrs, a, b: f"min({a}, {b})",
}


# The results.


def _results(program: Program, statements: _Statements) -> list[str]:
    accumulated = [f"{o.into} += {statements.texts[o.value][0]}" for o in program.outputs if o.into]
    items = [_result(o, statements.texts[o.value][0]) for o in program.outputs if not o.into]
    return accumulated + (_wrapped("return ", items, "") if items else [])


def _result(output: Output, text: str) -> str:
    named = text if text == output.name else f"{output.name} = {text}"
    return f"{named}: {output.type.dtype}{_dims_text(output.type.dims)}"


def _wrapped(start: str, items: list[str], end: str) -> list[str]:
    """The items on one line if they fit, else filled into lines that align below the first."""
    lines, line = [], start
    for item in items:
        if len(line) + len(item) > LINE and line.strip() and line != start:
            lines.append(line.rstrip())
            line = " " * len(start)
        line += f"{item}, "
    return [*lines, line.removesuffix(", ") + end]
