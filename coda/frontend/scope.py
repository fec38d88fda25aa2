"""What names mean while a program is checked, and how its mistakes are collected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coda.dtypes import TABLE, DType
from coda.errors import Span, did_you_mean
from coda.frontend import syntax
from coda.frontend.axes import AxisTable
from coda.frontend.report import Failed, Report
from coda.ir import Axis, Dim, Node, Size, written_at
from coda.ops import OpError, build
from coda.ops.calls import Extern


class Marker:
    """A value that is not a tensor."""

    def __init__(self, what: str):
        self.what = what

    def __repr__(self) -> str:
        return self.what


UNKNOWN = Marker("a value whose error is already reported")
ABSENT = Marker("an optional argument that was not given")

Value = Node | DType | Marker


@dataclass
class Context:
    """What all scopes of one program share."""

    report: Report
    axes: AxisTable
    functions: dict[str, syntax.Definition]
    externs: dict[str, Extern] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)  # const {a, b} parameters and the name they stand for
    inlined: set[str] = field(default_factory=set)  # functions that some call has reached
    optional: set[str] = field(default_factory=set)
    inout: set[str] = field(default_factory=set)
    place: Span | None = None  # where an expression made by a pass is said to stand


@dataclass(frozen=True)
class CallSite:
    """The calls being inlined: errors are told at ``span``, where the user wrote the outermost one."""

    span: Span
    chain: tuple[syntax.Definition, ...]


@dataclass
class Scope:
    """The names of a program, or of a fn while it is inlined. ``own_axes`` are the axes a fn names; a program's are
    those of its axis table."""

    context: Context
    own_axes: dict[str, Dim] | None = None
    site: CallSite | None = None
    variables: dict[str, Value] = field(default_factory=dict)
    unread: dict[str, Span] = field(default_factory=dict)

    # Diagnostics.

    def place(self, span: Span) -> Span:
        return self.site.span if self.site else self.context.place or span

    def fail(self, message: str, span: Span, hint: str | None = None) -> Failed:
        """Report an error; the caller raises the result to leave the expression."""
        if self.site:
            inner = self.site.chain[-1]
            message += f" (in {inner.name.name}, {inner.source.name}:{span.line})"
        return self.context.report.error(message, self.place(span), hint)

    def build(self, span: Span, op: str, *args: Node, **attrs: Any) -> Node:
        """A node of the operation table; its refusal becomes an error at ``span``."""
        try:
            place = self.place(span)
            return written_at(build(op, *args, span=place, **attrs), place)
        except OpError as error:
            raise self.fail(error.message, span, error.hint) from None

    # Variables.

    def bind(self, name: syntax.Name, value: Value) -> None:
        self.check_new_name(name)
        if name.name in self.unread:
            self.warn_unread(name.name)
        self.variables[name.name] = value
        if value is not UNKNOWN and not name.name.startswith("_"):
            self.unread[name.name] = name.span

    def check_new_name(self, name: syntax.Name) -> None:
        if name.name in TABLE:
            raise self.fail(f"'{name.name}' is a dtype and cannot name a value", name.span, "choose another name")
        if self.is_axis(name.name):
            hint = "axes and values share one set of names; rename one of them"
            raise self.fail(f"'{name.name}' is already the name of an axis", name.span, hint)

    def warn_unread(self, name: str) -> None:
        span = self.unread.pop(name)
        if self.site is None:
            self.context.report.warn(f"'{name}' is never used", span, "remove it, or name it with a leading _")

    def read(self, name: syntax.Name) -> Value:
        value = self.variables.get(name.name)
        if value is UNKNOWN:
            raise Failed
        if value is None:
            raise self.unknown_name(name)
        if name.name in self.context.inout and self.site is None:
            hint = f"write {name.name} += ..., and take the value before or after in a second program"
            raise self.fail(f"inout '{name.name}' can only be accumulated into", name.span, hint)
        self.unread.pop(name.name, None)
        return value

    def unknown_name(self, name: syntax.Name) -> Failed:
        if self.is_axis(name.name):
            hint = f"its size is size({name.name}), the position along it index({name.name})"
            return self.fail(f"'{name.name}' is an axis, not a value", name.span, hint)
        if name.name in self.context.choices:
            hint = f"call it: {name.name}(x)"
            return self.fail(f"'{name.name}' chooses a function, it is not a value", name.span, hint)
        if name.name in TABLE:
            hint = f"to round, write cast(x, {name.name})"
            return self.fail(f"'{name.name}' is a dtype, not a value", name.span, hint)
        return self.fail(f"'{name.name}' is not defined", name.span, did_you_mean(name.name, set(self.variables)))

    # Axes.

    def find_axes(self, name: str) -> Dim | None:
        """The axis of this name (a fn's may stand for a group of them), or None."""
        if self.own_axes is not None:
            return self.own_axes.get(name)
        axis = self.context.axes.find(name)
        return None if axis is None else (axis,)

    def is_axis(self, name: str) -> bool:
        if self.own_axes is not None:
            return name in self.own_axes
        return self.context.axes.mentions(name)

    def axes(self, name: syntax.Name) -> Dim:
        found = self.find_axes(name.name)
        if found is not None:
            return found
        if self.own_axes is not None:
            hint = f"a fn sees the axes that its parameters name, as in x[{name.name}]"
            known = set(self.own_axes)
        else:
            hint = f"declare it with dim {name.name} = ..."
            known = self.context.axes.names
        raise self.fail(f"there is no axis '{name.name}'", name.span, did_you_mean(name.name, known) or hint)

    def axis(self, name: syntax.Name) -> Axis:
        found = self.axes(name)
        if len(found) != 1:
            group = " ".join(a.name for a in found)
            raise self.fail(f"'{name.name}' stands for the group ({group}); one axis is needed here", name.span)
        return found[0]

    def new_axis(self, name: syntax.Name, size: Size) -> Axis:
        """An axis made by an operation: an existing one of that name if the size agrees."""
        if name.name in self.variables:
            hint = "axes and values share one set of names; rename one of them"
            raise self.fail(f"'{name.name}' is already the name of a value", name.span, hint)
        table = self.context.axes
        found = self.find_axes(name.name)
        if found is not None:
            axis = self.axis(name)
            if axis.size != size:
                raise self.fail(f"axis '{name.name}' has size {axis.size}, but here it gets {size}", name.span)
            return axis
        if self.own_axes is None:
            return table.add(Axis.of(name.name, size))
        axis = table.fresh(name.name, size)
        self.own_axes[name.name] = (axis,)
        return axis
