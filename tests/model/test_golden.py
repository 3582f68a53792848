"""Losses of 50 steps for each compression function, kept in the repository: training has not changed by accident.

    PYTHONPATH=tests python tests/model/test_golden.py

writes them anew; a change of them must be meant, and said in the commit.

They are compared to one part in a thousand (the compression loss, which is small, to one in a hundred): other
processors and versions of torch round differently, and 50 steps make more of it.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import COMPRESSIONS
from training_helpers import make_run, tiny_corpus, tiny_run_config

from compressive.training import loop

GOLDEN = Path(__file__).parent / "golden" / "losses.json"


def losses(compression: str, folder: Path) -> dict[str, list[float]]:
    tiny_corpus(folder / "data")
    config = tiny_run_config(
        folder / "data", {"compression": compression}, steps=50, log_every=1, eval_every=0, checkpoint_every=1000
    )
    loop.train(make_run(folder / "run", config))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {name: [round(line[name], 6) for line in lines] for name in ("loss", "compression_loss")}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_losses_are_what_they_were(compression, tmp_path):
    want = json.loads(GOLDEN.read_text())[compression]
    got = losses(compression, tmp_path)
    assert len(got["loss"]) == 50
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-3)
    assert got["compression_loss"] == pytest.approx(want["compression_loss"], rel=1e-2, abs=1e-5)
    assert got["loss"][-1] < 0.6 * got["loss"][0]


if __name__ == "__main__":
    result = {}
    for name in COMPRESSIONS:
        with tempfile.TemporaryDirectory() as scratch:
            result[name] = losses(name, Path(scratch))
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0)
