"""A level of DeepMind Lab as a Gymnasium environment. Needs `deepmind_lab`, which has to be built from source.

compressive rl train rooms --task.name lab:contributed/dmlab30/rooms_select_nonmatching_object
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from compressive.rl.env.rooms import FRAMES_PER_STEP

FIELDS = (
    "LOOK_LEFT_RIGHT_PIXELS_PER_FRAME", "LOOK_DOWN_UP_PIXELS_PER_FRAME", "STRAFE_LEFT_RIGHT", "MOVE_BACK_FORWARD",
    "FIRE", "JUMP", "CROUCH",
)  # fmt: skip
"""Names of the components of an action in DeepMind Lab."""
_LOOK = 20
ACTIONS: tuple[dict[str, int], ...] = (
    {"MOVE_BACK_FORWARD": 1},
    {"MOVE_BACK_FORWARD": -1},
    {"STRAFE_LEFT_RIGHT": -1},
    {"STRAFE_LEFT_RIGHT": 1},
    {"LOOK_LEFT_RIGHT_PIXELS_PER_FRAME": -_LOOK},
    {"LOOK_LEFT_RIGHT_PIXELS_PER_FRAME": _LOOK},
    {"LOOK_LEFT_RIGHT_PIXELS_PER_FRAME": -_LOOK, "MOVE_BACK_FORWARD": 1},
    {"LOOK_LEFT_RIGHT_PIXELS_PER_FRAME": _LOOK, "MOVE_BACK_FORWARD": 1},
    {"FIRE": 1},
)
"""IMPALA's nine actions, in the same order as those of the rooms."""
_PIXELS = "RGB_INTERLEAVED"


class LabEnv(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """A level of DeepMind Lab with IMPALA's settings: nine actions, each repeated for four frames.

    Raises ValueError if `deepmind_lab` is not installed.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    def __init__(self, level: str, width: int = 96, height: int = 72, render_mode: str | None = None) -> None:
        try:
            import deepmind_lab
        except ImportError as error:
            raise ValueError(
                f"task 'lab:{level}': deepmind_lab is not installed ({error}); build it from "
                "github.com/google-deepmind/lab, or use the task rooms, which needs no other package"
            ) from None
        self.render_mode = render_mode
        self.lab = deepmind_lab.Lab(level, [_PIXELS], config={"width": str(width), "height": str(height)})
        order = [field["name"] for field in self.lab.action_spec()]
        self.actions = [np.array([action.get(name, 0) for name in order], dtype=np.intc) for action in ACTIONS]
        self.observation_space = Box(0, 255, (height, width, 3), np.uint8)
        self.action_space = Discrete(len(ACTIONS))
        self.observation = np.zeros((height, width, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self.lab.reset(seed=int(self.np_random.integers(2**31)))
        self.observation = self._observe()
        return self.observation, {}

    def step(self, action: Any) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Repeat an action for four frames. The step that ends an episode returns the previous observation again."""
        reward = float(self.lab.step(self.actions[int(action)], num_steps=FRAMES_PER_STEP))
        terminated = not self.lab.is_running()
        if not terminated:
            self.observation = self._observe()
        return self.observation, reward, terminated, False, {}

    def render(self) -> NDArray[np.uint8] | None:
        """Return the current observation, if render_mode is rgb_array."""
        return self.observation if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Close the level."""
        self.lab.close()

    def _observe(self) -> NDArray[np.uint8]:
        return np.array(self.lab.observations()[_PIXELS], dtype=np.uint8)
