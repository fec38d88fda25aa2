"""M7: another project's package is called ``coda``, too. It is documented, and its benchmarks run elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_clash_is_documented_and_the_distribution_has_another_name():
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "coda-epilogue"
    assert "the two cannot share an environment" in (ROOT / "README.md").read_text().replace("\n", " ")


def test_its_kernels_are_measured_in_an_environment_of_their_own():
    readme = (ROOT / "benchmarks" / "peers" / "README.md").read_text().replace("\n", " ")
    assert "coda-kernels has a package called `coda` too" in readme
