"""P1, D6: nothing is added up in an order that the hardware chooses. On a device, runs are compared bit by bit in
tests/gpu (``equal_bits_over_runs``)."""

from __future__ import annotations

import re
from pathlib import Path

from coda.build import assemble, sources
from coda.frontend import load_path
from coda.resources import templates_dir
from coda.target import TILES
from coda.target.blocks import lower_program
from coda.target.legality import legal_tile

EXAMPLES = Path(__file__).parents[2] / "examples"
UNORDERED = re.compile(
    r"atomic(Add|Max|Min|CAS|Exch)|\bred\.|\batom\.|cuda::atomic|StreamK|SplitK|split_k", re.IGNORECASE
)


def test_templates_and_generated_code_have_no_unordered_additions():
    texts = {str(path): path.read_text() for path in templates_dir().rglob("*.h")}
    for name in ("residual_stats", "cross_entropy", "bias_gradient", "dqk_norm", "quantize_fp8"):
        schedule = lower_program(next(iter(load_path(EXAMPLES / f"{name}.coda").programs.values())))
        tiles = [t for t in TILES if all(legal_tile(t, plan) for plan in schedule.gemms)][:1]
        texts |= {f"{name}/{file}": text for file, text in sources(assemble(schedule, tiles or None)).items()}
    assert len(texts) > 20
    code = {name: re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL) for name, text in texts.items()}
    assert not {name: found for name, text in code.items() if (found := UNORDERED.findall(text))}
