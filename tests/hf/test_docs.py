"""The examples of docs/huggingface.md run as they are, one after the other."""

import json
import re
from typing import Any

import pytest
from helpers import ROOT
from hf_helpers import quiet, write_tiny_release

import compressive
from compressive.data.tokenizer import ByteTokenizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")  # Trainer's default, which torch ignores without a GPU
def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_release(tmp_path / "release", ByteTokenizer())
    page = (ROOT / "docs" / "huggingface.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    with quiet() as warnings:
        for block in blocks:
            exec(block, names)
    assert warnings == []
    assert [len(names[name]) for name in ("texts", "beams", "second")] == [2, 2, 2]
    once = names["tokenizer"](["The old house", "At sea,"], padding=True, return_tensors="pt")
    release = names["AutoModelForCausalLM"].from_pretrained("release")
    assert names["second"].equal(release.generate(**once, max_new_tokens=40, do_sample=False))
    assert compressive.load("tuned", device="cpu").step == 0
    assert json.loads((tmp_path / "tuned" / "release.json").read_text("utf-8"))["origin"]["step"] == 3
