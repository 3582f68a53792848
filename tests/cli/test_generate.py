"""`compressive generate` on a tiny run."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_helpers import command, make_run, model_config, tiny_corpus, tiny_run_config

from compressive import TextModel
from compressive.cli import main
from compressive.inference import generate as generation
from compressive.model.language_model import CompressiveLM
from compressive.runs import checkpoint
from compressive.runs.run import Run
from compressive.runs.trained import Trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create an untrained run: only the command is tested."""
    home = tmp_path_factory.mktemp("generate")
    tiny_corpus(home / "data")
    run = make_run(home / "run", tiny_run_config(home / "data"))
    torch.manual_seed(0)
    checkpoint.save(run.checkpoints, 1, {"model": CompressiveLM(model_config(run.config)).state_dict()}, {})
    return run.folder


def call(capsys, *words):
    code = main(["generate", *map(str, words)])
    captured = capsys.readouterr()
    return SimpleNamespace(code=code, out=captured.out, err=captured.err)


def text_of(folder, prompt, length, **settings):
    run = Run.open(folder)
    trained = Trained.load(run)
    model = trained.model(trained.config)
    tokens = generation.generate(model, torch.tensor(list(prompt)), length, **settings)
    samples = torch.stack(list(tokens), dim=1).tolist()
    return [bytes(sample).decode("utf-8", "replace") for sample in samples]


def test_text_is_what_the_function_samples(folder, capsys):
    done = call(capsys, folder, "--prompt", "the cat", "--length", 40, "--seed", 3)
    assert done.code == 0
    assert done.out == text_of(folder, b"the cat", 40, seed=3)[0] + "\n"
    assert "prompt of 7 tokens read" in done.err
    assert "40 sampled" in done.err
    assert "tokens/s" in done.err


def test_without_a_prompt_text_begins_after_a_newline(folder, capsys):
    assert call(capsys, folder, "--length", 10).out == text_of(folder, b"\n", 10)[0] + "\n"


def test_several_samples_follow_each_other_under_headers(folder, capsys):
    done = call(capsys, folder, "--prompt", "a", "--length", 12, "--samples", 3, "--top-k", 20, "--temperature", 0.7)
    want = text_of(folder, b"a", 12, samples=3, top_k=20, temperature=0.7)
    assert done.out == "".join(f"=== {i} of 3 ===\n{text}\n" for i, text in enumerate(want, start=1))


def test_the_first_sample_is_streamed(folder, capsys, monkeypatch):
    flushed = []

    class Sink(io.StringIO):
        def flush(self):
            flushed.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Sink())
    assert main(["generate", str(folder), "--length", "20", "--samples", "2"]) == 0
    assert len(set(flushed)) > 10  # the text is flushed as it grows


def test_a_file_is_read_and_a_file_is_written(folder, capsys, tmp_path, monkeypatch):
    prompt = b"the dog ran to a red hat in an old inn. " * 10
    (tmp_path / "book.txt").write_bytes(prompt)
    done = call(capsys, folder, "--prompt-file", tmp_path / "book.txt", "--length", 30, "--out", tmp_path / "out.txt")
    assert done.out == ""
    assert "prompt of 400 tokens" in done.err
    written = (tmp_path / "out.txt").read_text("utf-8")
    assert written == text_of(folder, prompt, 30)[0] + "\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(prompt)))
    assert call(capsys, folder, "--prompt-file", "-", "--length", 30).out == written


def test_only_the_opening_of_a_book_may_be_read(folder, capsys, tmp_path):
    prompt = b"the dog ran to a red hat in an old inn. " * 10
    (tmp_path / "book.txt").write_bytes(prompt)
    done = call(capsys, folder, "--prompt-file", tmp_path / "book.txt", "--prompt-length", 25, "--length", 30)
    assert "prompt of 25 tokens" in done.err
    assert done.out == text_of(folder, prompt[:25], 30)[0] + "\n"


def test_memory_sizes_may_differ_and_empty_slots_of_larger_ones_are_masked(folder, capsys, monkeypatch):
    chosen = []
    original = TextModel.sample

    def watch(text, *arguments, **settings):
        chosen.append(text.model.config)
        return original(text, *arguments, **settings)

    monkeypatch.setattr(TextModel, "sample", watch)
    call(capsys, folder, "--length", 1)
    call(capsys, folder, "--length", 1, "--compressed-size", 20)
    call(capsys, folder, "--length", 1, "--compressed-size", 0)
    call(capsys, folder, "--length", 1, "--memory-size", 40, "--empty-memory", "zeros")
    call(capsys, folder, "--length", 1, "--empty-memory", "masked")
    assert [config.empty_memory for config in chosen] == ["zeros", "masked", "zeros", "zeros", "masked"]
    assert [config.memory_size for config in chosen] == [16, 16, 16, 40, 16]
    assert [config.compressed_size for config in chosen] == [8, 20, 0, 8, 8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "--prompt-file", "b"], "give one of them"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt-length", "0"], "prompt_length=0: expected at least 1"),
        (["--prompt-length", "-1"], "prompt_length=-1: expected at least 1"),
        (["--temperature", "-1"], "temperature=-1.0: expected a number of at least 0"),
        (["--temperature", "nan"], "temperature=nan: expected a number of at least 0"),
        (["--top-p", "0"], "top_p=0.0: expected a probability above 0"),
        (["--top-p", "2"], "top_p=2.0: expected a probability above 0"),
        (["--top-k", "-1"], "top_k=-1: expected a whole number of at least 0"),
        (["--length", "0"], "length=0: expected at least 1"),
        (["--length", "-1"], "length=-1: expected at least 1"),
        (["--length", str(10**12)], "length=1000000000000, samples=1: expected at most 1,000,000,000 tokens in all"),
        (["--samples", "0"], "samples=0: expected at least 1"),
        (["--samples", str(10**8)], "length=500, samples=100000000: expected at most 1,000,000,000 tokens in all"),
        (["--samples", str(10**9), "--length", "1"], "samples=1000000000: memories of"),
        (["--memory-size", str(10**12)], "memory_size=1000000000000, compressed_size=8, samples=1: memories of"),
        (["--compressed-size", str(10**30)], f"compressed_size={10**30}, samples=1: memories of"),
        (["--seconds", "1"], "seconds=1.0: the run was trained on text; give --length"),
        (["--seed", str(10**30)], f"seed={10**30}: expected a number of at most 64 bits"),
        (["--device", "abacus"], "device='abacus': expected auto, cpu"),
        (["--out", "."], "out=. is a folder: expected a file, such as sample.txt"),
    ],
)
def test_mistakes_are_one_clear_line(folder, capsys, words, message):
    done = call(capsys, folder, *words)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert done.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(folder):
    done = command("generate", folder, "--device", "cuda")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("compressive generate: device='cuda': expected auto, cpu or a device that is there")
    assert done.stderr.count("\n") == 1


def test_json_holds_samples_settings_and_speed(folder, capsys, tmp_path):
    words = ("--prompt", "the cat", "--length", 12, "--samples", 2, "--seed", 3, "--top-k", 9)
    done = call(capsys, folder, *words, "--json")
    found = json.loads(done.out)
    assert found.pop("seconds") > 0
    assert found == {
        "samples": text_of(folder, b"the cat", 12, samples=2, seed=3, top_k=9), "prompt_tokens": 7,
        "sampled_tokens": 24, "temperature": 1.0, "top_p": 0.98, "top_k": 9, "seed": 3,
    }  # fmt: skip
    assert done.err == ""
    out = tmp_path / "out.txt"
    again = call(capsys, folder, *words, "--json", "--out", out)
    assert json.loads(again.out)["samples"] == found["samples"]
    assert out.read_text("utf-8") == call(capsys, folder, *words).out


def test_the_folder_of_a_file_is_created(folder, capsys, tmp_path):
    out = tmp_path / "new" / "out.txt"
    assert call(capsys, folder, "--length", 5, "--out", out).code == 0
    assert out.read_text("utf-8") == text_of(folder, b"\n", 5)[0] + "\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(folder):
    done = command("generate", folder, "--length", "5", "--device", "cpu", "--out", "/dev/full")
    assert done.returncode == 2
    message = "compressive generate: out=/dev/full cannot be written (No space left on device): choose another file\n"
    assert done.stderr == message


def test_quiet_leaves_the_text(folder, capsys):
    done = call(capsys, folder, "--length", 10, "--quiet")
    assert (done.out, done.err) == (text_of(folder, b"\n", 10)[0] + "\n", "")


def test_a_folder_that_is_not_a_run_is_refused(capsys, tmp_path):
    assert "is not a run" in call(capsys, tmp_path).err


def test_a_state_is_saved_and_gone_on_from(folder, capsys, tmp_path):
    """A book is read once; what follows is the same as if it were read again."""
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on a mat and then the dog ran to a red hat " * 3)
    state = tmp_path / "deep" / "book.state"
    first = call(capsys, folder, "--prompt-file", book, "--length", "20", "--save-state", state)
    again = call(capsys, folder, "--state", state, "--length", "20")
    assert (first.code, again.code) == (0, 0), again.err
    assert again.out == first.out
    assert "prompt of 0 tokens" in again.err
    more = call(capsys, folder, "--state", state, "--prompt", "in an old inn", "--length", "9", "--temperature", "0")
    whole = call(capsys, folder, "--prompt", book.read_text() + "in an old inn", "--length", "9", "--temperature", "0")
    assert more.out == whole.out
    copy = tmp_path / "copy.state"
    assert call(capsys, folder, "--state", state, "--save-state", copy, "--length", "1").code == 0
    assert copy.stat().st_size == state.stat().st_size
    state.write_bytes(b"damaged")
    damaged = call(capsys, folder, "--state", state)
    assert (damaged.code, "is no state that --save-state wrote" in damaged.err) == (2, True)
    for path in (tmp_path / "none", tmp_path):
        assert call(capsys, folder, "--state", path).err.startswith(f"compressive generate: state={path} is no state")


def test_many_prompts_are_continued_in_one_batch(folder, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"the cat"\n\n{"prompt": "an old inn by the sea", "id": 3}\n"a"\n')
    greedy = ("--length", "12", "--temperature", "0")
    done = call(capsys, folder, "--prompts", prompts, *greedy, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    alone = [
        json.loads(call(capsys, folder, "--prompt", prompt, *greedy, "--json").out)["samples"][0]
        for prompt in ("the cat", "an old inn by the sea", "a")
    ]
    assert found["samples"] == alone
    assert found["sampled_tokens"] == 36
    shown = call(capsys, folder, "--prompts", prompts, *greedy).out
    assert shown.count("=== ") == 3
    for content, message in (
        ('"a"\n3', "line 2: expected a JSON string"),
        ("{}", "line 1: expected a JSON string"),
        ("\n", "holds no prompts"),
    ):
        prompts.write_text(content)
        wrong = call(capsys, folder, "--prompts", prompts)
        assert (wrong.code, message in wrong.err) == (2, True), wrong.err
    prompts.write_text('"a\u2028b"\n"c"\n', "utf-8")  # a line separator within a string
    assert call(capsys, folder, "--prompts", prompts, *greedy).code == 0
    prompts.write_bytes(b'"\xff"')
    assert f"{prompts} is no UTF-8 text" in call(capsys, folder, "--prompts", prompts).err
    prompts.write_text('"a"')
    assert "--prompts and --prompt: give one" in call(capsys, folder, "--prompts", prompts, "--prompt", "x").err
    assert "samples=2 with --prompts" in call(capsys, folder, "--prompts", prompts, "--samples", "2").err
