"""Before the first step: what a run takes over from its corpus and its machine, and what it will need."""

import dataclasses
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode

from compressive.architectures import build_model
from compressive.config import AnyModelConfig, LearnConfig, ModelConfig, RunConfig, TrainConfig
from compressive.config.model import check_cutoffs
from compressive.console import note, warn
from compressive.data.corpus import Corpus
from compressive.distributed import World
from compressive.kernels.dispatch import using
from compressive.runs.origin import Origin
from compressive.runs.run import Run
from compressive.runs.shipped import spelled
from compressive.runtime import autocast, memory_gib
from compressive.training.step import FITTING

GIB = 2**30
Protocol = TypeVar("Protocol", TrainConfig, LearnConfig)


def begin(
    folder: Path,
    config: RunConfig,
    given: Collection[str],
    resume: bool,
    world: World,
    start_from: str | Path | None = None,
) -> Run:
    """Fit a configuration to its corpus and device, and create its run, or open the one that is to go on.

    A run that is resumed keeps its vocabulary, and is checked against the corpus that it was trained on. A new one may
    `start_from` the weights of another run or of a release, whose vocabulary it then takes over. All processes
    of a world call this together. Raises ValueError for what does not fit, see `check_start`, `Run.begin` and
    `Run.corpus`.
    """
    resumed = Run.open(folder) if resume and (folder / "config.json").exists() else None
    source = None if start_from is None else Run.open(Path(start_from))
    before = resumed or source
    if before is not None:
        names = [name for name in ("vocab_size", "adaptive_cutoffs") if f"model.{name}" not in given]
        held = before.config.model
        kept = {name: getattr(held, name) for name in names if hasattr(held, name) and hasattr(config.model, name)}
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **kept))
        given = {*given, *(f"model.{name}" for name in kept)}
    run = Run(folder, config)
    corpus = run.corpus() if resume else run.configured_corpus()
    if source is not None:
        check_start(source, config.model, corpus)
    config, changes = fit(config, given, corpus, world.device)
    for change in changes:
        note(change)

    def create() -> Run:
        origin = None if source is None else Origin.of(source)
        trained = any(folder.glob("checkpoints/step-*"))
        if resumed is not None and origin is not None and trained and origin != (found := Origin.read(folder)):
            began = "random weights" if found is None else f"{found.source}, step {found.step}"
            raise ValueError(
                f"from={origin.source}: the run to be resumed started from {began}; leave out --from, or begin another "
                "--out"
            )
        run = Run.begin(folder, config, resume)
        if origin is not None:
            origin.write(folder)
        return run

    return world.first(create)


INDEPENDENT = {
    "window", "memory_size", "compressed_size", "empty_memory", "spanning_slots", "dropout", "attention_dropout",
}  # fmt: skip
"""Fields of a model that its weights do not depend on."""
COMPRESSION = {"compression", "compression_rate", "compression_loss"}
"""Fields that compressors alone depend on."""


def check_start(source: Run, model: AnyModelConfig, corpus: Corpus) -> None:
    """Raise ValueError if a model on a corpus cannot start from the weights of a run or release.

    Tokens must mean the same, and every field that the weights depend on must be equal. Compressors count where both
    models have some. A loss may change: what it needs besides starts from random weights.
    """
    theirs, then, name = source.tokenizer(), source.config.model, spelled(source.folder)
    if not theirs.same_as(corpus.tokenizer):
        raise ValueError(
            f"{corpus.name} has other tokens ({corpus.manifest.tokenizer}, {corpus.vocab_size:,}) than {name} "
            f"was trained with ({theirs.kind}, {theirs.vocab_size:,}): prepare it again with "
            f"--vocabulary {name}"
        )
    ignored = INDEPENDENT | {"compression_loss"}
    if isinstance(model, ModelConfig) and isinstance(then, ModelConfig):
        if not any(model.compressed_sizes) or not any(then.compressed_sizes):
            ignored |= COMPRESSION
        elif model.compression_rates == then.compression_rates or model.compression in ("max", "mean", "most_used"):
            ignored |= {"compression_rate"}  # written differently, or of compressors without weights
    old, new = dataclasses.asdict(then), dataclasses.asdict(model)
    differing = [field for field in new if field not in ignored and old.get(field) != new[field]]
    if differing:
        values = ", ".join(f"model.{field}={new[field]!r} (there {old.get(field)!r})" for field in differing)
        raise ValueError(
            f"{values}: expected the values of {name}, as weights depend on them; give these, or train without --from"
        )


def fit(config: RunConfig, given: Collection[str], corpus: Corpus, device: torch.device) -> tuple[RunConfig, list[str]]:
    """Return the configuration with what its corpus and device decide, and a sentence for each change.

    The vocabulary is the corpus's; see also `fit_device`. A field that is `given`, such as `model.vocab_size`, stays.
    Raises ValueError for given cutoffs that are beyond the vocabulary.
    """
    model, said = config.model, []
    size = corpus.vocab_size
    if model.head == "softmax" and model.vocab_size != size and "model.vocab_size" not in given:
        said.append(f"vocabulary of {size:,}, that of {corpus.name}, in place of {model.vocab_size:,}")
        changes: dict[str, Any] = {"vocab_size": size}
        if isinstance(model, ModelConfig) and "model.adaptive_cutoffs" not in given:
            changes["adaptive_cutoffs"] = tuple(cut for cut in model.adaptive_cutoffs if cut < size)
            changes["first_band_projections"] = model.first_band_projections and bool(changes["adaptive_cutoffs"])
        model = dataclasses.replace(model, **changes)
    if isinstance(model, ModelConfig):
        check_cutoffs(model)
    train, changes_of_device = fit_device(config.train, given, device)
    return RunConfig(model, config.data, train), said + changes_of_device


def fit_device(train: Protocol, given: Collection[str], device: torch.device) -> tuple[Protocol, list[str]]:
    """Return the training protocol of text or of an agent for a device, and a sentence for each change.

    Without an NVIDIA GPU, products are in fp32 and nothing is compiled: presets made for one would be slow.
    """
    if device.type == "cuda":
        return train, []
    changes: dict[str, Any] = {}
    if train.precision == "bf16" and "train.precision" not in given:
        changes["precision"] = "fp32"
    if train.compile and "train.compile" not in given:
        changes["compile"] = False
    asks = "precision" in changes and device.type != "mps"  # which has no bf16 to ask for
    flags = ["--train.precision bf16"] * asks + ["--train.compile"] * ("compile" in changes)
    how = " and ".join(["in fp32"] * ("precision" in changes) + ["not compiled"] * ("compile" in changes))
    remedy = f"; {' '.join(flags)} keeps the preset's" if flags else ""
    return dataclasses.replace(train, **changes), [f"on {device}, training is {how}{remedy}"] if changes else []


def check_vocabulary(model: AnyModelConfig, corpus: Corpus) -> None:
    """Raise ValueError for a model that lacks tokens of the corpus; warn of tokens that the corpus lacks."""
    size = corpus.vocab_size
    if model.head == "logistics" and model.vocab_size != size:
        raise ValueError(
            f"head='logistics' over {model.vocab_size} codes: the corpus {corpus.name} has {size}, "
            "which would stand for other amplitudes; prepare it with --tokenizer pcm16, or use head softmax"
        )
    if model.vocab_size < size:
        raise ValueError(
            f"vocab_size={model.vocab_size}: the corpus {corpus.name} has {size} tokens; "
            f"give --model.vocab-size {size}, or leave it out"
        )
    if model.vocab_size > size:
        warn(f"vocab_size={model.vocab_size}: the corpus {corpus.name} has {size} tokens; the others are never trained")


class Need(NamedTuple):
    """Bytes that one process of a run needs on its device."""

    weights: int  # with gradients, Adam's two moments, and what is accumulated or averaged
    activations: int  # kept for the backward pass
    memory: int  # recent and compressed memory, before and after a step

    @property
    def total(self) -> int:
        """The sum."""
        return sum(self)


def estimate(config: RunConfig, device: torch.device, streams: int, rows: int | None = None) -> Need:
    """Estimate what a run needs, by a forward pass without data that counts what it keeps for the backward pass.

    `rows` of the streams go through the model at a time, all of them unless given.
    """
    options, kept, rows = config.train, list[UntypedStorage](), rows or streams

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage())
        return tensor

    with FakeTensorMode(), using(options.attention), torch.device(device):
        model = build_model(config.model).train()
        parameters = [parameter.untyped_storage() for parameter in model.parameters()]
        memory = model.initial_memory(streams, options.precision)
        slots = [x.untyped_storage() for x in memory.state_dict().values()]
        x = model.embedding(torch.zeros(rows, config.model.window, dtype=torch.long))
        with (
            autocast(device, options.precision),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            model.trunk(x, memory.rows(slice(rows)))
    weights, activations = _bytes(parameters), _bytes(kept, apart_from=parameters)
    if options.recompute:  # one layer's, and the input of each
        layers = config.model.n_layers
        activations = activations // layers + layers * x.numel() * x.element_size()
    accumulated = options.update_every > 1 and options.steps > options.update_every_from
    copies = 4 + accumulated + (options.weight_average > 0)
    return Need(weights * copies, activations * options.unroll, 2 * _bytes(slots))


def _bytes(storages: Iterable[UntypedStorage], apart_from: Iterable[UntypedStorage] = ()) -> int:
    """Add up the sizes of storages, each once."""
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return sum(sizes[key] for key in sizes.keys() - {storage._cdata for storage in apart_from})


def micro_batch(config: RunConfig, world: World, streams: int) -> int:
    """Return how many of a process's streams go through the model at a time; for `auto` an estimate of what fits.

    All processes of a world call this together and get the same.
    """
    asked = config.train.micro_batch
    return world.first(lambda: _fitting(config, world, streams)) if asked == "auto" else min(asked or streams, streams)


def _fitting(config: RunConfig, world: World, streams: int) -> int:
    there = memory_gib(world.device)
    try:
        need = estimate(config, world.device, streams)
    except Exception as error:  # an estimate must not stop a run
        note(f"no estimate of the memory that the run needs ({error})")
        return streams
    if there is None:
        return streams
    weights = need.weights // (world.size if config.train.parallel == "fsdp" else 1)
    left = FITTING * there * GIB - weights - need.memory
    rows = max(1, min(streams, int(left / max(1, need.activations // streams))))
    return -(-streams // -(-streams // rows))  # as many micro-batches, of equal size


def report(config: RunConfig, world: World, streams: int, rows: int | None = None) -> None:
    """Say what a run will need, and warn where the machine has less or where the rate never reaches its peak.

    `rows` of the process's streams go through the model at a time, all of them unless given.
    """
    options = config.train
    if options.steps <= options.warmup_steps:
        warn(_warm_up(options))
    if options.parallel == "fsdp":  # shards: a process needs less than a whole model
        return
    try:
        need = estimate(config, world.device, streams, rows)
    except ValueError:  # a configuration that cannot run
        raise
    except Exception as error:  # an estimate must not stop a run
        note(f"no estimate of the memory that the run needs ({error})")
        return
    there = memory_gib(world.device)
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in need._asdict().items())
    has = "" if there is None else f"; {world.device} has {there:.1f}"
    note(f"needs about {need.total / GIB:.1f} GiB ({parts}), besides Python and torch{has}")
    if there is not None and need.total > there * GIB:
        warn(
            f"about {need.total / GIB:.1f} GiB are needed and {there:.1f} are there: give --train.micro-batch auto, "
            "--train.recompute, or a smaller --train.batch (more --train.update-every), --model.window or model"
        )


def _warm_up(options: TrainConfig) -> str:
    return (
        f"steps={options.steps} end within warmup_steps={options.warmup_steps}: the learning rate never reaches "
        f"{options.learning_rate:g}; give more --train.steps or fewer --train.warmup-steps"
    )
