"""``coda explain --prove``: a proof for every rewrite that was made of a program, from its text to its kernels.

The passes are run once more, one by one; where one changed the program, what it made is proved equal to what it got
(``coda.passes.prove``). Then come the derivation of the backward, the cut into kernels, which are put together again
and compared with the whole, and the unrolling of lanes in each.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from coda.ir import Program
from coda.passes import Rewrite, derive, rewrites
from coda.passes.differentiate import differentiate
from coda.passes.kernels import Kernel, composed
from coda.passes.labels import BITWISE, Note
from coda.passes.lanes import lane_axes, unroll_lanes
from coda.passes.prove import Proof, prove, prove_gradients
from coda.target.blocks import Lowered


@dataclass(frozen=True)
class Proven:
    """A rewrite of a program, its label, and its proof."""

    rule: str
    program: str
    label: str
    proof: Proof

    def document(self) -> dict[str, object]:
        return {"rule": self.rule, "program": self.program, "label": self.label, "holds": self.proof.holds,
                "result": str(self.proof)}  # fmt: skip

    def __str__(self) -> str:
        return f"{self.rule} of {self.program} [{self.label}]: {self.proof}"


def proofs(program: Program, backward: bool, wrt: Sequence[str] | None, lowered: Iterable[Lowered]) -> Iterator[Proven]:
    """The rewrites of a program, of its backward where that is wanted, and of the kernels that were made of them."""
    forward, seen = yield from _rewritten(program)
    if backward:
        derived = differentiate(forward, wrt)
        label = _label(derived.notes)
        yield Proven("differentiate", program.name, label, prove_gradients(derived))
        after, more = yield from _rewritten(derived.backward)
        final, notes = derive(program, wrt)
        if final.backward != after:  # what `derive` does last
            last = [n for n in notes if n not in {*seen, *derived.notes, *more}]
            yield Proven(_name(None, last), after.name, _label(last), _equal(after, final.backward))
    for kernels in lowered:
        yield from _cut(kernels)


def _rewritten(program: Program) -> Generator[Proven, None, tuple[Program, list[Note]]]:
    """The passes that change a program; returns what they make of it, and their notes."""
    seen: list[Note] = []
    for apply in rewrites("fused"):
        result = apply(program)
        after, notes = result if isinstance(result, tuple) else (result, ())
        if after != program:
            yield Proven(_name(apply, notes), program.name, _label(notes), _equal(program, after))
        program, seen = after, [*seen, *notes]
    return program, seen


def _cut(lowered: Lowered) -> Iterator[Proven]:
    program = lowered.schedule.program
    if len(lowered.parts) > 1:
        kernels = [Kernel(part.name, "", part, None, frozenset()) for part in lowered.parts]
        made, _ = composed(kernels, program.params)
        whole = program.with_outputs(replace(made[o.name], type=o.type) for o in program.outputs)
        merged = [n for n in lowered.notes if n.rule == "merge"]
        yield Proven("partition", program.name, _label(merged), _equal(program, whole))
    for part in lowered.parts:
        if lane_axes(part):
            yield Proven("lanes", part.name, str(BITWISE), _equal(part, unroll_lanes(part)))


def _equal(before: Program, after: Program) -> Proof:
    return Proof(True, "the same program") if before == after else prove(before, after)


def _name(apply: Rewrite | None, notes: Iterable[Note]) -> str:
    return next((n.rule for n in notes), getattr(apply, "__name__", "rewrite"))


def _label(notes: Iterable[Note]) -> str:
    """The labels of what was done; bitwise where nothing moved."""
    moved = dict.fromkeys(n.label.moved for n in notes if n.label is not None and n.label.moved is not None)
    return f"algebraic ({'; '.join(moved)})" if moved else str(BITWISE)
