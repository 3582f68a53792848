"""Learning rate and update frequency (section 5 of the paper), and weight averaging. All count steps, not updates."""

import math

from compressive.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, decay from its end or from the end of `hold_steps` at the peak, then constant."""
    low, high, final = config.initial_learning_rate, config.learning_rate, config.final_learning_rate
    if step < config.warmup_steps:
        return low + (high - low) * step / config.warmup_steps
    start = config.warmup_steps + config.hold_steps
    length = config.decay_steps or max(1, config.steps - start)
    progress = min(1.0, max(0, step - start) / length)
    left = 1 - progress if config.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return final + (high - final) * left


def average_decay(step: int, config: TrainConfig) -> float:
    """How much of the average of the weights stays after the update of a step; less at first, to forget the start."""
    return min(config.weight_average, (1 + step) / (10 + step))


def steps_per_update(step: int, config: TrainConfig) -> int:
    """How many steps share one update, at this step (section 5.5.1)."""
    return config.update_every if step >= config.update_every_from else 1


def is_update(step: int, config: TrainConfig) -> bool:
    """Whether parameters are updated at the end of this step."""
    return (step - config.update_every_from + 1) % steps_per_update(step, config) == 0
