"""The wheel works on its own: installed into an environment without the checkout, used from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built by the backend that pip would call, from the sdist, as a publisher would."""
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = out.glob("coda_epilogue-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of a new environment that holds the wheel, and sees this environment's other packages."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    site.mkdir(parents=True, exist_ok=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python")]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return home / "bin"


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CUDA_HOME", "CODA_NVCC")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_carries_grammar_templates_and_library(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for folder, suffix in (("grammar", ".lark"), ("templates", ".h"), ("library", ".coda")):
        assert any(f"/{folder}/" in name and name.endswith(suffix) for name in names), folder
    templates = {str(p.relative_to(ROOT / "templates")) for p in (ROOT / "templates").rglob("*") if p.is_file()}
    assert templates <= {name.removeprefix("coda/_resources/templates/") for name in names}
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_installed_coda_checks_and_lowers_from_another_folder(installed, tmp_path):
    """Case M6: no GPU, no nvcc, no checkout."""
    program = tmp_path / "p.coda"
    program.write_text("program p(x: bf16[M, K], w: bf16[N, K]) { return relu(x @ w.T): bf16 }\n")
    where = run([str(installed / "python"), "-c", "import coda; print(coda.__file__)"], tmp_path)
    assert str(installed.parent) in where.stdout
    check = run([str(installed / "coda"), "check", "p.coda"], tmp_path)
    assert check.returncode == 0, check.stderr
    lower = run([str(installed / "coda"), "lower", "p.coda", "--no-build", "--keep-sources", "out"], tmp_path)
    assert lower.returncode == 0, lower.stderr
    assert list((tmp_path / "out").glob("p_gemm_*.cu"))


def test_importing_coda_is_light(tmp_path):
    """Importing coda and its commands needs no compiler and no GPU, and does not even import torch."""
    code = "import sys, coda.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
