"""M1: code is built for sm_90a and nothing else, and refuses to load anywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda.build.compile import DEVICE_FLAGS, arch_flags
from coda.errors import CodaError
from tests.abi.harness import Recorder, host_only


def test_arch_flag_comes_from_the_target_only() -> None:
    assert arch_flags("sm_90a") == ("-gencode=arch=compute_90a,code=sm_90a",)
    assert not any("sm_" in flag or "arch" in flag for flag in DEVICE_FLAGS)


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_devices_are_refused(tmp_path: Path, capability: int) -> None:
    record = Recorder(host_only(tmp_path, "plain", fake=True))
    record.reset(capability=capability)
    with pytest.raises(CodaError, match=f"plain: the artifact is built for sm_90a, device 0 is sm_{capability}"):
        record.artifact.warmup(0)
    assert not any(c["call"] == "cudaLibraryLoadData" for c in record.calls())
