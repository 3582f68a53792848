"""The documents are kept true: examples run, commands parse, numbers are those of results files, named places exist."""

import importlib
import json
import pickle
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from training_helpers import text, tiny_corpus
from warm_python import interpreter

from compressive import __version__
from compressive.cli import main
from compressive.config import RunConfig, preset_names
from compressive.data.tokenizer import WordTokenizer
from compressive.experiments import EXPERIMENTS
from compressive.experiments.compression_functions import FUNCTIONS
from compressive.kernels import dispatch
from compressive.runs.origin import Origin
from compressive.runs.run import Run

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
}
README = PAGES["README.md"]
PAPER = PAGES["docs/paper.md"]
ARCHITECTURE = PAGES["docs/architecture.md"]


def results(name: str) -> dict:
    """Read a results file: `benchmarks/...` or `experiments/...`, without `results/` and `.json`."""
    kind, rest = name.split("/", 1)
    return json.loads((ROOT / kind / "results" / f"{rest}.json").read_text("utf-8"))


# The README


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 170


def test_the_readme_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["memory"].compressed[0].any()
    assert all(p.grad is not None for p in names["model"].parameters())


def test_the_examples_of_own_model_md_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGES["docs/own-model.md"], re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert names["hidden"].shape == (4, 64)


@pytest.mark.slow
def test_the_examples_of_python_md_run(tmp_path, monkeypatch):
    """One after the other, as a reader would run them, on a quickstart of two steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").symlink_to(ROOT / "books")
    tiny_corpus(tmp_path / "data")
    (tmp_path / "data" / "tiny").rename(tmp_path / "data" / "books")
    short = ["--train.steps", "2", "--train.eval-every", "0", "--train.sample-every", "0"]
    assert main(["train", "quickstart", *short, "--quiet"]) == 0
    blocks = re.findall(r"```python\n(.*?)```", PAGES["docs/index.md"], re.DOTALL)
    blocks += re.findall(r"```python\n(.*?)```", PAGES["docs/python.md"], re.DOTALL)
    assert len(blocks) == 1 + 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert len(names["several"]) == 3
    assert names["first"] != names["second"]
    assert (names["tokens"].shape[0], names["model"].step) == (1, 20)
    names["loss"].backward()


PYTHON = {
    "README.md": "test_docs.py",
    **dict.fromkeys([f"docs/{name}.md" for name in ("index", "own-model", "python")], "test_docs.py"),
    "docs/agent.md": "rl/env/test_gym.py",
    "docs/huggingface.md": "hf/test_docs.py",
    "docs/lm-eval.md": "harness/test_harness.py",
    "docs/usage.md": "cli/test_export.py",
}
"""The test file that runs the Python of a page."""


def test_the_python_of_every_page_is_run_by_a_test():
    assert {name for name, page in PAGES.items() if "```python" in page} == set(PYTHON)
    for page, file in PYTHON.items():
        test = (ROOT / "tests" / file).read_text("utf-8")
        assert Path(page).name in test, page


def write_books(folder: Path) -> None:
    """Write tiny books, with more words than the pages' cutoffs, each three times."""
    for name, length in (("train", 9_000), ("valid", 3_000), ("test", 1_000)):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.txt").write_bytes(text(length, len(name)))
    many = " ".join(f"word{i % 4_500}" for i in range(3 * 4_500))
    (folder / "train" / "2.txt").write_text(many)


def run_shell(blocks: list[str]) -> None:
    """Run the commands of shell blocks, one after the other, with small models and two steps of training."""
    small = ["--model.n-layers", "1", "--model.d-model", "32", "--model.n-heads", "2", "--model.d-ff", "32"]
    small += ["--train.steps", "2", "--train.eval-every", "0", "--train.sample-every", "0", "--quiet"]
    for line in "".join(blocks).splitlines():
        _, *words = shlex.split(line)
        assert main([*words, *small] if words[0] == "train" else words) == 0, line


@pytest.mark.slow
def test_the_examples_of_words_md_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_books(tmp_path / "books")
    run_shell(re.findall(r"```sh\n(.*?)```", PAGES["docs/words.md"], re.DOTALL))
    printed = capsys.readouterr().out
    for shown in ("word perplexity", "bits per byte", "in training 100-1K times", "model.compressed_size"):
        assert shown in printed


@pytest.mark.slow
def test_the_quickstart_by_hand_and_the_examples_of_own_text_md_run(tmp_path, monkeypatch, capsys):
    """Those of own-text.md start from the quickstart's weights."""
    monkeypatch.chdir(tmp_path)
    write_books(tmp_path / "books")
    (tmp_path / "my-folder").mkdir()
    (tmp_path / "my-folder" / "notes.txt").write_text("\n".join(f"word{i * i} word{i}" for i in range(12_000)))
    blocks = re.findall(r"```sh\n(compressive data prepare text books .*?)```", PAGES["docs/index.md"], re.DOTALL)
    assert len(blocks) == 1
    run_shell(blocks + re.findall(r"```sh\n(.*?)```", PAGES["docs/own-text.md"], re.DOTALL))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"quickstart", "mine", "mine-bpe", "tuned"}
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
    assert json.loads((tmp_path / "runs" / "tuned" / "origin.json").read_text())["source"] == "runs/quickstart"
    assert "bits per character" in capsys.readouterr().out


def test_the_counts_of_words_md_are_those_of_the_books():
    page, train = PAGES["docs/words.md"], sorted((ROOT / "books" / "train").glob("*.txt"))
    size = sum(path.stat().st_size for path in train)
    tokenizer = WordTokenizer.train((path.read_bytes() for path in train), least=3)
    tokens = sum(len(part) for part in tokenizer.encode_chunks(path.read_bytes() for path in train))
    assert table_row(page, "bytes", having="bytes per token") == ["256", f"{size:,}", "1.0"]
    assert table_row(page, "words", having="bytes per token") == [
        f"{tokenizer.vocab_size:,}", f"{tokens:,}", f"{size / tokens:.1f}"
    ]  # fmt: skip
    once = WordTokenizer.train(path.read_bytes() for path in train)
    assert once.vocab_size - 2 < 2 * (once.counts == 1).sum()


# Commands


def commands(page: str) -> list[str]:
    """Return the commands of a page without `compressive`: lines of shell and console blocks, and inline code."""
    found = []
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:\$ )?(?:torchrun .* -m )?compressive (.+?)(?:\s+#.*)?$", line):
                found.append(match[1])
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    found += re.findall(r"`(?:torchrun [^`]* -m )?compressive ([^`]+)`", prose)
    return [line.replace("PRESET", "quickstart").replace("RUN", "runs/quickstart") for line in found]


COMMANDS = sorted({line for name, page in PAGES.items() if name != "CHANGELOG.md" for line in commands(page)})


@pytest.mark.parametrize("line", COMMANDS)
def test_documented_commands_are_understood(line, tmp_path, monkeypatch, capsys):
    """Every word is parsed and checked. What the commands do is tested elsewhere, on less."""
    done: list[Any] = []

    def called(options: Any, *_: Any) -> int:
        done.append(options)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("compressive.training.loop.train", called)
    monkeypatch.setattr("compressive.runs.run.Run.corpus", lambda run: None)
    monkeypatch.setattr("compressive.runs.run.Run.configured_corpus", lambda run: None)
    monkeypatch.setattr("compressive.training.preflight.fit", lambda config, *_: (config, []))
    monkeypatch.setattr("compressive.rl.loop.train", called)
    for module, function in (
        ("evaluate", "evaluate"),
        ("generate", "generate"),
        ("analyze", "analyze"),
        ("runs", "show"),
        ("compare", "compare"),
        ("data", "_prepare"),
        ("export", "export"),
        ("convert", "convert"),
        ("lm_eval", "evaluate"),
        ("experiment", "experiment"),
        ("serve", "serve"),
        ("bench", "bench"),
        ("pg19.build", "build"),
        ("pg19.verify", "verify"),
        ("pg19.stats", "stats"),
        ("pg19.topics", "topics"),
        ("rl.evaluate", "evaluate"),
        ("rl.watch", "watch"),
    ):
        monkeypatch.setattr(f"compressive.cli.{module}.{function}", called)
    if line.endswith("--help"):
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line))
        assert ended.value.code == 0
        return
    if "--config my.toml" in line:
        (tmp_path / "my.toml").write_text('extends = "quickstart"')
    if (resumed := re.match(r"train --resume (\S+)", line)) is not None:
        Run.create(tmp_path / resumed[1], RunConfig.from_preset("quickstart"))
    if (source := re.search(r"--from (\S+)", line)) is not None:
        Run.create(tmp_path / source[1], RunConfig.from_preset("quickstart"))
        monkeypatch.setattr("compressive.training.preflight.check_start", lambda *_: None)
        monkeypatch.setattr("compressive.runs.origin.Origin.of", lambda _: Origin(source[1], 1, "books", ""))
    assert main(shlex.split(line.split(" > ")[0])) == 0
    if not line.startswith(("config", "completion")) and "--explain" not in line:
        assert len(done) == 1


def test_the_commands_without_make_are_those_of_make():
    section = PAGES["docs/usage.md"].split("## Without make; macOS and Windows")[1].split("\n## ")[0]
    install, quickstart, checks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    steps = re.search(r"^STEPS \?= (\d+)$", makefile, re.MULTILINE)
    assert steps is not None
    (prompt,) = (ROOT / "books" / "prompts").glob("860-*.txt")
    (recipe,) = re.findall(r"^quickstart:.*\n((?:\t\$\(BIN\)/compressive .*\n)+)", makefile, re.MULTILINE)
    made = recipe.replace("\t$(BIN)/", "").replace("$(STEPS)", steps[1])
    assert quickstart == made.replace("books/prompts/860-*.txt", str(prompt.relative_to(ROOT)))
    (extras,) = re.findall(r"-c constraints\.txt -e '(\.\[[\w,-]+\])'", makefile)
    assert re.findall(r'-c constraints\.txt -e "(\S+)"', section) == [extras, extras]
    assert f'-e "{extras}"' in install
    for line in checks.splitlines():
        assert f"$(BIN)/{line}\n" in makefile.replace(" --durations=10", "")


def test_the_documents_have_commands():
    assert len(commands(README)) >= 10
    assert len(COMMANDS) >= 40


def test_scripts_targets_test_files_and_extras_of_shell_blocks_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for name, page in PAGES.items():
        for line in "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", page, re.DOTALL)).splitlines():
            if match := re.match(r"(?:python|pytest) ((?:[\w/]+\.py ?|tests/\S+ ?)+)", line):
                for file in match[1].split():
                    assert (ROOT / file).exists(), f"{name}: {line}"
            if match := re.match(r"make ([\w-]+)", line):
                assert re.search(rf"^{match[1]}:", makefile, re.MULTILINE), f"{name}: {line}"
        for listed in re.findall(r"(?:\.|compressive)\[([a-z,-]+)\]['\"]", page):
            assert set(listed.split(",")) <= set(extras), f"{name}: [{listed}]"


def test_code_blocks_are_of_languages_that_a_test_checks_and_begin_their_line():
    """What these tests look for: an indented block, or one in another language, would go unchecked."""
    for name, page in PAGES.items():
        for indent, language in re.findall(r"^( *)```(\w*)$", page, re.MULTILINE):
            assert language in ("", "sh", "console", "python", "bibtex"), f"{name}: {language}"
            assert not indent, f"{name}: an indented block"


CHECKED = (
    r"(\$ )?(torchrun .* -m )?compressive ",  # parsed, above
    r"make [\w-]+( +#|$)",
    r"(python|pytest) (\w|tests/)[\w/]*\.py|pytest tests/",
    r"(\.venv/bin/)?pip install (-c constraints\.txt )?-e ",
    r"python3 -m venv \.venv$",
    r"ruff check \.$|ruff format --check \.$|mypy --cache-dir |pytest -q -n auto ",  # as in make
    r"TASKS=\$\(python -c |lm_eval ",  # test_the_shell_of_lm_eval_md_finds_its_task
    r"python -c \"import pickle; ",  # test_the_vocabulary_that_transformer_xl_md_writes_is_that_of_the_pickle
    r" +#",  # a comment that goes on
)
"""The lines of shell blocks that the tests of this file check."""


def test_every_line_of_a_shell_block_is_checked():
    for name, page in PAGES.items():
        for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                assert any(re.match(kind, line) for kind in CHECKED), f"{name}: {line}"


def test_the_options_of_scripts_exist():
    """In shell blocks and in prose: each option of `python SCRIPT.py --option` is in the script."""
    found = 0
    for name, page in PAGES.items():
        for script, rest in re.findall(r"python ((?:benchmarks|experiments|tools)/\w+\.py)([^`#\n]*)", page):
            source = (ROOT / script).read_text("utf-8")
            for option in re.findall(r"--[\w-]+", rest):
                assert f'"{option}"' in source, f"{name}: {script} {option}"
                found += 1
    assert found >= 20


def test_the_vocabulary_that_transformer_xl_md_writes_is_that_of_the_pickle(tmp_path):
    (line,) = re.findall(r"^python (-c .*)$", PAGES["docs/transformer-xl.md"], re.MULTILINE)
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": ["<eos>", "<unk>", "the"]}))
    subprocess.run(f"{shlex.quote(sys.executable)} {line}", shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "vocab.txt").read_text().split("\n") == ["<eos>", "<unk>", "the", ""]


def test_the_shell_of_lm_eval_md_finds_its_task(capsys):
    pytest.importorskip("lm_eval")
    page = PAGES["docs/lm-eval.md"]
    (code,) = re.findall(r'^TASKS=\$\(python -c "(.*)"\)$', page, re.MULTILINE)
    exec(code, {})
    (task,) = re.findall(r"^lm_eval .* --tasks \$TASKS/(\S+) ", page, re.MULTILINE)
    assert (Path(capsys.readouterr().out.strip()) / task).is_file()


def test_the_extras_that_index_md_lists_are_all_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (table,) = re.findall(r"^\| extra \|.*\n((?:\|.*\n)+)", PAGES["docs/index.md"], re.MULTILINE)
    listed = [name for row in table.splitlines()[1:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(extras)


# Links and named places


LINKS = sorted(
    {
        (name, target)
        for name, page in PAGES.items()
        for target in re.findall(r"\]\(([^)\s]+)\)", page)
        if not target.startswith(("http://", "https://"))
    }
)


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_every_relative_link_has_a_target(page, target):
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.exists(), f"{page}: {target}"
    if anchor:
        headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_results_file_that_a_page_names_exists(page):
    for name in re.findall(r"\b((?:benchmarks|experiments)/results/[\w./-]+\.json)\b", PAGES[page]):
        if "NAME" not in name:
            assert (ROOT / name).is_file(), name


PLACES = sorted({place for page in (PAPER, ARCHITECTURE) for place in re.findall(r"`([\w/]+\.py): ([\w.]+)`", page)})


@pytest.mark.parametrize(("path", "symbol"), PLACES)
def test_every_place_that_the_documents_name_exists(path, symbol):
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    thing = importlib.import_module(f"compressive.{module}")
    for name in symbol.split("."):
        thing = getattr(thing, name)


def test_the_tree_shows_every_module_once_with_its_purpose():
    (tree,) = re.findall(r"```\n(src/compressive/\n.*?)```", ARCHITECTURE, re.DOTALL)
    shown: list[str] = []
    folders: list[tuple[int, str]] = []
    for indent, name, purpose in re.findall(r"^( *)(\S+)(?: +(\S.*))?$", tree, re.MULTILINE):
        folders = [(depth, folder) for depth, folder in folders if depth < len(indent)]
        if name.endswith("/"):
            folders.append((len(indent), name))
        else:
            shown.append("".join(folder for _, folder in folders) + name)
            assert purpose, f"{name} has no purpose"
    present = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "src" / "compressive").rglob("*.py")
        if not path.name.startswith("__")
    ]
    assert sorted(shown) == sorted(present)


def test_the_results_page_and_the_readme_are_those_of_the_experiments():
    """`python tools/results_page.py` would change nothing."""
    made = runpy.run_path(str(ROOT / "tools" / "results_page.py"))
    assert made["page"](ROOT) == PAGES["docs/results.md"]
    assert made["readme"](ROOT) == README
    assert "](results.md" not in README
    for name in EXPERIMENTS:
        assert f"| `{name}` | " in PAGES["docs/results.md"]
        if (ROOT / "experiments" / "results" / name).is_dir():
            assert f"<!-- result {name} " in PAGES["docs/results.md"]


# The paper's table


def test_every_preset_is_in_the_paper_s_table():
    named = set(re.findall(r"`presets/([\w-]+\.toml)`", PAPER))
    assert named == {path.name for path in (ROOT / "src" / "compressive" / "presets").glob("*.toml")}


def test_every_algorithm_line_is_in_the_paper_s_table():
    for heading, lines in (("Algorithm 1", 12), ("Algorithm 2", 8)):
        section = PAPER.split(f"## {heading}")[1].split("\n## ")[0]
        rows = re.findall(r"^\| (\d+)(?:-(\d+))? \|", section, re.MULTILINE)
        covered = [n for first, last in rows for n in range(int(first), int(last or first) + 1)]
        assert covered == list(range(1, lines + 1))


# Numbers


def test_the_quickstart_s_figures_are_those_of_its_results():
    old, new = (results(f"experiments/quickstart/2026-11-{day}-cpu") for day in (15, 18))
    test, spread = old["report"]["test"], new["spread"]
    bits, worth = (
        f"{spread[name]['mean']:.3f} ± {spread[name]['deviation']:.3f}"
        for name in ("test_bits", "compressed_memory_worth")
    )
    row = f"| **{bits}** | {test['xz']:.3f} | {test['xz_after_training']:.3f} | {worth} |"
    assert row in README
    assert worth in PAGES["docs/results.md"]
    seeds = [f"{row['test_bits']:.3f}" for row in new["rows"]]
    assert (
        f"Seeds gave {seeds[0]}, {seeds[1]} and {seeds[2]}. An earlier version of the code gave {test['bits']:.3f}"
        in README
    )
    assert f"{new['make_quickstart_seconds'] // 60:.0f} min {new['make_quickstart_seconds'] % 60:.0f} s" in README
    index = " ".join(PAGES["docs/index.md"].split())
    assert f"three seeds gave {seeds[0]}, {seeds[1]} and {seeds[2]} (" in index
    assert f"Expect about {spread['test_bits']['mean']:.1f} bits per character" in index


def evaluated(found: dict, who: str) -> str:
    """Return, choices per episode and right choices of a policy, as the tables show them."""
    row = found["policies"][f"{who}_delay_0"]
    per_episode, right = row["choices"] / row["episodes"], row["choice_accuracy"] * 100
    return f"{row['return']:.1f} ± {row['return_margin_95']:.1f} | {per_episode:.1f} | {right:.1f} %"


def test_the_figures_of_the_agent_are_those_of_its_results():
    full = results("experiments/rooms/2026-11-16-h200")
    runs = results("experiments/rooms-tiny/2026-11-18-cpu")["runs"]
    tiny = runs[0]
    for shown, name in (("agent", "agent"), ("chance", "random"), ("oracle", "oracle")):
        for found in (tiny, full):
            assert f"| {shown} | {evaluated(found, name)} |" in PAGES["docs/results.md"]
    for run in runs:
        assert f"| {run['seed']} | {evaluated(run, 'agent')} | {run['cpu_seconds']:.0f} |" in PAGES["docs/agent.md"]

    def score(found: dict, who: str) -> str:
        return evaluated(found, who).split(" |")[0]

    assert f"{score(full, 'agent')}, chance {score(full, 'random')};" in README
    shares = [run["policies"]["agent_delay_0"]["choice_accuracy"] * 100 for run in runs]
    tuned, further = (f"{min(part):.1f} to {max(part):.1f} %" for part in (shares[:5], shares[5:]))
    summary = f"Seeds 0 to 4 have {tuned} right choices, seeds 5 to 7 {further}"
    assert summary in " ".join(PAGES["docs/results.md"].split())
    no_memory = results("experiments/rooms-tiny-no-memory/2026-11-18-cpu")
    assert evaluated(no_memory, "agent").split("| ")[2] in PAGES["docs/agent.md"]


BASE, FULL = "benchmarks/peers-base/2026-11-16-h200-2", "benchmarks/peers-paper/2026-11-16-h200-3"
LABELS = {
    "ours-compiled": "ours, compiled",
    "ours": "ours",
    "ctp": "lucidrains, as shipped",
    "ctp-lean": "lucidrains, no extras",
    "ctp-lean-compiled": "lucidrains, compiled",
    "labml": "labml-nn",
    "plain-compiled": "flash attention",
}


def rows(file: str) -> dict[str, dict]:
    """The rows of a results file; the bound is that of later runs."""
    found = {row["name"]: row for row in results(file)["rows"]}
    if file in (BASE, FULL):
        bound = results(f"{Path(file).parent}/2026-11-19-h200")["rows"]
        found |= {row["name"]: row for row in bound if row["name"] == "plain-compiled"}
    return found


def table_row(page: str, label: str, *, having: str) -> list[str]:
    """Return the cells of the row that begins with a label, of the table whose heading has some words."""
    plain = page.replace("*", "")
    for table in re.findall(r"(?:^\|.*\n)+", plain, re.MULTILINE):
        heading, _, *lines = table.splitlines()
        if having in heading:
            for line in lines:
                cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                if cells[0].strip() == label or (label not in ("ours",) and cells[0].strip().startswith(label)):
                    return cells[1:]
    raise AssertionError(f"no row {label!r} in a table with {having!r}")


def per_second(row: dict | None, key: str = "tokens_per_second") -> str:
    return f"{row[key]:,.0f}" if row and key in row else "–"


@pytest.mark.parametrize("name", ["ours-compiled", "ctp", "ctp-lean-compiled", "labml", "plain-compiled"])
def test_the_readme_s_speed_table_is_that_of_its_results(name):
    base, full = rows(BASE), rows(FULL)
    sampled = base["ours" if name == "ours-compiled" else name]
    expected = [per_second(base[name]), per_second(full[name])]
    expected += [per_second(sampled, f"sampled_per_second_batch_{batch}") for batch in (1, 32)]
    assert [cell.rstrip("| ") for cell in table_row(README, LABELS[name], having="training, base")] == expected


def test_the_speeds_beside_the_bound_are_those_of_its_runs():
    shares = []
    for file, page in ((BASE, README), (FULL, README)):
        found = {row["name"]: row for row in results(f"{Path(file).parent}/2026-11-19-h200")["rows"]}
        ours, bound = found["ours-compiled"], found["plain-compiled"]
        assert per_second(ours) in page
        assert per_second(ours) in PAGES["docs/benchmarks.md"]
        shares.append(f"{ours['tokens_per_second'] / bound['tokens_per_second']:.0%}".replace("%", " %"))
    assert " and ".join(shares) in PAGES["docs/benchmarks.md"]


def test_the_speeds_of_presets_are_those_of_their_results():
    page, shown = PAGES["docs/benchmarks.md"], 0
    for row in results("benchmarks/presets/2026-11-19-h200")["rows"]:
        if "error" in row:
            continue
        figures = f"{row['step_ms']:.1f} | {row['tokens_per_second']:,.0f} | {row['peak_gib']:.1f} |"
        assert f"| {row['batch']} | {figures} {row['utilisation'] * 100:.1f} % |" in page
        shown += 1
    assert shown == 6


@pytest.mark.parametrize("name", [name for name in LABELS if name != "ctp-lean"])
def test_the_speed_tables_are_those_of_their_results(name):
    page, base, full = PAGES["docs/benchmarks.md"], rows(BASE), rows(FULL)
    expected = [f"{per_second(r)} ({r['peak_gib']:.1f})" if r else "–" for r in (base.get(name), full.get(name))]
    assert [cell.rstrip("| ") for cell in table_row(page, LABELS[name], having="tokens/s (peak GiB)")] == expected
    if "sampled_per_second_batch_1" in base[name]:
        expected = [per_second(base[name], f"sampled_per_second_batch_{batch}") for batch in (1, 32)]
        shown = table_row(page, LABELS[name], having="| batch 1 | batch 32 |")
        assert [cell.rstrip("| ") for cell in shown] == expected


def test_the_ratios_and_the_cpu_s_table_are_those_of_their_results():
    page, cpu = PAGES["docs/benchmarks.md"], "benchmarks/peers-cpu/2026-11-16-cpu-2"
    ratios = [results(file)["ours_to_best_peer"]["tokens_per_second"] for file in (BASE, FULL)]
    assert f"**{ratios[0]:.2f}×** | **{ratios[1]:.2f}×**" in page
    for name, row in rows(cpu).items():
        expected = [per_second(row), *(per_second(row, f"sampled_per_second_batch_{batch}") for batch in (1, 32))]
        shown = table_row(page, LABELS[name], having="generation, batch 1")
        assert [cell.rstrip("| ") for cell in shown] == expected
    alone = rows("benchmarks/sampling/2026-11-16-h200")["ours"]
    shown_alone = " | ".join(per_second(alone, f"sampled_per_second_batch_{batch}") for batch in (1, 32))
    assert f"| {shown_alone} |" in page
    (speed,) = results("benchmarks/rooms-speed/2026-11-16-h200")["rows"]
    keys = [f"{part}_steps_per_second" for part in ("task", "acting", "learning", "training")]
    assert f"| {' | '.join(per_second(speed, key) for key in keys)} |" in page


def test_the_figures_of_speech_are_those_of_its_results():
    models = results("experiments/speech/2026-11-16-h200")["models"]
    for key, label in (
        ("transformer-xl", "TransformerXL"),
        ("compressive", "Compressive Transformer"),
        ("wavenet", "WaveNet"),
    ):
        bits = f"{models[key]['best']['test']['bits']:.3f}"
        assert f"{label} {bits}" in README
        assert table_row(PAGES["docs/results.md"], label, having="paper's order")[1].rstrip("| ") == bits
        assert table_row(PAGES["docs/speech.md"], label, having="test, bits")[1] == bits
    speed = results("experiments/speech/2026-11-16-h200")["plan"]["samples_per_second"]
    ours, txl = (f"{speed[key]:,.0f}" for key in ("compressive", "transformer-xl"))
    shown = f"at {ours} samples per second with compressed memory and at {txl} without"
    assert shown in " ".join(PAGES["docs/choosing.md"].split())


def test_the_comparison_on_enwik8_is_that_of_its_results():
    scores: dict[str, list[str]] = {}
    for run in results("experiments/enwik8-memory/2026-11-18-h200")["runs"]:
        (test,) = (row for row in run["evaluation"] if row["split"] == "test" and row["label"] == "as trained")
        scores.setdefault(run["title"], []).append(f"{test['bits']:.4f}")
    ours, txl, small = (
        scores[title] for title in ("compressive 512+512 rate 4", "TransformerXL 1024", "TransformerXL 512")
    )
    page = PAGES["docs/results.md"]
    assert table_row(page, "Compressive Transformer, 512 + 512", having="seed 0")[0:2] == ours
    assert table_row(page, "TransformerXL, 1,024", having="seed 0")[0:2] == txl
    assert table_row(page, "TransformerXL, 512", having="seed 0")[0:2] == [*small, "–"]
    assert f"{' and '.join(ours)}; TransformerXL {' and '.join(txl)}" in README


def test_the_figures_of_choosing_are_those_of_their_results():
    page = " ".join(PAGES["docs/choosing.md"].split())
    runs = {(run["title"], run["seed"]): run for run in results("experiments/enwik8-memory/2026-11-18-h200")["runs"]}

    def bits(title: str, seed: int, label: str, split: str = "valid", kind: str = "bits") -> str:
        (found,) = (
            e for e in runs[title, seed]["evaluation"] if (e["split"], e["label"].split(", ")[0]) == (split, label)
        )
        return f"{found[kind]:.4f}"

    sizes = ["memory_size 256", "memory_size 512", "as trained", "memory_size 2048", "memory_size 4096"]
    for seed in (0, 1):
        row = " | ".join(bits("TransformerXL 1024", seed, size) for size in sizes)
        assert f"| seed {seed} | {row} |" in page
    ours, theirs = (
        [bits(title, seed, "as trained", "test") for seed in (0, 1)]
        for title in ("compressive 512+512 rate 4", "TransformerXL 1024")
    )
    assert f"{ours[0]} and {ours[1]} against {theirs[0]} and {theirs[1]}" in page
    run = runs["compressive 512+512 rate 4", 0]
    assert f"{run['parameters_of_compressors'] / 1e6:.1f} of {run['parameters'] / 1e6:.1f} million" in page
    found = {e["label"]: e for e in run["evaluation"] if e["split"] == "valid"}
    zeros, masked = (found[f"compressed_size 1024, empty_memory {kind}"] for kind in ("zeros", "masked"))
    assert f"1.4401 bits with none, {found['as trained']['bits']:.4f} with 512, {zeros['bits']:.4f} with 1,024" in page
    assert f"{found['compressed_size 0']['bits']:.4f} bits with none" in page
    assert f"{found['compressed_size 2048, empty_memory zeros']['bits']:.4f} with 2,048" in page
    assert f"{zeros['bits']:.4f} and masked slots {masked['bits']:.4f} bits" in page
    assert f"{zeros['filled']:.4f}" == f"{masked['filled']:.4f}"
    assert f"{zeros['filled']:.4f} both" in page
    curve = {
        r["step"]: r for r in results("experiments/enwik8-base/2026-11-15-h200-2")["curve"] if r["kind"] == "train"
    }
    for step in (100, 900, 2100, 11000):
        assert f"{curve[step]['compression_loss']:.3f} at step {step:,}" in page
    assert f"from {curve[900]['loss']:.2f} to {curve[2100]['loss']:.2f} nats" in page
    losses = [
        {point["step"]: point["compression_loss"] for point in runs["compressive 512+512 rate 4", seed]["curve"]}
        for seed in (0, 1)
    ]
    assert [max(loss, key=loss.__getitem__) for loss in losses] == [1250, 1250]
    ends = [f"{losses[0][step]:.3f} and {losses[1][step]:.3f}" for step in (1250, 6250)]
    assert f"highest at step 1,250, {ends[0]}, and ends at {ends[1]}" in page


def test_the_figures_of_small_in_choosing_are_those_of_their_results():
    page, slots = PAGES["docs/choosing.md"], (384, 640, 960, 1408, 1920)
    swept: dict[str, dict[int, list[float]]] = {}
    for row in results("experiments/memory-sizes/small")["rows"]:
        for one in row["found"]["valid"]:
            if one["empty_memory"] == "zeros":
                swept.setdefault(row["row"], {}).setdefault(one["slots"], []).append(one["bits"])
    for label, row in (
        ("TransformerXL, trained with 960", "txl-equal-cost"),
        ("Compressive Transformer, trained with 384 + 576 at rate 3", "compressive"),
    ):
        assert table_row(page, label, having="1,408") == [over_seeds(swept[row][n], 4) for n in slots]
    tested: dict[str, list[float]] = {}
    for row in results("experiments/enwik8/small")["rows"]:
        tested.setdefault(row["row"], []).append(row["found"]["test"]["bits_per_byte"])
    both = " and ".join(over_seeds(tested[row], 4) for row in ("txl-equal-cost", "compressive"))
    assert f"Test bits as trained are {both}" in page
    (zeros,) = (said for said in results("experiments/memory-sizes/small")["verdicts"] if "for what is empty" in said)
    assert "+0.01146 ± 0.00490 bits" in zeros
    assert "0.0115 ± 0.0049 bits" in page


def over_seeds(values: list[float], digits: int) -> str:
    return f"{sum(values) / len(values):.{digits}f}"


def test_the_tables_of_choosing_are_those_of_their_results():
    page = PAGES["docs/choosing.md"]
    reaches: dict[str, list[float]] = {}
    kept: dict[str, list[float]] = {}
    for row in results("experiments/recall/tiny")["rows"]:
        reaches.setdefault(row["title"], []).append(row["found"]["reach"])
        kept.setdefault(row["title"], []).append(row["found"]["compressed"]["accuracy"])
    for rate in ("rate 2", "rate 4", "rate 8"):
        shown = table_row(page, rate, having="should reach")[2:]
        assert shown == [over_seeds(reaches[rate], 1), over_seeds(kept[rate], 3)]
    assert table_row(page, "TransformerXL", having="should reach")[2] == over_seeds(reaches["TransformerXL"], 1)
    assert f"reaches {over_seeds(reaches['TransformerXL, 2 layers'], 1)} bytes there" in page
    prose = " ".join(page.split())
    assert f"it read {over_seeds(reaches['rate 8'], 0)} bytes before, a TransformerXL" in prose
    assert f"only up to {over_seeds(reaches['TransformerXL'], 0)} bytes" in prose
    apart = " and ".join(f"{reach:.1f}" for reach in sorted(reaches["rate 8, most-used"]))
    assert f"between its two seeds ({apart})" in prose

    costs = {row["function"]: row["against_none"] for row in results("benchmarks/compressors/2026-11-19-cpu")["rows"]}
    tested: dict[str, list[float]] = {}
    for row in results("experiments/compression-functions/tiny")["rows"]:
        tested.setdefault(row["row"], []).append(row["found"]["test"]["bits_per_byte"])
    for label, row, recalled in (
        ("`conv`, the default", "conv", "rate 8"),
        ("`dilated`", "dilated", None),
        ("`most_used`", "most-used", "rate 8, most-used"),
        ("`mean`", "mean", "rate 8, mean"),
        ("`conv`, auto-encoding loss", "conv-autoencoding", "rate 8, conv auto-encoding"),
        ("`max`", "max", "rate 8, max"),
        ("`conv`, BPTT", "conv-bptt", None),
        ("`gru` (ours)", "gru", None),
        ("`attention` (ours)", "attention", None),
    ):
        _, takes, _, bits, reach = table_row(page, label, having="reach at rate 8")
        assert takes == f"{costs[FUNCTIONS[row].title]:.2f} ×"
        assert bits == over_seeds(tested[f"function-{row}-rate3"], 4)
        assert reach.split(" ")[0] == (over_seeds(reaches[recalled], 1) if recalled else "–")

    quickstart, *_, reset = results("experiments/from-empty/2026-11-18-cpu")["rows"]
    assert reset["reset_probability"] == 0.05
    first = {kind: f"{quickstart['first_window'][kind][0]['bits']:.2f}" for kind in ("zeros", "masked")}
    assert f"{first['zeros']} bits for the first token after an empty memory, and {first['masked']} if" in page
    assert f"then has {reset['first_window']['zeros'][0]['bits']:.2f} bits" in page
    assert f"{reset['test_bits']:.3f} bits of the test books against {quickstart['test_bits']:.3f}" in page


def test_other_figures_are_those_of_their_results():
    enwik8 = results("experiments/enwik8-base/2026-11-15-h200-2")
    bits = f"{enwik8['test']['as_trained']['bits_per_character']:.3f}"
    memory = enwik8["analysis_valid"]["memory"]
    worths = [f"{memory[key]['mean']:.3f} ± {memory[key]['error']:.3f}" for key in ("compressed_worth", "recent_worth")]
    built = results("experiments/pg19-verify/2026-11-15-cpu")["verify"]
    speed = results("benchmarks/pg19-speed/2026-11-15-cpu")
    tokenise = speed["tokenise"]["two_processes"]
    assert bits in PAGES["docs/results.md"]
    best = f"{results('experiments/enwik8-best/2026-11-20-h200')['test'][0]['bits_per_character']:.3f}"
    for page in ("README.md", "docs/results.md"):
        assert best in PAGES[page]
        assert f"{built['matched']} of {built['built']}" in PAGES[page]
    assert all(worth in PAGES["docs/results.md"] for worth in worths)
    pg19 = PAGES["docs/pg19.md"]
    assert f"{built['matched']} of the {built['built']} raw books" in pg19
    assert f"{speed['build']['folder_mb_per_second_one_process']} MB of raw text per second" in pg19
    assert f"tokenise {tokenise['mb_per_second']} MB/s in {tokenise['memory_mb']} MB of memory" in pg19


def test_the_presets_that_sort_to_sample_are_named():
    page = PAGES["docs/benchmarks.md"].split("Sampling from more than 1,024 tokens (")[1].split(") sorts")[0]
    sorts = {
        name
        for name in preset_names("data")
        if dispatch.explain(RunConfig.from_preset(name).model, triton=True)["sampling"].form == "reference"
    }
    assert set(re.findall(r"`([\w-]+)`", page)) == sorts


@pytest.mark.slow
def test_the_scaling_table_is_what_the_script_computes():
    result = subprocess.run(
        [*interpreter(), ROOT / "experiments" / "scaling.py"], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() in PAGES["docs/scaling.md"]


# The project's own files


def test_the_citation_has_the_package_s_version():
    assert re.search(rf"^version: {re.escape(__version__)}$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)


def test_the_lock_pins_exact_versions_of_every_direct_dependency():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(
            x
            for name in ("dev", "plots", "topics", "audio", "rl", "ray", "onnx", "hf", "lm-eval", "web")
            for x in extras[name]
        ),
    ]
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in wanted} <= set(pins)
    assert not [version for version in pins.values() if not re.fullmatch(r"[\d.]+(\.post\d+)?", version)]
