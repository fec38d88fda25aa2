"""What the documentation says is true: its programs check, its links lead somewhere, its examples work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coda.frontend import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ids = lambda page: page.name  # noqa: E731


def blocks(page: Path, language: str = "") -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_programs_in_the_docs_check(page):
    for block in blocks(page):
        if re.match(r"(#.*\n)*(program|fn)\b", block):
            load(block)  # raises CodaError


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_worked_operation_of_contributing_works():
    """Adding an operation is one record: register the one that is shown, then use it in a program."""
    (record,) = [b for b in blocks(ROOT / "CONTRIBUTING.md", "python") if "pointwise(" in b]
    use = """
import coda, torch
f = coda.compile("program p(x: f32[M]) { return relu6(x): f32 }", device="cpu")
assert f(torch.tensor([-1.0, 3.0, 9.0])).tolist() == [0.0, 3.0, 6.0]
"""
    script = f"from coda.ops.pointwise import _torch, pointwise\n{record}{use}"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_config_in_the_docs_is_one(tmp_path):
    from coda.cli.request import read_config

    (text,) = blocks(ROOT / "docs/cli.md", "toml")
    (tmp_path / "c.toml").write_text(text)
    assert read_config(str(tmp_path / "c.toml"))["target"]["tile"] == "128x192"


def test_the_explanation_in_the_docs_is_what_is_printed(capsys, monkeypatch):
    from coda.cli import main

    monkeypatch.chdir(ROOT)
    (shown,) = [b for b in blocks(ROOT / "docs/cli.md") if b.startswith("$ coda explain")]
    command, expected = shown.split("\n", 1)
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out == expected


def test_every_command_is_in_the_readme():
    from coda.cli import COMMANDS

    readme = (ROOT / "README.md").read_text()
    assert all(f"| `coda {c.__name__.rsplit('.', 1)[1]}" in readme for c in COMMANDS)


def test_every_case_names_a_test():
    """Each file that a row names is there, and one of them at least says which case it is about."""
    rows = re.findall(r"^\| ([A-Z]\d+) \|.*\| ([^|]+) \|$", (ROOT / "docs/cases.md").read_text(), re.MULTILINE)
    assert len(rows) > 70
    for case, files in rows:
        texts = [(ROOT / file).read_text() for file in re.findall(r"`([^`]+)`", files)]
        mention = re.compile(rf"\b{case}\b|_{case.lower()}_")
        assert any(mention.search(text) for text in texts), f"{files} does not mention {case}"
