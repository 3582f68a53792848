"""What an agent and its training are made of; the model of its memory is the one that all of the package shares.

Nothing here imports torch, so that a command line can show its help at once.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from compressive.config.checks import check_values
from compressive.config.model import ModelConfig
from compressive.config.presets import load_preset, preset_names, read_tables
from compressive.config.train import Precision

Core = Literal["compressive", "txl", "lstm", "none"]
Optimiser = Literal["rmsprop", "adam"]
RewardShape = Literal["scaled", "asymmetric"]


@dataclass(frozen=True)
class TaskConfig:
    """What to act in; all but the name and the lanes is about the rooms."""

    name: str = "rooms"
    """rooms; lab:LEVEL where deepmind_lab is installed; or a Gymnasium environment, as ID or as MODULE:ID."""
    lanes: int = 32
    """How many copies are played side by side."""
    width: int = 96
    """Columns of what the agent sees."""
    height: int = 72
    """Rows of what the agent sees."""
    objects: int = 36
    """How many different objects there are, at most 36."""
    object_size: float = 60.0
    """Width and height of an object, in units; a wall is 128 high."""
    seconds: float = 12.0
    """How long an episode lasts, at 15 steps a second."""
    delays: tuple[int, ...] = (0,)
    """Steps in a corridor between the rooms, drawn for each episode; if any is above 0, an episode is one trial."""
    one_trial: bool = False
    """An episode ends with its first choice, also without a delay."""
    speed: float = 320.0
    """How fast the player walks, in units a second."""
    turn: float = 8.4
    """How far a step of looking aside turns, in degrees."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "delays", tuple(self.delays))  # TOML and JSON have no tuples
        check_values(self)
        if not 2 <= self.objects <= 36:
            raise ValueError(f"objects={self.objects}: expected 2 to 36, as so many are drawn")
        if not self.delays or any(not isinstance(delay, int) or delay < 0 for delay in self.delays):
            raise ValueError(f"delays={self.delays}: expected one or more whole numbers of at least 0")
        if self.speed > 960:
            raise ValueError(f"speed={self.speed}: expected at most 960, or a step would leap over the pad")

    @property
    def comparable(self) -> bool:
        """Whether scores may stand beside the published ones: the rooms as they are by default, or the original."""
        if self.name.startswith("lab:"):
            return self.name.endswith("/rooms_select_nonmatching_object")
        rules = ("name", "objects", "object_size", "seconds", "delays", "one_trial", "speed", "turn")
        return all(getattr(self, name) == getattr(TaskConfig, name) for name in rules)

    @property
    def ends_with_choice(self) -> bool:
        """Whether an episode is one trial."""
        return self.one_trial or any(self.delays)


@dataclass(frozen=True)
class AgentConfig:
    """The network but for its memory's sizes, which are the model's."""

    core: Core = "compressive"
    """Its memory: the Compressive Transformer, a TransformerXL (recent memory alone), an LSTM, or none."""
    channels: tuple[int, ...] = (16, 32, 32)
    """Channels of the residual network's sections; each halves the picture."""
    blocks: int = 2
    """Residual blocks in each section."""
    features: int = 256
    """Width of what the memory is given for each picture."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))
        check_values(self)
        if not self.channels or any(not isinstance(count, int) or count < 1 for count in self.channels):
            raise ValueError(f"channels={self.channels}: expected one or more whole numbers of at least 1")


@dataclass(frozen=True)
class LearnConfig:
    """How to learn: IMPALA with the paper's learning rate and entropy cost by default."""

    steps: int = 100_000_000
    """How many steps to act, all lanes together; an unroll takes lanes × window of them."""
    batch: int = 32
    """Lanes that one update learns from; the lanes of an unroll are learnt from in parts of so many."""
    minutes: float = 0.0
    """Stop and save after so many minutes; 0: only `steps` ends the run."""
    optimiser: Optimiser = "rmsprop"
    """RMSProp as in IMPALA, or Adam."""
    learning_rate: float = 1.5e-5
    """Fixed."""
    epsilon: float = 3e-5
    """The optimiser's. IMPALA's 0.1 is for sums over 32 unrolls of 100 steps; our losses are means."""
    clip: float = 1.0
    """Largest gradient norm, for the agent and for its compressors apart."""
    discount: float = 0.99
    """Of rewards, per step."""
    baseline_cost: float = 0.5
    """Weight of the value's squared error."""
    entropy_cost: float = 2e-3
    """Weight of the policy's entropy."""
    reward: RewardShape = "scaled"
    """What is learnt from: rewards × reward_scale, or IMPALA's asymmetric squashing."""
    reward_scale: float = 0.1
    """Clipping at 1 would make the pad worth as much as the right object."""
    actors: int = 0
    """Ray processes that act, sharing the lanes, while another learns; 0: act and learn by turns in one process."""
    precision: Precision = "fp32"
    """Arithmetic of the matrix products: fp32, or bf16 by autocast with weights and memory in fp32."""
    compile: bool = False
    """Compile task, acting and learning; takes a minute or so at the start."""
    device: str = "auto"
    """Where to run: auto takes a GPU if there is one. With Ray, where to learn; actors run on CPUs."""
    seed: int = 0
    """Seed of the weights, the task and the policy."""
    log_every: int = 10
    """Unrolls between lines of metrics."""
    checkpoint_every: int = 200
    """Unrolls between checkpoints."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard."""
    wandb: bool = False
    """Also send metrics to Weights & Biases."""

    def __post_init__(self) -> None:
        check_values(self, zero_allowed=("minutes", "actors", "seed", "entropy_cost"))
        if self.discount >= 1:
            raise ValueError(f"discount={self.discount}: expected a number below 1")


@dataclass(frozen=True)
class AgentRun:
    """A run of the agent: its memory, its task, its network and its learning. An unroll is one window of the model."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    agent: AgentConfig = dataclasses.field(default_factory=AgentConfig)
    train: LearnConfig = dataclasses.field(default_factory=LearnConfig)

    def __post_init__(self) -> None:
        compresses = self.agent.core == "compressive"
        if compresses and not any(self.model.compressed_sizes):
            raise ValueError("core='compressive' with compressed_size=0: expected some; or core='txl'")
        trainable = self.model.compression not in ("max", "mean", "most_used")
        if compresses and trainable and self.model.compression_loss == "none":
            raise ValueError(
                f"compression={self.model.compression!r} with compression_loss='none': nothing would train the "
                "compressor; give it a loss (attention, autoencoding)"
            )
        if self.train.actors and self.task.lanes % self.train.actors:
            raise ValueError(f"lanes={self.task.lanes}: {self.train.actors} actors cannot share them evenly")
        if self.lanes_per_source % self.batch:
            raise ValueError(
                f"batch={self.train.batch}: expected a divisor of {self.lanes_per_source}, the lanes of an unroll"
            )

    @property
    def memory(self) -> ModelConfig:
        """The trunk of the agent's memory: with core `txl` it has nothing compressed."""
        return dataclasses.replace(self.model, compressed_size=0) if self.agent.core == "txl" else self.model

    @property
    def lanes_per_source(self) -> int:
        """Lanes of one unroll: all of them, or those of one actor."""
        return self.task.lanes // max(1, self.train.actors)

    @property
    def batch(self) -> int:
        """Lanes of one update: at most those of an unroll."""
        return min(self.train.batch, self.lanes_per_source)

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """Return the run that a preset describes."""
        if name not in preset_names("task"):
            raise ValueError(f"preset={name!r}: expected an agent's, one of {', '.join(preset_names('task'))}")
        return cls.from_tables(load_preset(name))

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> Self:
        """Build a run from nested tables, such as a preset or a saved configuration holds."""
        kinds = {"model": ModelConfig, "task": TaskConfig, "agent": AgentConfig, "train": LearnConfig}
        return cls(**read_tables(tables, kinds))
