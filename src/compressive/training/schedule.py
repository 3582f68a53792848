"""Learning rate and update frequency (section 5 of the paper). Both count steps, not updates."""

import math

from compressive.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, cosine decay from its end, then constant."""
    low, high, final = config.initial_learning_rate, config.learning_rate, config.final_learning_rate
    if step < config.warmup_steps:
        return low + (high - low) * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / config.decay_steps)
    return final + (high - final) * (1 + math.cos(math.pi * progress)) / 2


def steps_per_update(step: int, config: TrainConfig) -> int:
    """How many steps share one update, at this step (section 5.5.1)."""
    return config.update_every if step >= config.update_every_from else 1


def is_update(step: int, config: TrainConfig) -> bool:
    """Whether parameters are updated at the end of this step."""
    return (step - config.update_every_from + 1) % steps_per_update(step, config) == 0
