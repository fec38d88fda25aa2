"""Optional parameters that are known to be absent: each becomes the identity that it stands for, and then disappears.

So the gradient of a bias that a layer does not have is not even a question. Label: bitwise.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from coda.errors import CodaError, did_you_mean
from coda.ir import Node, Program, rewrite
from coda.passes.axes import expand, number
from coda.passes.simplify import simplify


def without(program: Program, names: Collection[str]) -> Program:
    """The program for calls in which the named optional parameters are absent; they are no parameters any more."""
    optional = {p.name for p in program.params if p.optional}
    for name in names:
        if name not in optional:
            raise CodaError.of(f"'{program.name}' has no optional parameter '{name}'", did_you_mean(name, optional))

    def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
        absent = node.op == "default" and args[0].attr("name") in names
        return number(node.attr("identity")) if absent else None

    left = rewrite(program, visit)
    outputs = [replace(o, value=expand(o.value, o.type.dims)) for o in left.outputs]
    params = [p for p in program.params if p.name not in names]
    return simplify(Program.of(program.name, params, outputs, dict(left.names)))
