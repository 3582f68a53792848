"""Text from a model: read a prompt of any length, then sample tokens one at a time, in constant time and space.

for tokens in generate(model, prompt, 500, samples=4):
    ...  # (4,): the next token of each sample
"""

import functools
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from compressive.inference.fast_decoder import FastDecoder, StepGraph
from compressive.inference.sampling import check_sampling, choose
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

    @torch.no_grad()
    def sampled() -> Iterator[Tensor]:
        decoder = FastDecoder(model)
        logits, state = _read(decoder, prompt)
        fork = torch.zeros(samples, dtype=torch.long, device=logits.device)
        logits, state = logits[fork], state.select(fork)
        generator = torch.Generator(logits.device).manual_seed(seed)
        noise = torch.empty_like(upcast(logits))
        chosen = functools.partial(choose, temperature=temperature, top_p=top_p, top_k=top_k)
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


def prime(model: LanguageModel, prompt: Tensor) -> tuple[Tensor, DecodingState]:
    """Read a prompt (n,) into an empty memory; return the logits (1, V) of what follows, and the state to go on from.

    Whole windows are read at once, what is left over step by step: a book costs one pass, not a step per token.
    """
    return _read(FastDecoder(model), _checked(model, prompt))


@torch.no_grad()
def _read(decoder: FastDecoder, prompt: Tensor) -> tuple[Tensor, DecodingState]:
    model = decoder.model
    tokens, window = prompt.to(next(model.parameters()).device), model.config.window
    whole = len(tokens) // window * window
    memory, hidden = model.initial_memory(1), None
    with evaluating(model):
        for begin in range(0, whole, window):
            # The trunk alone: of all these tokens at most the last one's scores are wanted.
            out = model.trunk(model.embedding(tokens[None, begin : begin + window]), memory)
            memory, hidden = out.memory, out.hidden[:, -1]
        state = decoder.decoding_state(memory)
        if hidden is not None and whole == len(tokens):
            return model.embedding.logits(hidden), state

        token = tokens[:1].clone()
        dtype = next(x.dtype for x in memory.state_dict().values() if x.is_floating_point())
        logits = torch.empty(1, model.config.vocab_size, dtype=dtype, device=token.device)

        def step(state: DecodingState) -> DecodingState:
            out, state = decoder.step(token, state)
            logits.copy_(out)
            return state

        steps = StepGraph(step, state, decoder.capture())
        for position in range(whole, len(tokens)):
            token.copy_(tokens[position])
            steps()
    return logits, steps.state


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
