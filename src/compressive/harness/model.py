"""A trained model as lm-evaluation-harness wants it: choices, whole documents with memory carried, generation.

Shapes: B rows of a batch, T tokens of a window, D the width of the model.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from compressive.api import load
from compressive.config import EmptyMemory, PerLayer, Precision
from compressive.console import note
from compressive.inference.fast_decoder import FastDecoder
from compressive.inference.sampling import Sampling
from compressive.inference.text import TextStream, encode_prompt
from compressive.model.language_model import IGNORED
from compressive.model.memory import Memory
from compressive.runtime import autocast

ARGUMENTS = ("path", "which", "memory_size", "compressed_size", "empty_memory", "precision")
"""What --model_args may have."""
AUTO_BATCH = 16
"""Rows of a batch for --batch_size auto."""
LOGITS = 1 << 24
"""Logits computed at a time to see whether a continuation is the most likely one: 64 MB."""
SAMPLING = {"do_sample", "temperature", "top_p", "top_k"}
"""What may be asked of generation, besides stop strings and length."""


class Row(NamedTuple):
    """Tokens (n,), of which those from `first` on are to be scored; `first` is at least 1."""

    tokens: Tensor
    first: int


class CompressiveModel(LM):  # type: ignore[misc]  # lm_eval is not analysed
    """`lm_eval --model compressive`: a run or a release.

    Every request begins with empty memory. Memory is carried from window to window to the end of the request, however
    long it is: nothing is ever cut off.
    """

    def __init__(
        self,
        path: str,
        which: Literal["best", "last"] = "best",
        memory_size: PerLayer | None = None,
        compressed_size: PerLayer | None = None,
        empty_memory: EmptyMemory | Literal["auto"] = "auto",
        precision: Precision = "fp32",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: object,
    ) -> None:
        """Load a model; the arguments up to `precision` are those of `compressive evaluate`, the others lm_eval's own.

        A batch size of "auto" is 16, or `max_batch_size` if that is less. Raises ValueError for unknown arguments, and
        what `compressive.load` raises.
        """
        super().__init__()
        if unknown:
            raise ValueError(f"model_args {', '.join(unknown)}: expected {', '.join(ARGUMENTS)}")
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            note(f"no {device}, which lm_eval asks for unless --device says otherwise")
            device = None
        self.text = load(
            path,
            which=which,
            device=device or "auto",
            memory_size=memory_size,
            compressed_size=compressed_size,
            empty_memory=empty_memory,
        )
        self._device = next(self.text.model.parameters()).device
        self._autocast = autocast(self._device, precision)
        self.batch_size = min(AUTO_BATCH, max_batch_size or AUTO_BATCH) if batch_size == "auto" else int(batch_size)
        if self.batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: expected at least 1, or auto")

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log p of each continuation in nats after its context, and whether each token is the most likely one.

        An empty context is a line feed, as for `generate`. Requests are read in batches; whole windows that several
        requests of a batch begin with, as the choices of one question do, are read once.
        """
        pairs: list[tuple[str, str]] = [request.args for request in requests]
        found = self._answers("loglikelihood", pairs, [self._split(*pair) for pair in pairs], disable_tqdm)
        return [(-nats, greedy) for nats, greedy in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each document in nats, with memory carried from its beginning to its end.

        As for `compressive evaluate`, the first token has no context and costs ln(vocab_size).
        """
        documents: list[tuple[str]] = [request.args for request in requests]
        rows = [Row(_tensor(self.text.tokenizer.encode(document.encode())), 1) for (document,) in documents]
        for row in rows:
            if len(row.tokens) == 0:
                raise ValueError("an empty document: expected at least one character; leave it out of the task")
        found = self._answers("loglikelihood_rolling", documents, rows, disable_tqdm)
        return [-nats for nats, _ in found]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to a stop string, which is left out, or by `max_gen_toks` tokens.

        Greedy, unless `temperature` or `do_sample` ask for sampling, with `top_p` and `top_k` as in `generate`. The
        temperature of `do_sample` alone is 1.
        Raises ValueError for other arguments of generation.
        """
        pairs: list[tuple[str, dict[str, Any]]] = [request.args for request in requests]
        texts = [""] * len(pairs)

        def settings(i: int) -> str:
            return json.dumps(pairs[i][1], sort_keys=True)

        order = sorted(range(len(pairs)), key=lambda i: (settings(i), len(pairs[i][0])))
        with tqdm(total=len(pairs), desc="generate_until", disable=disable_tqdm) as bar:
            for _, same in groupby(order, key=settings):
                for batch in self._batches(list(same)):
                    continued = self._generate([pairs[i][0] for i in batch], pairs[batch[0]][1])
                    for i, text in zip(batch, continued, strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", pairs[i], text)
                    bar.update(len(batch))
        return texts

    def _split(self, context: str, continuation: str) -> Row:
        """Encode both as one text: what the context alone has in common with it is context, the rest is scored."""
        whole = encode_prompt(self.text.tokenizer, (context + continuation).encode())
        alone = encode_prompt(self.text.tokenizer, context.encode())
        shorter = min(len(whole), len(alone))
        differ = np.flatnonzero(whole[:shorter] != alone[:shorter])
        first = int(differ[0]) if len(differ) else shorter
        if context and first:
            return Row(_tensor(whole), first)
        begin = encode_prompt(self.text.tokenizer, b"")
        return Row(_tensor(np.concatenate([begin, whole if continuation else whole[:0]])), len(begin))

    def _answers(
        self, kind: str, requests: Sequence[tuple[Any, ...]], rows: Sequence[Row], quiet: bool
    ) -> list[tuple[float, bool]]:
        """Score all rows in batches of equally many shared windows; in the order of the requests."""
        window, rolling = self.text.model.config.window, kind == "loglikelihood_rolling"
        answers = [(0.0, True)] * len(rows)

        def shared(i: int) -> int:
            return (rows[i].first - 1) // window

        def place(i: int) -> tuple[int, int, list[int]]:  # of similar lengths, those with the same context together
            tokens, first = rows[i]
            return shared(i), -len(tokens) if rolling else first, tokens[:first].tolist()

        total = sum(len(row.tokens) - row.first for row in rows)
        with tqdm(total=total, desc=kind, unit=" tokens", unit_scale=True, mininterval=1, disable=quiet) as bar:
            for _, same in groupby(sorted(range(len(rows)), key=place), key=shared):
                for batch in self._batches(sorted(same, key=place)):
                    found = self._score([rows[i] for i in batch], bar, greedy=not rolling)
                    for i, (nats, greedy) in zip(batch, found, strict=True):
                        if rolling:
                            nats += float(np.log(self.text.model.config.vocab_size))
                        answers[i] = nats, greedy
                        self.cache_hook.add_partial(kind, requests[i], -nats if rolling else (-nats, greedy))
        return answers

    def _batches(self, indices: list[int]) -> Iterator[list[int]]:
        return (indices[i : i + self.batch_size] for i in range(0, len(indices), self.batch_size))

    @torch.no_grad()
    def _score(self, rows: Sequence[Row], bar: "tqdm[Any]", greedy: bool) -> list[tuple[float, bool]]:
        """Nats of what is to be scored of each row, and with `greedy` whether all of it is most likely.

        All rows share as many whole windows, which are read once for each that differs, before the rest.
        """
        model, window = self.text.model, self.text.model.config.window
        begin = (rows[0].first - 1) // window * window
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))  # rows that end leave at the bottom
        nats, likely = torch.zeros(len(rows), dtype=torch.double), torch.ones(len(rows), dtype=torch.bool)
        with self._autocast:
            memory = self._read([rows[i].tokens[:begin] for i in order])
            for start in range(begin, len(rows[order[0]].tokens) - 1, window):
                alive = [i for i in order if len(rows[i].tokens) - 1 > start]
                memory = memory.select(torch.arange(len(alive), device=self._device))
                inputs, targets = self._window([rows[i] for i in alive], start)
                out = model.trunk(model.embedding(inputs), memory)
                memory, scored = out.memory, targets != IGNORED
                hidden, wanted = out.hidden[scored], targets[scored]
                if len(wanted) == 0:
                    continue
                owner = torch.tensor(alive)[scored.nonzero()[:, 0].cpu()]
                nll = model.embedding.nll(hidden[None], wanted[None])[0]
                nats.index_add_(0, owner, nll.cpu().double())
                if greedy:
                    likely[owner[~self._most_likely(hidden, wanted)]] = False
                bar.update(len(wanted))
        return list(zip(nats.tolist(), likely.tolist(), strict=True))

    def _read(self, prefixes: Sequence[Tensor]) -> Memory:
        """Read whole windows of equally long prefixes (n,), each that differs once; return the memory of all rows."""
        model, window = self.text.model, self.text.model.config.window
        if len(prefixes[0]) == 0:
            return model.initial_memory(len(prefixes))
        distinct, rows = torch.stack(list(prefixes)).unique(dim=0, return_inverse=True)
        memory = model.initial_memory(len(distinct))
        for start in range(0, distinct.shape[1], window):
            tokens = distinct[:, start : start + window].to(self._device)
            memory = model.trunk(model.embedding(tokens), memory).memory
        return memory.select(rows.to(self._device))

    def _window(self, rows: Sequence[Row], start: int) -> tuple[Tensor, Tensor]:
        """One window of inputs and targets (B, T), padded at the right; context and padding are ignored as targets."""
        stop = start + self.text.model.config.window
        inputs = [row.tokens[start : min(stop, len(row.tokens) - 1)] for row in rows]
        targets = [
            row.tokens[start + 1 : stop + 1].masked_fill(
                torch.arange(start + 1, min(stop + 1, len(row.tokens))) < row.first, IGNORED
            )
            for row in rows
        ]
        padded = pad_sequence(inputs, batch_first=True), pad_sequence(targets, True, IGNORED)
        return padded[0].to(self._device), padded[1].to(self._device)

    def _most_likely(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """Whether each token (n,) is the most likely one after hidden (n, D); bool (n,), on the CPU."""
        at_once = max(1, LOGITS // self.text.model.config.vocab_size)
        best = [self.text.model.embedding.logits(part).argmax(dim=-1) for part in hidden.split(at_once)]
        return (torch.cat(best) == wanted).cpu()

    def _generate(self, contexts: Sequence[str], arguments: dict[str, Any]) -> list[str]:
        """Continue contexts in one batch."""
        if arguments.get("do_sample"):
            arguments = {"temperature": 1.0} | arguments
        asked = normalize_gen_kwargs(arguments)
        stops = [stop for stop in asked.pop("until") if stop]
        length = asked.pop("max_gen_toks")
        if unknown := set(asked) - SAMPLING:
            raise ValueError(
                f"generation arguments {', '.join(sorted(unknown))}: expected until, max_gen_toks, "
                f"{', '.join(sorted(SAMPLING))}; leave the others out of the task or of --gen_kwargs"
            )
        sampling: Sampling = {
            "temperature": float(asked.get("temperature", 0.0)),
            "top_p": float(asked.get("top_p", 1.0)),
            "top_k": int(asked.get("top_k", 0)),
            "seed": int(torch.randint(2**31, ())),  # lm_eval seeds torch: --seed
        }
        with self._autocast:
            decoder = FastDecoder(self.text.model)
            states = [self.text.read(context, decoder=decoder) for context in contexts]
            streams = [TextStream(self.text.tokenizer, int(state.last)) for state in states]
            texts, ended = [""] * len(states), [False] * len(states)
            for tokens in self.text.sample(states, length, **sampling):
                for i, token in enumerate(tokens.tolist()):
                    if not ended[i]:
                        texts[i] += streams[i].push(token)
                        ended[i] = any(stop in texts[i] for stop in stops)
                if all(ended):
                    break
        for i, stream in enumerate(streams):
            texts[i] += "" if ended[i] else stream.finish()
            for stop in stops:
                texts[i] = texts[i].split(stop)[0]
        return texts


def _tensor(tokens: "np.ndarray[Any, Any]") -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))
