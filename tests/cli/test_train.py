"""`compressive train`: from a preset, from a file, on from a run; what it takes over from corpus and machine."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import warm_python
from training_helpers import SHARD, command, flags, text, tiny_corpus, tiny_run_config

from compressive import console
from compressive.cli import main
from compressive.config import RunConfig, preset_names
from compressive.config.agent import AgentRun
from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import BPETokenizer, ByteTokenizer, WordTokenizer

pytestmark = pytest.mark.slow

SHORT = ["--train.steps", "4", "--train.eval-every", "0", "--train.checkpoint-every", "2", "--train.sample-every", "0"]
TINY = [
    "--model.n-layers", "1", "--model.d-model", "16", "--model.n-heads", "2", "--model.d-ff", "16",
    "--model.window", "8", "--model.memory-size", "8", "--model.compressed-size", "4",
    "--train.batch", "2", "--train.warmup-steps", "1", *SHORT,
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a corpus `tiny` and a finished run on it."""
    folder = tmp_path_factory.mktemp("home")
    tiny_corpus(folder / "data")
    words = ["quickstart", "--data.corpus", "tiny", *TINY, "--out", "runs/first"]
    done = command("train", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def copy_of(home: Path, to: Path) -> Path:
    shutil.copytree(home, to, dirs_exist_ok=True)
    return to


def other_corpus(folder: Path, tokenizer: str = "bpe") -> None:
    """Prepare another text, or the same text in other tokens, where the corpus `tiny` was."""
    texts = {
        name: [text(n, seed)] for seed, (name, n) in enumerate({"train": 900, "valid": 200, "test": 200}.items(), 7)
    }
    kind = BPETokenizer.train(texts["train"], 300) if tokenizer == "bpe" else ByteTokenizer()
    shutil.rmtree(folder / "data" / "tiny")
    write_corpus(folder / "data" / "tiny", "tiny", kind, texts, {})


def test_a_run_goes_on_from_its_folder_alone(home, tmp_path):
    folder = copy_of(home, tmp_path)
    done = command("train", "--resume", "runs/first", "--train.steps", "6", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "from step 4" in done.stdout
    config = json.loads((folder / "runs/first/config.json").read_text())
    assert (config["train"]["steps"], config["model"]["d_model"], config["data"]["corpus"]) == (6, 16, "tiny")
    changed = command("train", "--resume", "runs/first", "--model.d-model", "32", cwd=folder)
    assert "model.d_model=32: the run to be resumed has 16" in changed.stderr


def test_what_config_prints_can_be_trained_from(home, tmp_path):
    folder = copy_of(home, tmp_path)
    (folder / "my.toml").write_text(command("config", "quickstart").stdout.replace('"books"', '"tiny"'))
    done = command("train", "--config", "my.toml", *TINY, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "runs/my/checkpoints/step-00000004").is_dir()
    (folder / "part.toml").write_text('extends = "quickstart"\n[data]\ncorpus = "tiny"\n[train]\nlr = 3')
    wrong = command("train", "--config", "part.toml", cwd=folder)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "train field='lr': expected one of steps, batch" in wrong.stderr
    (folder / "part.toml").write_text("steps: 3")
    assert "part.toml is no TOML file" in command("train", "--config", "part.toml", cwd=folder).stderr


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_survives_the_way_through_a_file(name, tmp_path, capsys):
    kind = AgentRun if name in preset_names("task") else RunConfig
    assert main(["config", name]) == 0
    (tmp_path / "my.toml").write_text(capsys.readouterr().out)
    from compressive.cli.start import starting_point

    holding = "task" if kind is AgentRun else "data"
    start = starting_point(["--config", str(tmp_path / "my.toml"), "--out", "x"], kind, Path, holding, name)
    assert start.config == kind.from_preset(name)
    assert start.arguments == ["--out", "x"]
    assert "model.n_layers" in start.given


def test_the_vocabulary_is_the_corpus_s_unless_it_is_given(home, tmp_path):
    folder = copy_of(home, tmp_path)
    other_corpus(folder)
    words = ["--data.corpus", "tiny", *TINY]
    done = command("train", "wikitext103", *words, "--model.dropout", "0", "--out", "runs/a", cwd=folder)
    assert done.returncode == 0, done.stderr
    model = json.loads((folder / "runs/a/config.json").read_text())["model"]
    size = json.loads((folder / "data/tiny/manifest.json").read_text())["vocab_size"]
    assert (model["vocab_size"], model["adaptive_cutoffs"]) == (size, [])
    assert f"vocabulary of {size}, that of tiny, in place of 267,735" in done.stderr
    more = command("train", "quickstart", *words, "--model.vocab-size", "400", "--out", "runs/b", cwd=folder)
    assert json.loads((folder / "runs/b/config.json").read_text())["model"]["vocab_size"] == 400
    assert f"warning: vocab_size=400: the corpus tiny has {size} tokens; the others are never trained" in more.stderr
    fewer = command("train", "quickstart", *words, "--model.vocab-size", "9", "--out", "runs/c", cwd=folder)
    assert (fewer.returncode, fewer.stderr.count("\n")) == (2, 1)
    assert f"vocab_size=9: the corpus tiny has {size} tokens; give --model.vocab-size {size}" in fewer.stderr


def test_cutoffs_are_those_of_the_corpus_s_vocabulary(home, tmp_path):
    """More than the preset's 256 tokens, in flags and in a file, without --model.vocab-size."""
    folder = copy_of(home, tmp_path)
    text = b" ".join(b"w%d" % (i % 500) for i in range(2000))
    shutil.rmtree(folder / "data" / "tiny")
    splits = {split: [text] for split in ("train", "valid", "test")}
    size = write_corpus(folder / "data" / "tiny", "tiny", WordTokenizer.train([text]), splits, {}).vocab_size
    words = ["quickstart", "--data.corpus", "tiny", *TINY, "--model.adaptive-cutoffs"]
    done = command("train", *words, "100", "400", "--out", "runs/a", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "my.toml").write_text(
        'extends = "quickstart"\n[data]\ncorpus = "tiny"\n[model]\nadaptive_cutoffs=[100, 400]'
    )
    done = command("train", "--config", "my.toml", *TINY, "--out", "runs/b", cwd=folder)
    assert done.returncode == 0, done.stderr
    for name in "ab":
        model = json.loads((folder / "runs" / name / "config.json").read_text())["model"]
        assert (model["vocab_size"], model["adaptive_cutoffs"]) == (size, [100, 400])
    for more in ([], ["--model.vocab-size", str(size)]):
        wrong = command("train", *words, "100", "600", *more, "--out", "runs/c", cwd=folder)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
        assert f"adaptive_cutoffs=(100, 600): expected numbers between 0 and vocab_size={size}; give" in wrong.stderr
    assert not (folder / "runs/c").exists()


def test_without_a_gpu_presets_made_for_one_train_in_fp32_and_are_not_compiled(home, tmp_path):
    words = ["enwik8-base", "--data.corpus", "tiny", *TINY, "--train.device", "cpu"]
    done = command("train", *words, "--train.precision", "bf16", "--out", tmp_path / "a", cwd=home)
    options = json.loads((tmp_path / "a" / "config.json").read_text())["train"]
    assert options["precision"] == "bf16"  # as it was asked for
    preset = RunConfig.from_preset("enwik8-base").train
    done = command("train", *words, "--out", tmp_path / "b", cwd=home)
    options = json.loads((tmp_path / "b" / "config.json").read_text())["train"]
    assert (options["precision"], options["compile"]) == ("fp32", False)
    changed = preset.compile or preset.precision == "bf16"
    assert changed == ("on cpu, training is in fp32 and not compiled" in done.stderr)


def test_a_run_says_what_it_needs_and_warns_where_the_machine_has_less(home, tmp_path, monkeypatch, capsys):
    words = ["train", "quickstart", "--data.corpus", "tiny", *TINY]
    said = command(*words, "--out", tmp_path / "a", cwd=home).stderr
    assert "needs about 0.0 GiB (weights 0.0, activations 0.0, memory 0.0), besides Python and torch; cpu has" in said
    assert "warning" not in said
    monkeypatch.chdir(home)
    monkeypatch.setattr("compressive.training.preflight.memory_gib", lambda device: 1e-6)
    assert main([*words, "--out", str(tmp_path / "b")]) == 0
    assert (
        "warning: about 0.0 GiB are needed and 0.0 are there: give --train.micro-batch auto" in capsys.readouterr().err
    )


def test_a_run_that_ends_within_its_warm_up_says_so(home, tmp_path):
    words = ["quickstart", "--data.corpus", "tiny", *TINY, "--train.warmup-steps", "10", "--out", tmp_path / "run"]
    assert "warning: steps=4 end within warmup_steps=10" in command("train", *words, cwd=home).stderr


def test_all_checkpoints_damaged_are_named_and_training_does_not_start_anew(home, tmp_path):
    folder = copy_of(home, tmp_path)
    for path in (folder / "runs/first/checkpoints").glob(f"step-*/{SHARD}"):
        path.write_bytes(path.read_bytes()[:-10])
    done = command("train", "--resume", "runs/first", cwd=folder)
    assert done.returncode == 2
    assert "all checkpoints in runs/first/checkpoints are damaged" in done.stderr
    assert "step-00000002" in done.stderr
    assert "start anew with another --out" in done.stderr
    assert "Traceback" not in done.stderr
    scored = command("evaluate", "runs/first", cwd=folder)
    assert (scored.returncode, "all checkpoints" in scored.stderr) == (2, True)


def test_a_damaged_checkpoint_is_one_warning_line(home, tmp_path):
    folder = copy_of(home, tmp_path)
    (folder / "runs/first/checkpoints/step-00000004" / SHARD).write_bytes(b"")
    done = command("train", "--resume", "runs/first", cwd=folder)
    assert done.returncode == 0
    warned = [line for line in done.stderr.splitlines() if "step-00000004" in line]
    assert len(warned) == 1
    assert warned[0].startswith("warning: ")
    assert "from step 2" in done.stdout


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_a_corpus_prepared_anew_is_refused_by_runs_on_the_old_one(home, tmp_path, tokenizer):
    folder = copy_of(home, tmp_path)
    before = command("generate", "runs/first", "--length", "5", "--prompt", "the cat", cwd=folder).stdout
    other_corpus(folder, tokenizer)
    expected = (
        "with another tokeniser (bpe" if tokenizer == "bpe" else "holds other text than runs/first was trained on"
    )
    resumed = ("train", "quickstart", "--data.corpus", "tiny", *TINY, "--out", "runs/first", "--resume")
    for words in (
        ("evaluate", "runs/first"), ("analyze", "runs/first", "memory"), ("train", "--resume", "runs/first"), resumed,
    ):  # fmt: skip
        done = command(*words, cwd=folder)
        assert (done.returncode, expected in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr
    shutil.rmtree(folder / "data")  # generate needs no corpus, wherever it is started
    (folder / "elsewhere").mkdir()
    after = command("generate", "../runs/first", "--length", "5", "--prompt", "the cat", cwd=folder / "elsewhere")
    assert (after.returncode, after.stdout) == (0, before)


def test_another_text_in_the_same_tokens_can_be_asked_for(home, tmp_path):
    folder = copy_of(home, tmp_path)
    other_corpus(folder, "bytes")
    done = command("evaluate", "runs/first", "--data-dir", "data", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "warning: data/tiny holds other text than runs/first was trained on" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "config.json is damaged (Expecting value"),
        ("[]", "config.json is damaged (expected an object of tables)"),
        ('{"model": {"n_layers": "two"}}', "config.json: n_layers='two': expected a whole number"),
        ('{"model": {"layers": 2}}', "config.json: model field='layers': expected one of"),
        ('{"task": {}}', "runs/first is an agent's run: use compressive rl evaluate runs/first"),
    ],
)
@pytest.mark.parametrize("command_line", ["evaluate", "generate", "export --out there", "analyze", "train --resume"])
def test_a_configuration_that_cannot_be_read_is_named(home, tmp_path, content, message, command_line):
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.json").write_text(content)
    name, *options = command_line.split()
    words = [name, "--resume", "runs/first"] if name == "train" else [name, "runs/first", *options]
    done = command(*words, *(["memory"] if name == "analyze" else []), cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    if name == "export" and "task" in content:
        message = (
            "runs/first holds no checkpoint yet: compressive rl train --resume runs/first"  # agents are exported too
        )
    assert message in done.stderr


def test_a_run_that_failed_before_its_first_step_can_start_again(home, tmp_path):
    words = ("train", "quickstart", "--data.corpus", "tiny", *TINY, "--out", tmp_path / "run")
    failed = command(*words, "--train.parallel", "fsdp", cwd=home)
    assert "parallel='fsdp': expected torchrun to start the processes" in failed.stderr
    assert command(*words, cwd=home).returncode == 0
    again = command(*words, cwd=home)
    assert (again.returncode, "holds a run already" in again.stderr) == (2, True)


def test_a_run_interrupted_before_its_first_line_is_not_taken_for_a_new_one(home, tmp_path):
    folder = copy_of(home, tmp_path)
    (folder / "runs/first/metrics.jsonl").write_text("")
    words = ("train", "quickstart", "--data.corpus", "tiny", *TINY, "--train.seed", "7", "--out", "runs/first")
    done = command(*words, cwd=folder)
    assert (done.returncode, "holds a run already" in done.stderr) == (2, True)
    assert json.loads((folder / "runs/first/config.json").read_text())["train"]["seed"] == 0


def test_a_failed_start_does_not_bind_a_run_to_its_corpus(home, tmp_path):
    folder = copy_of(home, tmp_path)
    words = ("train", "quickstart", "--data.corpus", "tiny", *TINY, "--out", "runs/again")
    failed = command(*words, "--train.parallel", "fsdp", cwd=folder)
    assert failed.returncode == 2
    assert (folder / "runs/again/corpus.json").exists()
    other_corpus(folder)
    assert command(*words, cwd=folder).returncode == 0
    kept = json.loads((folder / "runs/again/corpus.json").read_text())
    assert kept["tokenizer"] == "bpe"
    assert json.loads((folder / "runs/again/tokenizer.json").read_text())["kind"] == "bpe"


def test_a_run_goes_on_in_its_own_folder(home):
    done = command("train", "--resume", "runs/first", "--out", "runs/other", cwd=home)
    assert (done.returncode, "a run goes on in its own folder" in done.stderr) == (2, True)


def test_a_run_that_goes_on_does_not_start_from_other_weights(home):
    done = command("train", "--resume", "runs/first", "--from", "runs/first", cwd=home)
    assert (done.returncode, "a run goes on from its own checkpoint" in done.stderr) == (2, True)


def test_what_a_file_extends_is_not_given(home, tmp_path):
    folder = copy_of(home, tmp_path)
    other_corpus(folder)
    (folder / "my.toml").write_text('extends = "enwik8-base"\n[data]\ncorpus = "tiny"\n')
    done = command("train", "--config", "my.toml", *TINY, "--train.device", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    config = json.loads((folder / "runs/my/config.json").read_text())
    assert config["model"]["vocab_size"] != 256
    assert (config["train"]["precision"], config["train"]["compile"]) == ("fp32", False)


@pytest.mark.parametrize("content", ["steps = 5", 'extends = "quickstart"\ntrain = 3', 'name = "x"', "extends = 3"])
def test_a_file_without_tables_is_named(home, tmp_path, content):
    (tmp_path / "my.toml").write_text(content)
    done = command("train", "--config", tmp_path / "my.toml", cwd=home)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "my.toml" in done.stderr or "table='name'" in done.stderr


@pytest.mark.parametrize("content", ["{}", "", "[]"])
def test_damaged_files_of_a_run_are_named(home, tmp_path, content):
    folder = copy_of(home, tmp_path)
    assert command("export", "runs/first", "--out", "release", cwd=folder).returncode == 0
    (folder / "runs/first/corpus.json").write_text(content)
    (folder / "release/release.json").write_text(content)
    for words, name in ((("evaluate", "runs/first"), "corpus.json"), (("generate", "release"), "release.json")):
        done = command(*words, cwd=folder)
        assert (done.returncode, done.stderr.count("\n"), f"{name} is damaged" in done.stderr) == (2, 1, True), (
            done.stderr
        )


def test_a_resumed_run_keeps_its_vocabulary(home, tmp_path):
    """Version 0.1 allowed more tokens than the corpus has."""
    words = ("train", "quickstart", "--data.corpus", "tiny", *TINY, "--out", tmp_path / "run")
    assert command(*words, "--model.vocab-size", "300", cwd=home).returncode == 0
    done = command(*words, "--train.steps", "5", "--resume", cwd=home)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["vocab_size"] == 300


def test_of_torchrun_s_processes_one_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    console.warn("twice")
    console.note("twice")
    monkeypatch.setenv("RANK", "0")
    console.warn("once")
    assert capsys.readouterr().err == "warning: once\n"


def test_a_file_and_a_release_are_no_folders_to_train_in(home, tmp_path):
    (tmp_path / "file").write_text("")
    words = ("train", "quickstart", "--data.corpus", "tiny", *TINY, "--out")
    assert "is a file: expected a folder" in command(*words, tmp_path / "file", cwd=home).stderr
    below = command(*words, tmp_path / "file" / "below", cwd=home)
    assert below.stderr == f"compressive train: {tmp_path}/file/below/corpus.json: Not a directory\n"
    assert command("export", "runs/first", "--out", tmp_path / "release", cwd=home).returncode == 0
    for start in (["--resume", tmp_path / "release"], ["quickstart", "--out", tmp_path / "release", "--resume"]):
        done = command("train", *start, "--data.corpus", "tiny", *TINY, cwd=home)
        assert (done.returncode, "is a release, which holds no state" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "release" / "metrics.jsonl").exists()


def test_quiet_leaves_errors_and_results(home, tmp_path):
    done = command(
        "train", "quickstart", "--quiet", "--data.corpus", "tiny", *TINY, "--out", tmp_path / "run", cwd=home
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wrong = command("--quiet", "train", "quickstart", "--data.corpus", "none", cwd=home)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


def test_ctrl_c_while_training_saves_and_exits_with_75(home, tmp_path):
    words = [*TINY, "--train.steps", "100000", "--train.log-every", "1", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*warm_python.interpreter(), "-m", "compressive", "train", "quickstart", "--data.corpus", "tiny", *words],
        cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while "step 3/" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "continue with: compressive train --resume " in out
    assert "Traceback" not in error


def test_flags_of_a_whole_configuration_count_as_given(home, tmp_path):
    config = tiny_run_config(home / "data", {"n_layers": 1}, steps=1, precision="bf16")
    done = command("train", "quickstart", *flags(config), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["precision"] == "bf16"
