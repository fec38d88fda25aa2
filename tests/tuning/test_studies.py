"""What is measured of the examples: every product can be called by itself, and its artifact says what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

import coda
from coda.build import assemble
from coda.build.describe import Metadata, describe
from coda.errors import CodaError, Source
from coda.frontend import load
from coda.runtime.compare import Oracle
from coda.runtime.inputs import random_inputs, small_sizes
from coda.runtime.unfused import Unfused
from coda.target.blocks import lower_program
from coda.target.legality import checks
from coda.tuning.tune import studies_of

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.coda"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_program_of_an_artifact_is_what_the_child_measures(path: Path) -> None:
    for program in coda.parse(path).programs.values():
        try:
            schedule = lower_program(program)
            checks(schedule)
        except CodaError:
            continue  # has opaque calls, or a size that its arguments do not tell
        for study in studies_of(schedule, small_sizes(schedule.program)):
            (about,) = describe(study.schedule.name, [assemble(study.schedule)], Metadata())["programs"]
            parsed = load(Source(about["program"])).programs[about["name"]]
            outputs = [o.name for o in parsed.outputs if o.into is None]
            assert [a["name"] for a in about["args"]] == [*(p.name for p in parsed.params), *outputs]
            inputs = random_inputs(parsed, study.sizes, 0)
            result = Oracle.of(parsed, inputs, dims=study.sizes).compare(Unfused(parsed)(inputs, study.sizes))
            assert result.ok, f"{study.schedule.name}\n{result}"
