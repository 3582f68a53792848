"""The trunk in a model of your own: a classifier that must remember the beginning of a stream of vectors.

python examples/trunk_in_your_model.py

Each stream shows one of four cues in its first window, then noise for three windows. At every position the
classifier says which cue it was. Once the window with the cue has passed, only memory knows: recent memory in the
second window, compressed memory in the last two. Chance is 25 %.

`CompressiveTransformer` takes (batch, time, d_model) and returns the same shape, with the next memory. What comes
before and after it is yours.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive import CompressiveTransformer, Memory, ModelConfig

CLASSES, FEATURES, WINDOW, WINDOWS = 4, 8, 16, 4


class Classifier(nn.Module):
    """Vectors (batch, time, FEATURES) to class scores (batch, time, CLASSES), with memory carried by the caller."""

    def __init__(self) -> None:
        super().__init__()
        config = ModelConfig(
            n_layers=2, d_model=32, n_heads=4, d_ff=64, window=WINDOW,
            memory_size=WINDOW, compressed_size=2 * WINDOW // 4, compression_rate=4,
        )  # fmt: skip
        self.encoder = nn.Linear(FEATURES, config.d_model)
        self.trunk = CompressiveTransformer(config)
        self.head = nn.Linear(config.d_model, CLASSES)

    def forward(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory, Tensor]:
        """Read one window; return scores, the next memory and the compression loss ()."""
        out = self.trunk(self.encoder(x), memory)
        return self.head(out.hidden), out.memory, out.compression_loss


def streams(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample streams (batch, WINDOWS * WINDOW, FEATURES) and the class of each (batch,)."""
    x = 0.5 * torch.randn(batch, WINDOWS * WINDOW, FEATURES, generator=generator)
    label = torch.randint(CLASSES, (batch,), generator=generator)
    x[torch.arange(batch), WINDOW // 2, label] += 4.0  # the cue
    return x, label


def train(steps: int) -> tuple[float, float, list[float]]:
    """Train; return the first and the last loss, and the accuracy in each window on new streams."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Classifier()
    optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
    losses = []
    for step in range(steps):
        x, label = streams(32, generator)
        memory = model.trunk.initial_memory(batch_size=32)
        total = torch.zeros(())
        for window in x.split(WINDOW, dim=1):
            scores, memory, compression_loss = model(window, memory)
            task = F.cross_entropy(scores[:, WINDOW // 2 :].flatten(0, 1), label.repeat_interleave(WINDOW // 2))
            total = total + task.detach() / WINDOWS
            ((task + compression_loss) / WINDOWS).backward()  # window by window: memory carries no graph
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(total))
        if step % 20 == 0:
            print(f"step {step:4d}   loss {losses[-1]:.3f}")

    with torch.no_grad():
        x, label = streams(512, generator)
        memory, right = model.trunk.initial_memory(batch_size=512), []
        for window in x.split(WINDOW, dim=1):
            scores, memory, _ = model(window, memory)
            right.append(float((scores[:, -1].argmax(dim=-1) == label).float().mean()))
    return losses[0], losses[-1], right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    first, last, right = train(parser.parse_args().steps)
    print(f"loss {first:.3f} to {last:.3f}")
    print("accuracy at the end of each window: " + ", ".join(f"{share:.0%}" for share in right))
