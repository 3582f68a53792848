"""The task: see an object, go to the next room, pick the object that was not shown. One tensor program for all copies.

It follows DMLab-30's rooms_select_nonmatching_object, from facts about it (see `map`). Each episode has one object. In
each trial the first room shows it, on the left or on the right. The pad in the middle gives +1 and leads to the second
room, which shows the object again beside another one. The other one gives +10, the same one -10, and both start the
next trial. An episode ends only by its time limit.

Departures: the avatar has no inertia, and a step turns it and then moves it once, by the distance of four frames. With
`delays` the pad leads through a corridor for so many steps, whatever actions are taken there, and an episode is one
trial.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compressive.config.agent import TaskConfig
from compressive.model.records import TensorRecord
from compressive.rl.env import map as layout
from compressive.rl.env import prng
from compressive.rl.env.render import Renderer
from compressive.rl.env.task import Transition

ACTIONS = (
    "forward", "back", "strafe left", "strafe right", "look left", "look right",
    "forward and left", "forward and right", "fire",
)  # fmt: skip
FRAMES_PER_SECOND, FRAMES_PER_STEP = 60, 4
HUMAN, RANDOM = 65.9, 0.312
"""Published scores per episode on the original task: of humans, and of a uniformly random policy."""
FIRST, CORRIDOR, SECOND = 0, 1, 2
"""Values of RoomsState.room."""
_NUMBERS_PER_STEP = 8
"""Counter values of the random number generator that are reserved for each step."""
_PLACE, _SCALE = 7, 256.0
"""Numbers of a vector before the objects: place and direction, and the room; and the unit of the place."""


def human_normalised(score: float) -> float:
    """Return a score on a scale where a random policy has 0 and humans have 1."""
    return (score - RANDOM) / (HUMAN - RANDOM)


@dataclass(frozen=True)
class RoomsState(TensorRecord):
    """The state of B environments, (B,) each."""

    x: Tensor
    y: Tensor
    angle: Tensor
    room: Tensor
    time: Tensor  # steps since the episode began
    limit: Tensor  # steps after which it ends
    delay: Tensor  # steps in the corridor, in this episode
    waiting: Tensor  # steps left in the corridor
    match: Tensor  # the object of this episode
    other: Tensor  # the other object in this trial's second room
    example_left: Tensor  # bool: the first room shows its object on the left
    match_left: Tensor  # bool: the second room has the match object on the left
    key: Tensor  # of the environment's random numbers
    clock: Tensor  # steps since the task was reset


class Acted(NamedTuple):
    """What one step did, before ended episodes begin anew."""

    state: RoomsState
    reward: Tensor  # (B,)
    done: Tensor  # (B,) bool
    right: Tensor  # (B,) bool
    wrong: Tensor  # (B,) bool


class Rooms:
    """B copies of the task on one device. `compile` compiles `advance` as one graph."""

    n_actions = len(ACTIONS)

    def __init__(
        self, config: TaskConfig, seed: int = 0, device: torch.device | str = "cpu", compile: bool = False
    ) -> None:
        self.config, self.n_envs = config, config.envs
        self.observation_shape: tuple[int, ...]
        if config.observation == "vector":
            self.observation_shape = (_PLACE + 2 * config.objects,)
        else:
            self.observation_shape = (config.height, config.width, 3)
        self.renderer = Renderer(config.width, config.height, config.object_size, device)
        self.delays = torch.tensor(config.delays, device=device)
        self.places = torch.tensor([layout.EXAMPLES, layout.CHOICES], device=device)  # (rooms, sides, 2)
        self.stride = config.speed * FRAMES_PER_STEP / FRAMES_PER_SECOND
        self.turn = math.radians(config.turn)
        self.limit = round(config.seconds * FRAMES_PER_SECOND / FRAMES_PER_STEP)
        self._advance: Callable[[RoomsState, Tensor], tuple[RoomsState, Transition]]
        self._advance = torch.compile(self.advance, fullgraph=True) if compile else self.advance
        self.state = self.first_state(prng.keys(seed, self.n_envs, device))

    def reset(self, seed: int | None = None) -> Tensor:
        """Start a new episode in every environment, with new keys if a seed is given.

        Returns the observations, (B, *observation_shape).
        """
        key = self.state.key if seed is None else prng.keys(seed, self.n_envs, self.state.key.device)
        self.state = self.first_state(key)
        return self.observe(self.state)

    def step(self, action: Tensor) -> Transition:
        """Take one action per environment, (B,) int64, the index of one of ACTIONS."""
        self.state, transition = self._advance(self.state, action)
        return transition

    def final_state(self, before: RoomsState, action: Tensor) -> RoomsState:
        """Return where a step from `before` led, without the restart of what it ended: an episode's last state."""
        return self._act(before, action).state

    def view(self) -> Tensor:
        """Render the current view of every environment, (B, H, W, 3) uint8."""
        return self.render(self.state)

    def stagger(self) -> None:
        """Set every environment to a random time of its episode, as if it had stood still until then."""
        state = self.state
        elapsed = (prng.uniform(state.key, state.clock * _NUMBERS_PER_STEP + 5) * state.limit).long()
        self.state = dataclasses.replace(state, time=elapsed)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything needed to continue."""
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state."""
        self.state = RoomsState.from_state_dict(state)

    def first_state(self, key: Tensor) -> RoomsState:
        """Return the state of every environment at the start of its first episode; key (B,) int64."""
        zeros, no = torch.zeros_like(key), torch.zeros_like(key, dtype=torch.bool)
        numbers = dict.fromkeys(("room", "time", "limit", "delay", "waiting", "match", "other", "clock"), zeros)
        places = dict.fromkeys(("x", "y", "angle"), zeros.float())
        blank = RoomsState(**places, **numbers, example_left=no, match_left=no, key=key)
        return self._begin(blank, everyone := ~no, everyone)

    def advance(self, state: RoomsState, action: Tensor) -> tuple[RoomsState, Transition]:
        """Take one step in every environment. A pure function of the state and the actions, (B,) int64."""
        return self._restart(self._act(state, action))

    def _act(self, state: RoomsState, action: Tensor) -> Acted:
        """Take one step in every environment, up to where episodes and trials end."""
        state = dataclasses.replace(state, clock=state.clock + 1, time=state.time + 1)
        state = self._move(state, action)
        x, y = state.x, state.y

        aside = abs(y - (layout.PAD.bottom + layout.PAD.top) / 2)
        pad = (state.room == FIRST) & (x + layout.AVATAR >= layout.PAD.left) & (x - layout.AVATAR <= layout.PAD.right)
        pad = pad & (aside <= (layout.PAD.top - layout.PAD.bottom) / 2 + layout.AVATAR)
        waiting = torch.where(pad, state.delay, state.waiting - 1)
        arrives = (pad | (state.room == CORRIDOR)) & (waiting <= 0)
        enters = pad & ~arrives

        (left_x, left_y), (_, right_y) = layout.CHOICES
        near = (state.room == SECOND) & (x >= left_x - layout.REACH_BEFORE) & (x <= left_x + layout.REACH_BEHIND)
        takes_left = near & (abs(y - left_y) <= layout.REACH_ASIDE)
        takes_right = near & (abs(y - right_y) <= layout.REACH_ASIDE)
        wrong = torch.where(state.match_left, takes_left, takes_right)
        right = torch.where(state.match_left, takes_right, takes_left)
        reward = pad.float() + 10 * right.float() - 10 * wrong.float()

        # The avatar arrives in the second room one step ahead of the arrival point.
        room = torch.where(arrives, SECOND, torch.where(enters, CORRIDOR, state.room))
        moved = arrives | enters
        to_x = torch.where(arrives, layout.ARRIVAL[0] + self.stride, layout.CORRIDOR_ENTRY[0])
        state = dataclasses.replace(
            state,
            room=room,
            waiting=waiting,
            x=torch.where(moved, to_x, x),
            y=torch.where(moved, layout.ARRIVAL[1], y),
            angle=torch.where(moved, 0.0, state.angle),
        )
        done = state.time >= state.limit
        if self.config.ends_with_choice:
            done = done | right | wrong
        return Acted(state, reward, done, right, wrong)

    def _restart(self, acted: Acted) -> tuple[RoomsState, Transition]:
        """Begin new trials and episodes where the last ones ended."""
        state, reward, done, right, wrong = acted
        state = self._begin(state, right | wrong | done, done)
        return state, Transition(self.observe(state), reward, done, right, wrong)

    def observe(self, state: RoomsState) -> Tensor:
        """Return the observation of every environment: (B, H, W, 3) uint8, or (B, n) float32 with vectors."""
        return self._vector(state) if self.config.observation == "vector" else self.render(state)

    def render(self, state: RoomsState) -> Tensor:
        """Render the view of every environment, (B, H, W, 3) uint8."""
        return self.renderer(state.x, state.y, state.angle, *self._objects(state), state.room == CORRIDOR)

    def _objects(self, state: RoomsState) -> tuple[Tensor, Tensor, Tensor]:
        """Return the objects left and right (B, 2), their places (B, 2, 2) and whether they are there (B, 2)."""
        in_second = state.room == SECOND
        left = torch.where(in_second & ~state.match_left, state.other, state.match)
        right = torch.where(in_second & state.match_left, state.other, state.match)
        shown_left = in_second | ((state.room == FIRST) & state.example_left)
        shown_right = in_second | ((state.room == FIRST) & ~state.example_left)
        shown = torch.stack([shown_left, shown_right], dim=1)
        return torch.stack([left, right], dim=1), self.places[in_second.long()], shown

    def _vector(self, state: RoomsState) -> Tensor:
        """Return position, direction, room and, for both sides, the object in the image's field of view, one-hot."""
        kinds, places, shown = self._objects(state)
        cos, sin = state.angle.cos(), state.angle.sin()
        to_x, to_y = (places - torch.stack([state.x, state.y], dim=1)[:, None]).unbind(dim=2)  # (B, 2)
        ahead, aside = to_x * cos[:, None] + to_y * sin[:, None], to_x * sin[:, None] - to_y * cos[:, None]
        seen = shown & (ahead > 0) & (aside.abs() < ahead)  # 45° to either side
        objects = F.one_hot(kinds, self.config.objects) * seen[..., None]
        place = torch.stack([state.x / _SCALE, state.y / _SCALE, cos, sin], dim=1)
        rooms = F.one_hot(state.room, 3)
        return torch.cat([place, rooms.float(), objects.flatten(1).float()], dim=1)

    def _begin(self, state: RoomsState, trial: Tensor, episode: Tensor) -> RoomsState:
        """Start a new trial where `trial` (B,) is True, and a new episode where `episode` (B,) is True."""

        def sample(number: int, high: int) -> Tensor:
            return prng.randint(state.key, state.clock * _NUMBERS_PER_STEP + number, high)

        n_objects = self.config.objects
        match = torch.where(episode, sample(0, n_objects), state.match)
        other = (match + 1 + sample(1, n_objects - 1)) % n_objects
        delay = torch.where(episode, self.delays[sample(2, len(self.config.delays))], state.delay)
        return dataclasses.replace(
            state,
            x=torch.where(trial, layout.SPAWN[0], state.x),
            y=torch.where(trial, layout.SPAWN[1], state.y),
            angle=torch.where(trial, 0.0, state.angle),
            room=torch.where(trial, FIRST, state.room),
            time=torch.where(episode, 0, state.time),
            limit=torch.where(episode, self.limit + delay, state.limit),
            delay=delay,
            match=match,
            other=torch.where(trial, other, state.other),
            example_left=torch.where(trial, sample(3, 2) == 0, state.example_left),
            match_left=torch.where(trial, sample(4, 2) == 0, state.match_left),
        )

    def _move(self, state: RoomsState, action: Tensor) -> RoomsState:
        """Turn, then move as far as the walls allow, axis by axis, so that the avatar slides along walls."""

        def any_of(*numbers: int) -> Tensor:
            return sum((action == number).float() for number in numbers)  # type: ignore[return-value]

        angle = state.angle + self.turn * (any_of(4, 6) - any_of(5, 7))
        ahead, aside = any_of(0, 6, 7) - any_of(1), any_of(3) - any_of(2)
        cos, sin = angle.cos(), angle.sin()
        x = state.x + self.stride * (ahead * cos + aside * sin)
        y = state.y + self.stride * (ahead * sin - aside * cos)

        first, second = state.room == FIRST, state.room == SECOND

        def inside(room: layout.Box) -> layout.Box:
            return layout.Box(*(edge + layout.AVATAR * sign for edge, sign in zip(room, (1, -1, 1, -1), strict=True)))

        one, vestibule, hall, corridor = map(
            inside, (layout.FIRST_ROOM, layout.VESTIBULE, layout.HALL, layout.CORRIDOR)
        )
        in_door = (state.y >= vestibule.bottom) & (state.y <= vestibule.top)
        second_left = torch.where(in_door, vestibule.left, hall.left)
        low = torch.where(first, one.left, torch.where(second, second_left, corridor.left))
        high = torch.where(first, one.right, torch.where(second, hall.right, corridor.right))
        x = torch.minimum(torch.maximum(x, low), high)
        x = torch.where(self._guarded(state, x, state.y), state.x, x)

        in_hall = x >= hall.left
        second_low = torch.where(in_hall, hall.bottom, vestibule.bottom)
        second_high = torch.where(in_hall, hall.top, vestibule.top)
        low = torch.where(first, one.bottom, torch.where(second, second_low, corridor.bottom))
        high = torch.where(first, one.top, torch.where(second, second_high, corridor.top))
        y = torch.minimum(torch.maximum(y, low), high)
        y = torch.where(self._guarded(state, x, y), state.y, y)
        return dataclasses.replace(state, x=x, y=y, angle=torch.remainder(angle + math.pi, 2 * math.pi) - math.pi)

    def _guarded(self, state: RoomsState, x: Tensor, y: Tensor) -> Tensor:
        """Return whether the avatar at (x, y) would be inside the box around the first room's object, (B,) bool."""
        (at_x, left_y), (_, right_y) = layout.EXAMPLES
        at_y = torch.where(state.example_left, left_y, right_y)
        size = layout.EXAMPLE_GUARD + layout.AVATAR
        return (state.room == FIRST) & (abs(x - at_x) < size) & (abs(y - at_y) < size)
