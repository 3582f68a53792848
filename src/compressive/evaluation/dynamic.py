"""Dynamic evaluation as in section 5.3 of the paper: the model keeps training on the text that it scores.

Each window is scored before the model trains on it, so every token is predicted from past tokens only.
"""

import copy
import math

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from compressive.config import Precision
from compressive.evaluation.score import Nats, Progress, Replayed, Tokens, Window, capture_for, read_through
from compressive.model.language_model import LanguageModel
from compressive.model.memory import Memory
from compressive.runtime import autocast

LEARNING_RATE = 3e-5
"""A tenth of the paper's peak learning rate, because one window of one stream is a small batch."""


def dynamic_score(
    model: LanguageModel,
    tokens: Tokens,
    *,
    learning_rate: float = LEARNING_RATE,
    clip: float = 0.1,
    streams: int = 1,
    precision: Precision = "fp32",
    limit: int | None = None,
    progress: Progress | None = None,
    clips: Tokens | None = None,
) -> Nats:
    """Return nats (n,) as `score` does, from a copy of the model that takes one Adam step after every window.

    Both losses are minimised. Gradients of the task parameters and of the compressors are clipped separately to the
    norm `clip`, as in training. Adam starts with empty moments. Dropout is off, so one pass gives both the score and
    the gradient. On a GPU all of it, scoring and step, is replayed as a CUDA graph, see `capture_for`. Raises
    ValueError if learning_rate is not above 0.
    """
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate={learning_rate}: expected a number above 0, such as {LEARNING_RATE}")
    model = copy.deepcopy(model).requires_grad_(True)
    others, compressors = model.task_parameters(), model.compressor_parameters()
    capture = capture_for(model)
    captured = capture is not None
    optimiser = torch.optim.Adam(others + compressors, lr=learning_rate, fused=captured or None, capturable=captured)

    def read(window: Window, memory: Memory) -> tuple[Tensor, Memory]:
        with autocast(next(model.parameters()).device, precision):
            out = model(window.tokens, memory, targets=window.targets, starts=window.starts)
        assert out.nll is not None
        optimiser.zero_grad()
        (out.nll.mean() + out.compression_loss).backward()  # padding enters the loss of the last window only
        clip_grad_norm_(others, clip)
        clip_grad_norm_(compressors, clip)
        optimiser.step()
        return out.nll.detach(), out.memory.detach()

    with torch.enable_grad():
        return read_through(
            model, tokens, read if capture is None else Replayed(read, capture), streams=streams, precision=precision,
            limit=limit, progress=progress, clips=clips,
        )  # fmt: skip
