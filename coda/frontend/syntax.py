"""The syntax tree: what was written and where, before any name has a meaning."""

from __future__ import annotations

from dataclasses import dataclass

from coda.errors import Source, Span

KEYWORDS = {"program", "fn", "extern", "dim", "return", "const", "inout", "partial", "true", "false", "inf", "nan"}


@dataclass(frozen=True)
class Name:
    name: str
    span: Span


@dataclass(frozen=True)
class Number:
    """A literal: int, float or bool (told apart by its Python type). ``-5`` is a literal too."""

    value: int | float | bool
    span: Span


@dataclass(frozen=True)
class Negation:
    operand: Expr
    span: Span


@dataclass(frozen=True)
class Binary:
    symbol: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True)
class Attribute:
    """``x.T``, or the axis of a slice: ``z.s`` in ``z.s[0]``."""

    value: Expr
    name: Name
    span: Span


@dataclass(frozen=True)
class Subscript:
    """``z.s[0]`` (slice), ``cos[pos]`` (gather), ``w[E]`` (batch), ``table[P = pos]`` (gather from axis P)."""

    value: Expr
    index: Argument
    span: Span


@dataclass(frozen=True)
class Call:
    callee: Name
    arguments: tuple[Argument, ...]
    span: Span


@dataclass(frozen=True)
class Group:
    """``(s F)`` among the arguments of a call: axes taken together."""

    names: tuple[Name, ...]
    span: Span


@dataclass(frozen=True)
class Factor:
    """An axis inside a type, with its size where it is static: ``s=2``."""

    name: Name
    size: int | None
    span: Span


DimSyntax = tuple[Factor, ...]


@dataclass(frozen=True)
class Axes:
    """``[M, (s F)]``: the dims of a type, or an argument such as that of ``rand``."""

    dims: tuple[DimSyntax, ...]
    span: Span


@dataclass(frozen=True)
class Parts:
    """``f | f | *``: how an axis is cut or joined; None stands for the rest."""

    parts: tuple[Name | Number | None, ...]
    span: Span


Expr = Name | Number | Negation | Binary | Attribute | Subscript | Call | Group | Axes | Parts


@dataclass(frozen=True)
class Argument:
    keyword: Name | None
    value: Expr
    span: Span


@dataclass(frozen=True)
class PartsOf:
    """``partial[sum, D]`` in front of a dtype: the reduction that partial results are parts of."""

    kind: Name
    dim: DimSyntax
    span: Span


@dataclass(frozen=True)
class TypeSyntax:
    """``bf16[M, D]``. ``axes`` is None where only the dtype is given."""

    dtype: Name
    axes: Axes | None
    span: Span
    parts_of: PartsOf | None = None


@dataclass(frozen=True)
class Parameter:
    """A parameter of a program (has a type, or is a ``const`` size or choice) or of a fn (may name axes)."""

    qualifier: str | None
    name: Name
    axes: Axes | None
    type: TypeSyntax | None
    choices: tuple[Name, ...] | None
    optional: bool
    default: Expr | None
    span: Span


@dataclass(frozen=True)
class Assign:
    targets: tuple[Name, ...]
    type: TypeSyntax | None
    value: Expr
    span: Span


@dataclass(frozen=True)
class Accumulate:
    target: Name
    value: Expr
    span: Span


@dataclass(frozen=True)
class Declare:
    """``dim G = HQ + 2*HK``."""

    name: Name
    size: Expr
    span: Span


@dataclass(frozen=True)
class Result:
    name: Name | None
    value: Expr
    type: TypeSyntax | None
    span: Span


@dataclass(frozen=True)
class Return:
    results: tuple[Result, ...]
    span: Span


Statement = Assign | Accumulate | Declare | Return


@dataclass(frozen=True)
class Definition:
    """A ``program``, a ``fn`` or an ``extern``; ``source`` is the text it stands in (a library function has its own).
    An extern has no body, but typed ``results``."""

    kind: str
    name: Name
    parameters: tuple[Parameter, ...]
    body: tuple[Statement, ...]
    span: Span
    source: Source
    results: tuple[Parameter, ...] = ()
