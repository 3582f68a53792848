"""Make a shipped model of a finished run: its weights, its scores and its card.

    python tools/ship.py runs/enwik8-small --results experiments/results/enwik8-small/DATE-DEVICE.json
    python tools/ship.py runs/rooms --results experiments/results/rooms-small/DATE-DEVICE.json
    python tools/ship.py runs/enwik8-best --out weights/enwik8-best --precision int8 --shard-size 15 \
        --results experiments/results/enwik8-best/DATE-DEVICE.json       # one that is too large for the package

A model of text ships in bf16 with an excerpt of its corpus. What is scored is what ships, the rounded weights: the
whole test split with the memory sizes of training, and with those that are best on validation; with `--dynamic` also by
dynamic evaluation, at the rate that is best on validation; for weights in 8 bits also by how much they differ from the
run's own, on validation. An agent plays 1,024 episodes, beside the random policy and the oracle. The card, README.md,
has only figures of the results file. The folder, in src/compressive/shipped/ unless `--out` names another, must not
exist yet, or hold the same weights of text in the same form, whose scoring was cut off.
"""

import argparse
import dataclasses
import filecmp
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

from compressive.analysis.memory import measure_memory
from compressive.bench import write_results
from compressive.config import transformer
from compressive.data.corpus import SPLITS, Corpus, write_corpus
from compressive.distributed import World
from compressive.evaluation.sweep import Reading, Result, combinations, sweep
from compressive.model.language_model import CompressiveLM
from compressive.rl import release
from compressive.rl.evaluate import compare
from compressive.rl.run import AgentFolder
from compressive.runs.export import export
from compressive.runs.origin import Origin
from compressive.runs.run import RELEASE, Run, read_config
from compressive.runs.shipped import EXCERPT, SHIPPED, spelled
from compressive.runs.trained import EvalConfig, Trained
from compressive.runs.weights import Stored, read_weights, weight_files, write_weights
from compressive.runtime import autocast, pick_device, write_atomically

TOKENS = {"train": 10_000, "valid": 100_000, "test": 100_000}
"""Tokens of each split in the excerpt; nothing reads the training text, which a corpus must have."""
EPISODES = 1024
"""Episodes that an agent is evaluated on."""


def main() -> None:
    """Export, score, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="results file to write")
    parser.add_argument("--memory-sizes", help="recent sizes to try (default: that of training)")
    parser.add_argument("--sizes", default="64,128,256,512", help="compressed sizes to try (default: %(default)s)")
    parser.add_argument("--dynamic", type=float, nargs="*", default=[], help="rates of dynamic evaluation to try")
    parser.add_argument("--streams", type=int, default=16, help="streams to read (default: %(default)s)")
    parser.add_argument(
        "--valid", type=int, default=500_000, help="tokens to choose the size on (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder to create (default: the run's name, in the package)")
    parser.add_argument("--precision", choices=("bf16", "int8"), default="bf16", help="of text (default: %(default)s)")
    parser.add_argument("--shard-size", type=int, default=0, help="MiB of a file; 0 for one file (default: 0)")
    parser.add_argument("--arithmetic", choices=("fp32", "bf16"), default="fp32", help="of scoring (default: fp32)")
    parser.add_argument("--device", default="auto", help="where to score (default: %(default)s)")
    options = parser.parse_args()
    folder = options.out or SHIPPED / options.run.resolve().name
    if "task" in read_config(options.run, "compressive train"):
        text = agent_card(ship_agent(options.run, folder, options.results))
    else:
        text = ship_text(options, folder)
    (folder / "README.md").write_text(text, "utf-8")
    print(text)


def ship_agent(source: Path, folder: Path, results: Path) -> dict[str, Any]:
    """Export and evaluate an agent; return what the results file holds."""
    release.export(AgentFolder.open(source), folder)
    _, policies = compare(str(folder), EPISODES, envs=64, seed=1_000_000, device=torch.device("cpu"))
    weights = read_weights(folder)
    about = (
        provenance(folder, weights)
        | training(source)
        | {
            "steps": json.loads((folder / RELEASE).read_text("utf-8"))["step"],
            "evaluation": {name: found.as_dict() for name, found in policies.items()},
        }
    )
    return written(results, f"the shipped agent {folder.name}: training and evaluation", about)


def ship_text(options: argparse.Namespace, folder: Path) -> str:
    """Export and score a model of text; return its card."""
    run, world = Run.open(options.run), World(device=pick_device(options.device))
    corpus, trained_by = run.corpus(), training(options.run)
    if not (folder / RELEASE).exists() or (folder / "README.md").exists():
        export(run, folder, precision=options.precision, shard_size=options.shard_size)
    elif not same_weights(run, folder, options.precision, options.shard_size):
        raise ValueError(f"out={folder}: holds other weights than those of {options.run}, or in another form")
    if not (folder / EXCERPT).exists():
        write_excerpt(corpus, folder / EXCERPT)

    trained = Trained.load(Run.open(folder))
    on_valid = Reading("valid", options.streams, options.valid, options.arithmetic)
    on_test = Reading("test", options.streams, precision=options.arithmetic)
    swept = scored(trained, corpus, combinations(trained, options.memory_sizes, options.sizes), on_valid, world)
    best = min(swept, key=lambda result: result.headline).config
    sizes = list(dict.fromkeys([trained.eval_config(), best]))
    tested = scored(trained, corpus, sizes, on_test, world)
    adapted = dynamic(trained, corpus, best, options.dynamic, (on_valid, on_test), world)
    write_atomically(folder / "evaluation" / "test.json", json.dumps(tested[0].as_dict(), indent=1) + "\n")
    model = trained.model(transformer(trained.config), world.device)
    assert isinstance(model, CompressiveLM)
    with autocast(world.device, options.arithmetic):
        memory = measure_memory(model, corpus.split("valid"), tokens=200_000, streams=options.streams)

    exact, rounded = (
        scored(weights, corpus, [weights.eval_config()], on_valid, world)[0].metrics.bits_per_token
        for weights in (Trained.load(run), trained)
    )
    about = (
        provenance(folder, trained.weights)
        | trained_by
        | {
            "precision": options.precision,
            "arithmetic": options.arithmetic,
            "rounding_bits_per_token": rounded - exact,
            "validation": [result.as_dict() for result in swept],
            "test": [result.as_dict() for result in tested],
            "dynamic": adapted,
            "memory": memory.as_dict(),
        }
    )
    found = written(options.results, f"the shipped model {folder.name}: training, scores, use of memory", about)
    return card(found, corpus)


def same_weights(run: Run, folder: Path, precision: Stored, shard_size: int) -> bool:
    """Whether a release is what an export of a run would be now, file by file."""
    with tempfile.TemporaryDirectory() as other:
        write_weights(Path(other), Trained.load(run).weights, precision, shard_size)
        files = weight_files(Path(other))
        same = [file.name for file in files] == [file.name for file in weight_files(folder)]
        same = same and all(filecmp.cmp(file, folder / file.name, shallow=False) for file in files)
    return same and Run.open(folder).config == run.config


def provenance(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What was made of a run's weights."""
    return {
        "name": folder.name,
        "called": spelled(folder),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "bytes": sum(file.stat().st_size for file in weight_files(folder)),
    }


def training(source: Path) -> dict[str, Any]:
    """Commands, configuration and curve of a run, and of the run that it started from, if that is a run: `before`."""
    starts, records = (
        [json.loads(line) for line in (source / name).read_text("utf-8").splitlines()]
        for name in ("environment.jsonl", "metrics.jsonl")
    )
    origin = Origin.read(source)
    kept = ("commit", "time", "python", "torch", "gpu", "cpu_cores", "threads")
    curve = ("kind", "step", "seconds", "bits", "compression_loss", "return", "choices", "choice_accuracy")
    return {
        "trained": [{name: start[name] for name in kept} | {"command": start["command"][1:]} for start in starts],
        "seconds": records[-1]["seconds"],
        "config": json.loads((source / "config.json").read_text("utf-8")),
        "curve": [{key: record[key] for key in curve if key in record} for record in records],
        **({} if origin is None else {"origin": dataclasses.asdict(origin)}),
        **({"before": training(Path(origin.source))} if origin is not None and is_run(Path(origin.source)) else {}),
    }


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, not a release, which does not say how it was trained."""
    return (folder / "environment.jsonl").is_file()


def written(results: Path, what: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Write the results file; return what it holds."""
    write_results(results, what, " ".join(["python", *sys.argv]), [], **about)
    found: dict[str, Any] = json.loads(results.read_text("utf-8"))
    return found


def scored(trained: Trained, corpus: Corpus, configs: list[EvalConfig], reading: Reading, world: World) -> list[Result]:
    """Score with several memory sizes."""
    found = []
    for result in sweep(trained, corpus, configs, reading, world):
        found.append(result)
        how = reading.split if reading.dynamic is None else f"{reading.split}, dynamic at {reading.dynamic:g}"
        print(f"{how}: {memory_of(result.as_dict())}: {result.headline:.4f}, {result.seconds:.0f} s", flush=True)
    return found


def dynamic(
    trained: Trained,
    corpus: Corpus,
    config: EvalConfig,
    rates: list[float],
    readings: tuple[Reading, Reading],
    world: World,
) -> dict[str, list[dict[str, Any]]]:
    """Score by dynamic evaluation: validation at every rate, test at the best of them; nothing without rates."""
    if not rates:
        return {}
    on_valid, on_test = readings

    def at(rate: float, reading: Reading) -> Result:
        return scored(trained, corpus, [config], dataclasses.replace(reading, dynamic=rate), world)[0]

    swept = {rate: at(rate, on_valid) for rate in rates}
    best = min(swept, key=lambda rate: swept[rate].headline)
    found = {"validation": swept, "test": {best: at(best, on_test)}}
    return {
        split: [{"learning_rate": rate, **result.as_dict()} for rate, result in results.items()]
        for split, results in found.items()
    }


def write_excerpt(corpus: Corpus, folder: Path) -> None:
    """Prepare the beginning of each split as a corpus of its own."""

    def beginning(split: str) -> Iterable[bytes]:
        yield corpus.tokenizer.decode(corpus.split(split)[: TOKENS[split]].tolist())

    note = f"an excerpt, the first {TOKENS['test']:,} tokens of each split: not comparable with scores of the whole"
    write_corpus(folder, corpus.name, corpus.tokenizer, {split: beginning(split) for split in SPLITS}, {}, note)


def memory_of(result: Mapping[str, Any]) -> str:
    """Memory sizes in words."""
    return f"{result['memory_size']} recent and {result['compressed_size']} compressed slots"


def card(found: Mapping[str, Any], corpus: Corpus) -> str:
    """The model card, from the results file."""
    model, memory = found["config"]["model"], found["memory"]
    tests, name = found["test"], found["name"]
    of_bytes = corpus.tokenizer.kind == "bytes"
    tokens = "bytes" if of_bytes else f"{model['vocab_size']:,} subwords"
    adapted = found["dynamic"].get("test", [])
    rows = [(memory_of(test), test) for test in tests]
    rows += [(f"the same, dynamic evaluation at a rate of {test['learning_rate']:g}", test) for test in adapted]
    if of_bytes:
        table = ["| memory | bits per character |", "|---|---|"]
        table += [f"| {how} | {test['bits_per_character']:.4f} |" for how, test in rows]
    else:
        table = ["| memory | perplexity per word | bits per byte |", "|---|---|---|"]
        table += [f"| {how} | {test['word_perplexity']:.2f} | {test['bits_per_byte']:.4f} |" for how, test in rows]
    what = "Sizes other than those of training" + " and the rate of dynamic evaluation" * bool(adapted)
    chosen = f"{what} were chosen on {found['validation'][0]['tokens']:,} tokens of validation."
    worth, empty = memory["compressed_worth"], memory["since_empty"][0]
    about = (
        f"A Compressive Transformer of {found['parameters'] / 1e6:.1f} million parameters: {model['n_layers']} layers "
        f"of width {model['d_model']}, window {model['window']}, {model['memory_size']} recent and "
        f"{model['compressed_size']} compressed slots at rate {model['compression_rate']}; {tokens}. Weights in "
        f"{found['precision']}, {found['bytes'] / 2**20:.1f} MiB: rounding them costs "
        f"{found['rounding_bits_per_token']:.4f} bits per token of validation text."
    )
    data = f"**Data.** {corpus.name}, {corpus.bytes('train') / 1e6:,.0f} MB of training text. {corpus.manifest.note}"
    training = f"**Training.** {' '.join(stages(found))}"
    scores = (
        f"**Scores** of the whole test split, {tests[0]['tokens']:,} tokens read in {tests[0]['streams']} streams, "
        f"with the weights as they ship, in {found['arithmetic']}:"
    )
    used = (
        f"**Memory.** With compressed memory hidden, a token costs {worth['mean']:.4f} ± {worth['error']:.4f} bits "
        f"more (validation). The first token after an empty memory costs {empty['bits']:.2f} bits, "
        f"{empty['excess']['mean']:.2f} ± {empty['excess']['error']:.2f} more than with full memories."
    )
    limits = (
        "**Use.** A small model to try things out with. Its text has the form of its corpus and little sense, and "
        "repeats what such text says of people and places, true or not."
    )
    files = (
        f"`excerpt/` has the first {TOKENS['test']:,} tokens of the validation and test splits, so that `evaluate` and "
        f"`analyze` work where the corpus is not prepared. The figures are in `experiments/results/{name}` of the "
        "repository. Licences: `NOTICE`."
    )
    commands = ("generate NAME --prompt 'The old house' --length 300", "evaluate NAME", "analyze NAME memory")
    shown = "\n".join(
        ["```sh", *(f"compressive {words.replace('NAME', found['called'])}" for words in commands), "```"]
    )
    paragraphs = [data, training, scores, "\n".join(table), *[chosen] * (len(rows) > 1), used, limits, files]
    wrapped = [text if text.startswith("|") else fill(text, 120, break_on_hyphens=False) for text in paragraphs]
    return "\n\n".join([f"# {name}", fill(about, 120), shown, *wrapped]) + "\n"


def stages(found: Mapping[str, Any]) -> list[str]:
    """How a model was trained, a sentence for each run that it took, the first run first."""
    model, train, start = found["config"]["model"], found["config"]["train"], found["trained"][0]
    tokens, minutes = train["steps"] * train["batch"] * model["window"], found["seconds"] / 60
    took = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:.1f} minutes"
    before = stages(found["before"]) if "before" in found else []
    if origin := found.get("origin"):
        source = "Then, from its" if before else f"From {origin['source']}'s"
        before.append(f"{source} weights of step {origin['step']:,}, the best on validation:")
    return [
        *before,
        f"`compressive {' '.join(start['command'])}`: {train['steps']:,} steps of "
        f"{train['batch']} streams, {tokens / 1e6:.0f} million tokens, in {took} on {trained_on(start)}; seed "
        f"{train['seed']}, commit {start['commit']}.",
    ]


def trained_on(start: Mapping[str, Any]) -> str:
    """The hardware in words."""
    return start["gpu"] or f"{start['threads']} thread of a CPU that other work shared"


def agent_card(found: Mapping[str, Any]) -> str:
    """The card of an agent, from the results file."""
    model, task, start, name = found["config"]["model"], found["config"]["task"], found["trained"][0], found["name"]
    agent, random, oracle = (found["evaluation"][policy] for policy in ("agent", "random", "oracle"))
    low, high = agent["choice_accuracy_interval"]
    about = (
        f"An agent of {found['parameters'] / 1e6:.2f} million parameters for the two rooms: a residual network, a "
        f"Compressive Transformer of {model['n_layers']} layer of width {model['d_model']} as its memory (window "
        f"{model['window']}, {model['memory_size']} recent and {model['compressed_size']} compressed slots at rate "
        f"{model['compression_rate']}), a policy and a value. Weights in fp32, {found['bytes'] / 2**20:.1f} MiB."
    )
    its_task = (
        f"**Task.** All {task['objects']} objects and whole episodes of {task['seconds']:.0f} seconds, but images of "
        f"{task['width']} × {task['height']} pixels, larger objects, and an avatar that is faster and turns less than "
        "in the full task. Scores cannot be compared with published ones."
    )
    training = (
        f"**Training.** `compressive {' '.join(start['command'])}`: {found['steps']:,} steps in "
        f"{found['seconds'] / 60:.0f} minutes on {trained_on(start)}; seed {found['config']['train']['seed']}, commit "
        f"{start['commit']}."
    )
    scores = f"**Scores** over {agent['episodes']:,} episodes, with 95 % intervals; actions are sampled:"
    table = [
        "| policy | return | right choices |",
        "|---|---|---|",
        f"| {name} | {agent['return']:.1f} ± {agent['return_margin_95']:.1f} | {agent['choice_accuracy']:.1%} of "
        f"{agent['choices']:,} ({low:.1%} to {high:.1%}) |",
        f"| oracle | {oracle['return']:.1f} ± {oracle['return_margin_95']:.1f} | {oracle['choice_accuracy']:.1%} |",
        f"| random | {random['return']:.1f} ± {random['return_margin_95']:.1f} | {random['choice_accuracy']:.1%} |",
    ]
    commands = (f"rl evaluate {name}", f"rl watch {name} --out episode.gif")
    shown = "\n".join(["```sh", *(f"compressive {words}" for words in commands), "```"])
    files = "`metrics.jsonl` has the curve of training. The figures are in `experiments/results` of the repository."
    wrapped = [fill(text, 120) for text in (its_task, training, scores)]
    return "\n\n".join([f"# {name}", fill(about, 120), shown, *wrapped, "\n".join(table), fill(files, 120)]) + "\n"


if __name__ == "__main__":
    main()
