"""Metrics of a run: a live line on a terminal, plain lines elsewhere, metrics.jsonl always."""

import json
import math
import time
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from compressive.config import RunConfig
from compressive.config.agent import AgentRun
from compressive.console import is_quiet
from compressive.runtime import write_atomically


class Recorder:
    """Writes metrics to the screen, metrics.jsonl, TensorBoard and Weights & Biases; only in the first process."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig | AgentRun,
        first_step: int,
        seconds_before: float,
        unit: str = "",
        speaks: bool = True,
    ) -> None:
        self.folder, self.config, self.unit = folder, config, unit
        self.console = Console(stderr=False, quiet=not speaks or is_quiet())
        self.first_step, self.seconds_before, self.began = first_step, seconds_before, time.monotonic()
        self.sinks: list[Any] = []
        if config.train.tensorboard and speaks:
            self.sinks.append(_tensorboard(folder))
        if config.train.wandb and speaks:
            self.sinks.append(_wandb(folder, config))
        self.bar = ProgressBar(total=config.train.steps, completed=first_step)
        self.text = Text("starting")
        self.live: Live | None = None
        self.file = _reopen(folder / "metrics.jsonl", first_step) if speaks else StringIO()

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.quiet:
            self.live = Live(Group(self.text, self.bar), console=self.console)
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()
        self.file.close()
        for sink in self.sinks:
            sink.close()

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.seconds_before + time.monotonic() - self.began

    def say(self, text: str) -> None:
        """Print a message above the live line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def train(self, step: int, values: dict[str, float | None]) -> None:
        """Record the averages of the steps up to this one."""
        self._write("train", step, values)
        line = (
            f"step {step}/{self.config.train.steps}  loss {show(values['loss'], 4)}  "
            f"{self.unit} {show(values['perplexity' if self.unit == 'ppl' else 'bits'], 3)}  "
            f"compression {show(values['compression_loss'], 4)}  lr {show(values['learning_rate'], 2, 'e')}  "
            f"norm {show(values['gradient_norm'], 2)}  {show(values['tokens_per_second'], 0)} tok/s  "
            f"mfu {show(values['utilisation'], 1, '%')}  mem {show(values['peak_gib'], 2)} GiB  "
            f"{clock(self.left(step))} left"
        )
        self._line(step, line)

    def left(self, step: int) -> float:
        """Estimated seconds to the last step, at the speed since the start or resume."""
        done, rest = step - self.first_step, max(0, self.config.train.steps - step)  # an agent's rollout may overshoot
        return (time.monotonic() - self.began) / max(done, 1) * rest

    def evaluation(self, step: int, split: str, values: dict[str, float | None], best: bool = False) -> None:
        """Record an evaluation on a split."""
        self._write("eval", step, {"split": split, **values})
        figure = values["perplexity" if self.unit == "ppl" else "bits"]
        name = "validation" if split == "valid" else split
        self.say(f"step {step}  {name} {self.unit} {show(figure, 4)}{'  (best)' if best else ''}")

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        record = {"kind": kind, "step": step, "seconds": round(self.seconds, 3), **values}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        for sink in self.sinks:
            sink.write(kind, step, {k: v for k, v in values.items() if isinstance(v, int | float)})

    def _line(self, step: int, line: str) -> None:
        if self.live is None:
            self.say(line)
        else:
            self.bar.completed = step
            self.text.plain = line


def clock(seconds: float) -> str:
    """Write seconds as h:mm:ss."""
    if not math.isfinite(seconds):
        return "?"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def show(value: float | None, digits: int, kind: str = "f") -> str:
    """Format a number, or a dash for None."""
    return "–" if value is None else f"{value:.{digits}{kind}}"


def _reopen(path: Path, step: int) -> Any:
    """Open for appending, without the lines after this step, which a resumed run writes again."""
    if path.exists():
        kept = []
        for line in path.read_text("utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):  # a line that a crash cut short
                continue
        write_atomically(path, "".join(kept))
    return path.open("a", encoding="utf-8")


class _Sink:
    """TensorBoard or Weights & Biases behind two methods."""

    def __init__(self, write: Any, close: Any) -> None:
        self.write, self.close = write, close


def _tensorboard(folder: Path) -> _Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(f"train.tensorboard=True: needs pip install 'compressive[tensorboard]' ({error})") from None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(kind: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(f"{kind}/{name}", value, step)

    return _Sink(write, writer.close)


def _wandb(folder: Path, config: RunConfig | AgentRun) -> _Sink:
    try:
        import wandb
    except ImportError:
        raise ValueError("train.wandb=True: needs pip install 'compressive[wandb]'") from None
    import dataclasses

    run = wandb.init(
        project="compressive", name=folder.name, config=dataclasses.asdict(config), dir=str(folder), resume="allow"
    )

    def write(kind: str, step: int, values: dict[str, float]) -> None:
        run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    return _Sink(write, run.finish)
