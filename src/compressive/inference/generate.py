"""Text from a model: read a prompt of any length, then sample tokens one at a time, in constant time and space.

for tokens in generate(model, prompt, 500, samples=4):
    ...  # (4,): the next token of each sample
"""

import functools
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from compressive.inference.fast_decoder import FastDecoder, StepGraph, Stepper
from compressive.inference.sampling import Sampling, check_sampling, choose
from compressive.model.attention import upcast
from compressive.model.decoding import DecodingState
from compressive.model.language_model import LanguageModel
from compressive.runtime import evaluating


def generate(
    model: LanguageModel,
    prompt: Tensor,
    length: int,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 0.98,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Continue a prompt (n,), n >= 1, by `length` tokens, several times over; yields tokens (samples,) as they come.

    The prompt is read once, whatever the number of samples. Neither the global random state nor, while the
    caller holds control, the model's mode is changed, so that a trainer may sample between two steps.
    """
    check_sampling(temperature, top_p, top_k)
    prompt = _checked(model, prompt)
    for name, value in (("length", length), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")

    def sampled() -> Iterator[Tensor]:
        decoder = FastDecoder(model)
        logits, state = read(decoder, prompt)
        fork = torch.zeros(samples, dtype=torch.long, device=logits.device)
        sampling: Sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        yield from continue_from(decoder, logits[fork], state.select(fork), length, **sampling)

    return sampled()


def continue_from(
    decoder: FastDecoder,
    logits: Tensor,
    state: DecodingState,
    length: int,
    *,
    temperature: float = 1.0,
    top_p: float = 0.98,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Sample from logits (B, V), then step by step from the state of these rows; yields tokens (B,), `length` times."""
    check_sampling(temperature, top_p, top_k)
    chosen = functools.partial(choose, temperature=temperature, top_p=top_p, top_k=top_k)

    @torch.no_grad()
    def sampled() -> Iterator[Tensor]:
        generator = torch.Generator(logits.device).manual_seed(seed)
        noise = torch.empty_like(upcast(logits))
        tokens = chosen(logits, noise.exponential_(generator=generator))

        def step(state: DecodingState) -> DecodingState:
            logits, state = decoder.step(tokens, state)
            tokens.copy_(chosen(logits, noise))
            return state

        steps = StepGraph(step, state, decoder.capture())
        yield tokens.clone()
        for _ in range(length - 1):
            noise.exponential_(generator=generator)
            with evaluating(decoder.model) if decoder.model.training else nullcontext():
                steps()
            yield tokens.clone()

    return sampled()


def prime(model: LanguageModel, prompt: Tensor, state: DecodingState | None = None) -> tuple[Tensor, DecodingState]:
    """Read a prompt (n,); return the logits (1, V) of what follows, and the state to go on from.

    It is read into an empty memory or, given the state of one row, after what was read before. Whole windows are read
    at once, what is left over step by step: a book costs one pass, not a step per token.
    """
    return read(FastDecoder(model), _checked(model, prompt), state)


def read(decoder: FastDecoder, prompt: Tensor, state: DecodingState | None = None) -> tuple[Tensor, DecodingState]:
    """Do what `prime` does, with a decoder that is there already."""
    logits, state = read_rows(decoder, prompt[None], state)
    return logits[:, -1], state


@torch.no_grad()
def read_rows(
    decoder: FastDecoder, tokens: Tensor, state: DecodingState | None = None, keep: int = 1
) -> tuple[Tensor, DecodingState]:
    """Read tokens (B, n), n >= 1, as `prime` does; return logits (B, keep, V) of the last `keep` tokens, and the state.

    The rows of a state that is given must be at one position of their windows.
    """
    model = decoder.model
    tokens, window = tokens.to(next(model.parameters()).device), model.config.window
    logits: list[Tensor] = []  # of part after part, as far as they are wanted
    with evaluating(model):
        if state is not None and state.remaining < window:  # complete the window that the state is in
            begun, tokens = tokens[:, : state.remaining], tokens[:, state.remaining :]
            stepped, state = _step_through(decoder, begun, state, keep - tokens.shape[1])
            logits += stepped
        if state is None or tokens.shape[1] >= window:
            memory = model.initial_memory(len(tokens)) if state is None else state.memory
            while tokens.shape[1] >= window:
                # The trunk alone: of most tokens no scores are wanted.
                out = model.trunk(model.embedding(tokens[:, :window]), memory)
                memory, tokens = out.memory, tokens[:, window:]
                if (wanted := keep - tokens.shape[1]) > 0:
                    logits.append(model.embedding.logits(out.hidden[:, -wanted:]))
            state = decoder.decoding_state(memory)
        if tokens.shape[1] > 0:
            stepped, state = _step_through(decoder, tokens, state, keep)
            logits += stepped
    return torch.cat(logits, dim=1), state


def _step_through(
    decoder: FastDecoder, tokens: Tensor, state: DecodingState, keep: int
) -> tuple[list[Tensor], DecodingState]:
    """Read tokens (B, n) one by one; return the logits (B, 1, V) after each of the last `keep`, and the state."""
    kept, stepper = [], Stepper(decoder, state)
    for left, column in zip(range(tokens.shape[1], 0, -1), tokens.unbind(1), strict=True):
        logits = stepper(column)
        if left <= keep:
            kept.append(logits[:, None].clone())
    return kept, stepper.state


def _checked(model: LanguageModel, prompt: Tensor) -> Tensor:
    """The prompt as long integers, where it is one."""
    if prompt.ndim != 1 or len(prompt) == 0:
        raise ValueError(
            f"prompt of shape {tuple(prompt.shape)}: expected (n,) with n >= 1; to begin from nothing give one token, "
            "such as a newline"
        )
    tokens, V = prompt.long(), model.config.vocab_size
    if prompt.is_floating_point() or tokens.min() < 0 or tokens.max() >= V:
        raise ValueError(
            f"prompt of {prompt.dtype} from {tokens.min()} to {tokens.max()}: expected whole numbers from 0 to {V - 1}"
        )
    return tokens
