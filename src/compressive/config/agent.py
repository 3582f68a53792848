"""Configuration of an agent, its task and its training. The model of its memory is `ModelConfig`, as for text.

Nothing here imports torch, so that `--help` is fast.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from compressive.config.checks import check_values
from compressive.config.documented import documented
from compressive.config.model import ModelConfig
from compressive.config.presets import load_preset, preset_names, read_tables
from compressive.config.train import Precision

Core = Literal["compressive", "txl", "lstm", "none"]
Optimiser = Literal["rmsprop", "adam"]
RewardShape = Literal["scaled", "asymmetric"]
Observation = Literal["image", "vector"]


@documented
@dataclass(frozen=True)
class TaskConfig:
    """The task. All fields except name and envs apply to the rooms; DeepMind Lab also uses width and height."""

    name: str = "rooms"
    """rooms; lab:LEVEL, if deepmind_lab is installed; or a Gymnasium environment, as ID or as MODULE:ID."""
    envs: int = 32
    """Number of environments that are stepped in parallel."""
    width: int = 96
    """Width of an observation, in pixels."""
    height: int = 72
    """Height of an observation, in pixels."""
    observation: Observation = "image"
    """What an agent sees: an image, or a vector of its position and of the objects in view, which needs no eyes."""
    objects: int = 36
    """Number of different objects, 2 to 36."""
    object_size: float = 60.0
    """Width and height of an object, in units; walls are 128 units high."""
    seconds: float = 12.0
    """Length of an episode, at 15 steps per second."""
    delays: tuple[int, ...] = (0,)
    """Steps in a corridor between the rooms, sampled for each episode; if any is above 0, an episode is one trial."""
    one_trial: bool = False
    """End an episode with its first choice, also without a delay."""
    speed: float = 320.0
    """Walking speed, in units per second."""
    turn: float = 8.4
    """Angle of one turning step, in degrees."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "delays", tuple(self.delays))  # TOML and JSON have no tuples
        check_values(self)
        if not 2 <= self.objects <= 36:
            raise ValueError(f"objects={self.objects}: expected 2 to 36, as there are 36 objects")
        if not self.delays or any(not isinstance(delay, int) or delay < 0 for delay in self.delays):
            raise ValueError(f"delays={self.delays}: expected one or more integers of at least 0")
        if self.speed > 960:
            raise ValueError(f"speed={self.speed}: expected at most 960; a longer step could skip the pad")

    @property
    def comparable(self) -> bool:
        """Whether scores may be compared with the published ones: the rooms with default rules, or the original."""
        if self.name.startswith("lab:"):
            return self.name.endswith("/rooms_select_nonmatching_object")
        return self.changes.keys() <= {"width", "height"}

    @property
    def changes(self) -> dict[str, Any]:
        """Fields with other values than in the full rooms; the number of environments is none of them."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in fields if name != "envs" and value != getattr(TaskConfig, name)}

    @property
    def ends_with_choice(self) -> bool:
        """Whether an episode is one trial."""
        return self.one_trial or any(self.delays)


@documented
@dataclass(frozen=True)
class AgentConfig:
    """The agent's network; the sizes of its memory are those of the model."""

    core: Core = "compressive"
    """Memory core: the Compressive Transformer, a TransformerXL (recent memory only), an LSTM, or none."""
    channels: tuple[int, ...] = (16, 32, 32)
    """Channels of each section of the residual network; each section halves the resolution."""
    blocks: int = 2
    """Residual blocks in each section."""
    features: int = 256
    """Features of an observation that the memory core reads."""
    outcome_steps: int = 0
    """Ours: a head predicts a choice's outcome in so many steps before it, as an auxiliary task; 0: no head."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))
        check_values(self, zero_allowed=("outcome_steps",))
        if not self.channels or any(not isinstance(count, int) or count < 1 for count in self.channels):
            raise ValueError(f"channels={self.channels}: expected one or more integers of at least 1")


@documented
@dataclass(frozen=True)
class LearnConfig:
    """Training: IMPALA, by default with the paper's learning rate and entropy cost."""

    steps: int = 100_000_000
    """Agent steps over all environments; a rollout has envs × window of them."""
    batch: int = 32
    """Environments per update; the environments of a rollout are split into minibatches of this size."""
    minutes: float = 0.0
    """Stop and save after so many minutes; 0 for no limit."""
    optimiser: Optimiser = "rmsprop"
    """RMSProp as in IMPALA, or Adam."""
    learning_rate: float = 1.5e-5
    """Learning rate at the start."""
    final_learning_rate: float | None = None
    """Learning rate at the last step, reached linearly; constant if not given, as in the paper."""
    epsilon: float = 1e-4
    """Epsilon of the optimiser. IMPALA's 0.1 is inside the root and for sums over 32 rollouts of 100 steps; our losses
    are means, and √0.1 / 3,200 is 1e-4."""
    clip: float = 1.0
    """Largest gradient norm, separately for the compressors and for all other parameters; IMPALA's code has none."""
    discount: float = 0.99
    """Discount of rewards, per step."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    entropy_cost: float = 2e-3
    """Weight of the policy's entropy at the start."""
    final_entropy_cost: float | None = None
    """Weight of the entropy at the last step, reached linearly; constant if not given, as in the paper."""
    outcome_cost: float = 1.0
    """Weight of the loss of agent.outcome_steps' head."""
    stagger: bool = False
    """Begin the first episodes at random times within them, so that environments do not end theirs together."""
    reward: RewardShape = "scaled"
    """Reward shaping: scaled by reward_scale, or IMPALA's asymmetric squashing."""
    reward_scale: float = 0.1
    """Factor of scaled rewards. No clipping: at 1 it would make the pad worth as much as the right object."""
    actors: int = 0
    """Ray processes that act and share the environments, while this one learns; 0: act and learn in one process."""
    precision: Precision = "fp32"
    """Precision of matrix products: fp32, or bf16 by autocast with weights and memory in fp32."""
    compile: bool = False
    """Compile environments, acting and learning, and on a GPU capture rollouts as a CUDA graph; takes about a minute at
    the start."""
    device: str = "auto"
    """Device: auto uses a GPU if there is one. With Ray, the learner's device; actors run on CPUs."""
    threads: int = 0
    """CPU threads of torch in training; 0 for torch's own choice, one per core. Small networks are fastest with 1."""
    seed: int = 0
    """Seed of the weights, the environments and the sampled actions."""
    log_every: int = 10
    """Rollouts between lines of metrics."""
    checkpoint_every: int = 200
    """Rollouts between checkpoints."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard."""
    wandb: bool = False
    """Also send metrics to Weights & Biases."""

    def __post_init__(self) -> None:
        check_values(self, zero_allowed=("minutes", "actors", "seed", "entropy_cost", "threads"))
        for name, least in (("final_learning_rate", "above 0"), ("final_entropy_cost", "of at least 0")):
            value = getattr(self, name)
            if value is not None and not (value > 0 or (value == 0 and "least" in least)):
                raise ValueError(f"{name}={value}: expected a number {least}, or none for a constant")
        if self.discount >= 1:
            raise ValueError(f"discount={self.discount}: expected a number below 1")


@dataclass(frozen=True)
class AgentRun:
    """A training run of an agent: memory, task, network and training. A rollout is one window of the model."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    agent: AgentConfig = dataclasses.field(default_factory=AgentConfig)
    train: LearnConfig = dataclasses.field(default_factory=LearnConfig)

    def __post_init__(self) -> None:
        compresses = self.agent.core == "compressive"
        if compresses and not any(self.model.compressed_sizes):
            raise ValueError(
                "core='compressive' with compressed_size=0: expected a compressed memory; or use core='txl'"
            )
        trainable = self.model.compression not in ("max", "mean", "most_used")
        if compresses and trainable and self.model.compression_loss == "none":
            raise ValueError(
                f"compression={self.model.compression!r} with compression_loss='none': nothing would train the "
                "compressor; give it a loss (attention, autoencoding)"
            )
        if self.task.name != "rooms":
            for table, name in (("task", "observation"), ("train", "stagger"), ("agent", "outcome_steps")):
                section = getattr(self, table)
                if getattr(section, name) != getattr(type(section), name):
                    given = f"{table}.{name}={getattr(section, name)!r}"
                    raise ValueError(f"{given} with task.name={self.task.name!r}: expected the rooms; leave it out")
        if self.train.actors and self.task.envs % self.train.actors:
            raise ValueError(f"envs={self.task.envs}: expected a multiple of actors={self.train.actors}")
        if self.envs_per_rollout % self.batch:
            raise ValueError(
                f"batch={self.train.batch}: expected a divisor of {self.envs_per_rollout}, the envs of a rollout"
            )

    @property
    def memory(self) -> ModelConfig:
        """The model of the memory core; with core `txl` it has no compressed memory."""
        return dataclasses.replace(self.model, compressed_size=0) if self.agent.core == "txl" else self.model

    @property
    def envs_per_rollout(self) -> int:
        """Environments of one rollout: all of them, or the share of one Ray actor."""
        return self.task.envs // max(1, self.train.actors)

    @property
    def batch(self) -> int:
        """Environments of one update: at most those of a rollout."""
        return min(self.train.batch, self.envs_per_rollout)

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """Return the run that a preset describes. Raises ValueError if it is not an agent's."""
        if name not in preset_names("task"):
            raise ValueError(f"preset={name!r}: expected an agent's preset, one of {', '.join(preset_names('task'))}")
        return cls.from_tables(load_preset(name))

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> Self:
        """Build a run from nested tables, as in a preset or a saved configuration."""
        kinds = {"model": ModelConfig, "task": TaskConfig, "agent": AgentConfig, "train": LearnConfig}
        return cls(**read_tables(tables, kinds))
