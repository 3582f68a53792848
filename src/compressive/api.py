"""The package from Python: load a trained model, continue and score text with it, keep what was read, train.

import compressive

model = compressive.load("runs/quickstart")
print(model.generate("The old house", length=200))
print(model.score("It was a dark and stormy night.").bits)
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from compressive.config import EmptyMemory, PerLayer, RunConfig
from compressive.config.documented import documented
from compressive.config.presets import field_names, load_file
from compressive.data.tokenizer import Tokenizer
from compressive.distributed import World
from compressive.evaluation.score import Nats, score
from compressive.inference.fast_decoder import FastDecoder
from compressive.inference.generate import continue_from, read
from compressive.inference.sampling import Sampling
from compressive.inference.text import TextStream, encode_prompt
from compressive.model.decoding import DecodingState
from compressive.model.language_model import CompressiveLM
from compressive.model.records import TensorRecord
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import pick_device
from compressive.training import loop, preflight

Text = str | bytes
Ids = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]] | Tensor


@documented
@dataclass(frozen=True)
class TextState(TensorRecord):
    """What a model has read: everything needed to go on, of constant size however long the text was.

    It is not changed by going on from it, so several continuations may start from one state. `save(path)` and
    `TextState.load(path)` keep it in a safetensors file, `to(device)` moves it.
    """

    last: Tensor  # (1,): the last token that was read
    logits: Tensor  # (1, V): scores of the token that follows
    decoding: DecodingState  # keys, values and memories
    weights: Tensor  # (1,): checksum of the weights that read it


@documented
@dataclass(frozen=True)
class Score:
    """How likely a model finds a text."""

    nats: Nats
    """-log p of every token, (n,) float64. The first token has no context and costs ln(vocab_size)."""
    n_bytes: int
    """Bytes of the text in UTF-8."""
    unknown: int = 0
    """Tokens that are `<unk>`, of a model of words."""

    @property
    def bits(self) -> float:
        """Bits per token: bits per character for a model of bytes."""
        return float(self.nats.mean()) / math.log(2)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text, comparable between tokenisers.

        None if there are `<unk>`: the nats are then of less than the text, which looks better predicted than it is.
        """
        return None if self.unknown else float(self.nats.sum()) / math.log(2) / self.n_bytes

    @property
    def perplexity(self) -> float:
        """The exponential of the nats per token."""
        return math.exp(float(self.nats.mean()))


class TextModel:
    """A trained model with its tokeniser and configuration, ready to continue and to score text.

    Attributes:
        model (CompressiveLM): the model, in evaluation mode.
        tokenizer (Tokenizer): turns bytes into tokens and back.
        config (RunConfig): what it was trained with; `model.config` has the memory sizes in use.
        step (int): training steps of the weights.

    """

    def __init__(self, model: CompressiveLM, tokenizer: Tokenizer, config: RunConfig, step: int) -> None:
        self.model, self.tokenizer, self.config, self.step = model, tokenizer, config, step

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        device = next(self.model.parameters()).device
        return f"TextModel({size:.1f} M parameters, {self.tokenizer.kind}, step {self.step:,}, {device})"

    def generate(
        self,
        prompt: "Text | TextState | Ids | Sequence[Text | TextState]" = "",
        length: int = 500,
        *,
        samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 0.98,
        top_k: int = 0,
        seed: int = 0,
    ) -> Any:
        """Continue a prompt by `length` tokens.

        Args:
            prompt: a text, a state that `read` gave, or tokens (n,) as a list, an array or a tensor of integers. Or a
                list of texts and states, which are continued in one batch. An empty text begins after a newline.
            length: how many tokens to sample.
            samples: how many continuations of one prompt, in one batch.
            temperature: divides the logits; 0 takes the most likely token.
            top_p: nucleus sampling: the smallest set of tokens with this total probability.
            top_k: of this many tokens only; 0 for all.
            seed: of the random numbers; the global random state is left alone.

        Returns:
            The continuation without the prompt: a str; for tokens a tensor (length,). For several samples or prompts a
            list of str; for tokens a tensor (samples, length).

        Raises:
            TypeError: a prompt of another type.
            ValueError: values that cannot work, or tokens that the model does not have.

        """
        states, several, as_tokens = self._prompts(prompt)
        if several and samples != 1:
            raise ValueError(f"samples={samples} of {len(states)} prompts: expected one prompt, or one sample of each")
        if samples < 1:
            raise ValueError(f"samples={samples}: expected at least 1")
        sampling: Sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        rows = torch.stack(list(self.sample(states * samples, length, **sampling)), dim=1).cpu()  # (rows, length)
        if as_tokens:
            return rows if samples > 1 else rows[0]
        texts = [self._text(state, row) for state, row in zip(states * samples, rows, strict=True)]
        return texts if several or samples > 1 else texts[0]

    def stream(
        self, prompt: "Text | TextState | Ids" = "", length: int = 500, **sampling: Unpack[Sampling]
    ) -> Iterator[str]:
        """Continue one prompt as `generate` does, and yield the text as it is sampled, never half a character."""
        states, several, _ = self._prompts(prompt)
        if several:
            raise ValueError(f"{len(states)} prompts: expected one; generate takes several")
        return self._streamed(states[0], self.sample(states, length, **sampling))

    def sample(self, states: Sequence[TextState], length: int = 500, **sampling: Unpack[Sampling]) -> Iterator[Tensor]:
        """Go on from several states in one batch, as `generate` does; yields tokens (rows,), `length` times."""
        if length < 1:
            raise ValueError(f"length={length}: expected at least 1")
        self._check_states(states)
        logits = torch.cat([state.logits for state in states])
        decoding = DecodingState.join([state.decoding for state in states])
        return continue_from(FastDecoder(self.model), logits, decoding, length, **sampling)

    def read(
        self, text: "Text | Ids", state: TextState | None = None, *, decoder: FastDecoder | None = None
    ) -> TextState:
        """Read a text, or tokens (n,), after what `state` has read, or into empty memory; return the state after it.

        `decoder`, a FastDecoder of the model, saves making one for each of many texts.
        """
        tokens = self._tokens(text)
        weights = self._check_states([state] if state is not None else [])
        decoding = None if state is None else state.decoding
        logits, decoding = read(decoder or FastDecoder(self.model), tokens, decoding)
        return TextState(tokens[-1:].to(logits.device), logits, decoding, weights.to(logits.device))

    def score(self, text: "Text | Ids", *, streams: int = 1) -> Score:
        """Return how likely each token of a text is, memory carried from its beginning to its end.

        `streams` cuts a long text into so many parts, read in one batch, each from empty memory: faster, worse scores.
        """
        tokens = self._tokens(text, whole=True)
        n_bytes = len(_bytes(text)) if isinstance(text, str | bytes) else len(self.tokenizer.decode(tokens.tolist()))
        nats = score(self.model, tokens.numpy(), streams=streams)
        return Score(nats, n_bytes, self.tokenizer.count_unknown(tokens.numpy()))

    def _prompts(self, prompt: Any) -> tuple[list[TextState], bool, bool]:
        """The states after each prompt; whether there were several; whether tokens are to be returned."""
        several = isinstance(prompt, list | tuple) and any(isinstance(x, str | bytes | TextState) for x in prompt)
        decoder = FastDecoder(self.model)
        states = [
            one if isinstance(one, TextState) else self.read(one, decoder=decoder)
            for one in (prompt if several else [prompt])
        ]
        return states, several, not several and not isinstance(prompt, str | bytes | TextState)

    def _streamed(self, state: TextState, tokens: Iterator[Tensor]) -> Iterator[str]:
        text = TextStream(self.tokenizer, int(state.last))
        for token in tokens:
            yield text.push(int(token))
        yield text.finish()

    def _text(self, state: TextState, tokens: Tensor) -> str:
        return "".join(self._streamed(state, iter(tokens)))

    def _tokens(self, text: Any, whole: bool = False) -> Tensor:
        """Tokens (n,) of a text that is to go on, or of a `whole` text; tokens as they are."""
        if isinstance(text, str | bytes):
            encoded = self.tokenizer.encode(_bytes(text)) if whole else encode_prompt(self.tokenizer, _bytes(text))
            tokens = torch.from_numpy(encoded.astype(np.int64))
        else:
            try:
                tokens = text.detach().cpu() if isinstance(text, Tensor) else torch.from_numpy(np.array(text))
            except (TypeError, ValueError):
                raise TypeError(
                    f"{type(text).__name__}: expected str, bytes, a state, or tokens as a list, array or tensor"
                ) from None
        V = self.model.config.vocab_size
        if tokens.ndim != 1 or len(tokens) == 0 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(
                f"tokens of {tokens.dtype} and shape {tuple(tokens.shape)}: expected integers (n,), n >= 1"
            )
        tokens = tokens.long()
        if tokens.min() < 0 or tokens.max() >= V:
            raise ValueError(f"tokens from {tokens.min()} to {tokens.max()}: expected 0 to {V - 1}")
        return tokens

    def _check_states(self, states: Sequence[TextState]) -> Tensor:
        """Refuse states of other models; return this one's checksum, (1,)."""
        own = self._weights()
        for state in states:
            if not isinstance(state, TextState):
                raise TypeError(f"state of type {type(state).__name__}: expected a TextState, which `read` returns")
            if int(state.weights) != int(own):
                raise ValueError(
                    "state of another model: expected one read with these weights, memory sizes and empty_memory"
                )
        return own

    def _weights(self) -> Tensor:
        """A checksum of what a state depends on, (1,): the last matrix of the trunk, memory sizes, empty memory."""
        config = self.model.config
        sizes = repr((config.memory_sizes, config.compressed_sizes, config.empty_memory))
        matrix = [x for x in self.model.trunk.layers[-1].mlp.parameters() if x.ndim == 2][-1]
        return torch.tensor([zlib.crc32(matrix.detach().float().cpu().numpy().tobytes(), zlib.crc32(sizes.encode()))])


def load(
    source: str | Path,
    *,
    which: Literal["best", "last"] = "best",
    device: str = "auto",
    memory_size: PerLayer | None = None,
    compressed_size: PerLayer | None = None,
    empty_memory: EmptyMemory | Literal["auto"] = "auto",
) -> TextModel:
    """Load a trained model of text.

    Args:
        source: folder of a run or of a release that `compressive export` wrote, or the name of a shipped model.
        which: the checkpoint with the lowest validation loss, or the last one.
        device: cpu, cuda:0, ...; auto takes a GPU if there is one.
        memory_size: slots of recent memory per layer, if other than in training.
        compressed_size: slots of compressed memory per layer, if other than in training.
        empty_memory: empty slots as zeros, or masked; auto: as in training, but masked if memory is larger
            and training never emptied it.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: it is no model of text, it is damaged, or a value cannot work.
        CheckpointError: it has no whole checkpoint.

    """
    run = Run.open(Path(source))
    tokenizer = run.tokenizer()
    if tokenizer.is_audio:
        raise ValueError(
            f"{run.folder} was trained on audio: compressive generate {run.folder} --out a.wav samples from it"
        )
    trained = Trained.load(run, which)
    config = trained.eval_config(memory_size, compressed_size, empty_memory)
    model = trained.model(config.model, pick_device(device))
    assert isinstance(model, CompressiveLM)  # a WaveNet is of audio
    return TextModel(model, tokenizer, run.config, trained.step)


def train(
    config: RunConfig | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    start_from: str | Path | None = None,
) -> TextModel:
    """Train a model as `compressive train` does, in this process, and load the result.

    Args:
        config: a configuration; or the name of a preset or a TOML file, whose vocabulary and precision are then
            fitted to corpus and device, as on the command line.
        out: folder of the run.
        resume: continue the run in `out`.
        start_from: fine-tuning: a run, a release or a shipped model, whose weights are trained further, with a fresh
            optimiser. Tokens and the model's shape must be the same, memory sizes may differ.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the state is saved; `resume=True` goes on.
        ValueError: values that cannot work, or a run in `out` that is not to be resumed.

    """
    folder = Path(out)
    if isinstance(config, RunConfig):
        configured, given = config, field_names(config)
    elif isinstance(config, Path) or config.endswith(".toml"):
        tables, given = load_file(Path(config))
        configured = RunConfig.from_tables(tables)
    else:
        configured, given = RunConfig.from_preset(config), set()
    if Run(folder, configured).configured_corpus().tokenizer.is_audio:
        raise ValueError(f"corpus={configured.data.corpus!r} is audio: expected text; compressive train takes both")
    world = World(device=pick_device(configured.train.device))
    if loop.train(preflight.begin(folder, configured, given, resume, world, start_from), world) == loop.INTERRUPTED:
        raise KeyboardInterrupt
    return load(folder, device=configured.train.device)


def _bytes(text: Text) -> bytes:
    return text.encode() if isinstance(text, str) else text
