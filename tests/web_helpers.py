"""Tiny models behind the web page, without a run on disk."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from training_helpers import tiny_run_config

from compressive.api import TextModel
from compressive.config import ModelConfig
from compressive.data.tokenizer import ByteTokenizer, Tokenizer
from compressive.model.language_model import CompressiveLM
from compressive.web.engine import Engines
from compressive.web.server import Server, StoppableServer, listen
from compressive.web.text import Text


def tiny_model(tokenizer: Tokenizer | None = None, **model: Any) -> TextModel:
    """An untrained model of bytes whose weights are large enough that memory matters."""
    sizes = {"window": 8, "memory_size": 12, "compressed_size": 5, "compression_rate": 2}
    run = tiny_run_config(Path("data"), sizes | model)
    assert isinstance(run.model, ModelConfig)
    torch.manual_seed(0)
    lm = CompressiveLM(run.model).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return TextModel(lm, tokenizer or ByteTokenizer(), run, 1)


def tiny_text(prompt: str = "", **model: Any) -> Text:
    """A text of a tiny model that has read a prompt."""
    text = Text(Engines(tiny_model(**model)))
    finish(text.read(text.encode(prompt)))
    return text


def finish(work: Iterator[int]) -> None:
    """Do all of some work."""
    for _ in work:
        pass


def same_state(a: Text, b: Text) -> bool:
    """Whether two texts know exactly the same, to the last bit."""
    assert (a.tokens, a.pieces) == (b.tokens, b.pieces)
    assert a._logits is not None
    assert b._logits is not None
    return torch.equal(a._logits, b._logits)


@contextlib.contextmanager
def serving(server: Server, host: str = "127.0.0.1", token: str | None = None) -> Iterator[str]:
    """Serve in a thread, on any free port; yields the address."""
    with listen("127.0.0.1", 0) as bound:
        config = uvicorn.Config(
            server.app(host, token), log_level="warning", ws="none", lifespan="off", timeout_graceful_shutdown=1
        )
        listening = threading.Event()
        running = StoppableServer(config, server, listening.set)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
        thread.start()
        assert listening.wait(10)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.stopping = running.should_exit = True
            thread.join(10)
            assert not thread.is_alive()
