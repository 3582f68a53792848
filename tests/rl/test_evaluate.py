"""Evaluating and watching: whole episodes, intervals, frames and files."""

import numpy as np
import pytest
import torch
from PIL import Image
from rl_helpers import CPU, build, tiny_agent_run

from compressive.config.agent import TaskConfig
from compressive.rl.env.rooms import Rooms
from compressive.rl.env.task import Transition, build_task
from compressive.rl.evaluate import Evaluation, evaluate
from compressive.rl.open import open_player
from compressive.rl.policies import AgentPlayer, OraclePlayer, RandomPlayer
from compressive.rl.video import watch, write


class Uneven:
    """Lane 0 has episodes of one step and return 1, lane 1 of four steps and return 8."""

    n_actions, lanes, observation_shape = 2, 2, (3,)

    def reset(self, seed=None):
        self.steps = torch.zeros(2, dtype=torch.long)
        return torch.zeros(2, 3)

    def step(self, action):
        self.steps += 1
        done = self.steps == torch.tensor([1, 4])
        self.steps[done] = 0
        right = torch.tensor([True, False])
        return Transition(torch.zeros(2, 3), torch.tensor([1.0, 2.0]), done, right, ~right)


class Still:
    def act(self, *_):
        return torch.zeros(2, dtype=torch.long)


def test_short_episodes_do_not_count_more():
    found = evaluate(Uneven(), Still(), 6)
    assert sorted(found.returns) == [1, 1, 1, 8, 8, 8]
    assert (found.right, found.wrong) == (3, 12)
    assert found.mean == 4.5
    with pytest.raises(ValueError, match="episodes=1: expected at least 2"):
        evaluate(Uneven(), Still(), 1)


def test_intervals_are_right():
    found = Evaluation([1.0, 2.0, 3.0, 4.0], right=60, wrong=40)
    assert found.margin == pytest.approx(1.96 * np.std([1, 2, 3, 4], ddof=1) / 2)
    share, low, high = found.accuracy
    assert (share, round(low, 3), round(high, 3)) == (0.6, 0.502, 0.691)  # Wilson's, from a table
    assert Evaluation([0.0, 0.0], 0, 0).accuracy is None
    assert Evaluation([65.9, 65.9], 0, 0, comparable=True).human_normalised == pytest.approx(1)
    assert Evaluation([65.9, 65.9], 0, 0).human_normalised is None


@pytest.mark.parametrize("core", ["compressive", "lstm"])
def test_a_trained_agent_plays_as_it_acted(core):
    """Step by step over several windows, the player's policy is the one that the learner's pass gives."""
    run = tiny_agent_run(agent={"core": core}, task={"seconds": 10.0})
    task, agent, _ = build(run)
    player = AgentPlayer(agent, task, 0, CPU, greedy=True)
    observation, action = task.reset(), torch.zeros(6, dtype=torch.long)
    reward, start = torch.zeros(6), torch.ones(6, dtype=torch.bool)
    seen, state = [], agent.core.initial_state(6)
    for step in range(48):
        seen.append((observation, action, reward, start))
        chosen = player.act(observation, action, reward, start)
        if step % 16 == 15:
            window = [torch.stack(parts, dim=1) for parts in zip(*seen[-16:], strict=True)]
            x = agent.inputs(*(part.flatten(0, 1) for part in window)).unflatten(0, (6, 16))
            out = agent.core(x, state, window[3])
            state = out.state
            logits, _ = agent.head(out.hidden)
            assert torch.equal(logits[:, -1].argmax(-1), chosen)
        action = chosen
        observation, reward, start, *_ = task.step(action)


def test_an_episode_is_drawn_with_its_map(tmp_path):
    task, player, about, comparable = open_player("oracle", 1, 0, CPU, delays=(5,), shown=True)
    frames, total = watch(task, player, seed=3)
    assert (about, total, comparable) == ("oracle", 11, False)  # a delay is not in the original
    assert len({frame.shape for frame in frames}) == 1
    height, width, _ = frames[0].shape
    assert width > 96 * 4  # the view and, beside it, the map
    assert not np.array_equal(frames[0][:, 96 * 4 :], frames[5][:, 96 * 4 :])  # the player moved on it
    write(frames, tmp_path / "a" / "episode.gif")
    with Image.open(tmp_path / "a" / "episode.gif") as image:
        assert image.n_frames == len(frames)
        assert image.size == (width, height)
    write(frames[:3], tmp_path / "pictures")
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["0000.png", "0001.png", "0002.png"]
    with Image.open(tmp_path / "pictures" / "0002.png") as image:
        assert np.array_equal(np.array(image), frames[2])


def test_who_does_not_look_is_not_shown_much():
    task, player, _, comparable = open_player("random", 4, 0, CPU)
    assert isinstance(player, RandomPlayer)
    assert task.observation_shape == (3, 4, 3)
    assert comparable
    task = open_player("random", 4, 0, CPU, shown=True).task
    assert task.observation_shape == (72, 96, 3)


def test_what_cannot_be_watched_is_refused():
    task = build_task(TaskConfig("CartPole-v1", lanes=1), 0, CPU)
    with pytest.raises(ValueError, match="expected pictures, as only those can be watched"):
        watch(task, RandomPlayer(task, 0))
    with pytest.raises(ValueError, match="it knows the rooms only"):
        OraclePlayer(task)
    assert isinstance(build_task(TaskConfig(lanes=1), 0, CPU), Rooms)
