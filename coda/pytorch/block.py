"""What the custom op runs: a block program by its text, with its derived backward.

The op (``op.py``) carries text only, so any process, and any cache between, can make the kernels again. Everything here
is remembered by that text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from coda.errors import CodaError
from coda.frontend import load
from coda.ir import Output, Program
from coda.passes import derive, optimize
from coda.passes.differentiate import Backward
from coda.passes.labels import Note
from coda.printer import print_program
from coda.runtime.binding import evaluate_size, type_shape
from coda.version import __version__

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Options:
    """How a program is run. ``sizes`` names its symbolic sizes in the order in which the op gets them; ``wrt`` the
    parameters that may want a gradient; ``shapes`` the axes of each dim of an output, where these are not the dims of
    its type. A ``derived`` program is a backward, which has gone through all rewrites; its kernels run in chunks of the
    axis ``chunk``, if there is one."""

    sizes: tuple[str, ...] = ()
    wrt: tuple[str, ...] = ()
    numerics: str = "fused"
    memory: str = "fast"
    shapes: Mapping[str, Groups] = field(default_factory=dict)
    derived: bool = False
    chunk: str | None = None
    fallback: str = "copy"
    tune: bool = False
    version: str = __version__

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, text: str) -> Options:
        read = json.loads(text)
        if read["version"] != __version__:
            raise CodaError.of(f"this graph was made by coda {read['version']}, but {__version__} runs it",
                               "compile the model again")  # fmt: skip
        shapes = {n: tuple(tuple(g) for g in groups) for n, groups in read["shapes"].items()}
        return cls(**read | {"sizes": tuple(read["sizes"]), "wrt": tuple(read["wrt"]), "shapes": shapes})


def one_line(text: str) -> str:
    """A printed program without line breaks. Inductor of torch 2.11 comments the code it writes for a GPU with the
    arguments of calls, and a line break in one ends the comment."""
    return "; ".join(line.strip() for line in text.splitlines())


@cache
def block(program: str, options: str) -> Block:
    """The block of a program text and an options text."""
    (parsed,) = load(program).programs.values()
    return Block(parsed, Options.of(options))


@dataclass(frozen=True, eq=False)
class Block:
    """A program as the op runs it: ``forward`` returns what the backward needs behind its own outputs."""

    program: Program
    options: Options

    @cached_property
    def _derived(self) -> tuple[Program, Backward | None, tuple[Note, ...]]:
        if self.options.derived:
            return self.program, None, ()
        if not self.options.wrt:
            program, notes = optimize(self.program, self.options.numerics)
            return program, None, notes
        backward, notes = derive(
            self.program, self.options.wrt, numerics=self.options.numerics, memory=self.options.memory
        )
        return backward.forward, backward, notes

    @property
    def forward(self) -> Program:
        return self._derived[0]

    @property
    def gradients(self) -> Backward | None:
        return self._derived[1]

    @property
    def notes(self) -> tuple[Note, ...]:
        return self._derived[2]

    @cached_property
    def axis_sizes(self) -> dict[str, Any]:
        return {a.name: a.size for a in self.forward.axes}

    def named_sizes(self, sizes: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.options.sizes, sizes, strict=True))

    def shape(self, output: Output, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape in which torch sees an output; sizes may be symbolic."""
        groups = self.options.shapes.get(output.name)
        if groups is None:
            return type_shape(output.type, sizes)
        shape = []
        for group in groups:
            size = 1
            for name in group:
                size = size * evaluate_size(self.axis_sizes[name], sizes)
            shape.append(size)
        return tuple(shape)

    @cache  # noqa: B019  blocks are kept anyway
    def backward(self, wanted: tuple[str, ...]) -> tuple[Program, str, str]:
        """The program of some gradients only, and the texts with which the op runs it."""
        assert self.gradients is not None
        names = {self.gradients.gradients[w] for w in wanted if w in self.gradients.gradients}
        kept = [o for o in self.gradients.backward.outputs if o.name in names]
        whole = self.gradients.backward.with_outputs(kept)
        read = {n.attr("name") for n in whole.nodes() if n.op == "input"}
        params = [p for p in whole.params if p.name in read]
        program = Program.of(whole.name, params, kept, dict(whole.names))
        options = replace(self.options, wrt=(), shapes={}, derived=True, chunk=self.gradients.chunk)
        return program, one_line(print_program(program)), options.text()
