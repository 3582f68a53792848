"""A compression function of your own: subclass `Compressor`, register it, train a few steps.

python examples/custom_compressor.py

Gated pooling: a learned gate weighs the members of each group, per feature, and their weighted mean is the new slot.

Where it plugs in: every layer holds its compressor as `layer.compression` and calls it on the memories that leave
recent memory (Algorithm 1, line 9). Its parameters have `compress` in their names. So `model.compressor_parameters()`
finds them, and the compression loss alone trains them. To offer it as `--model.compression gated` too, add the name to
`Compression` in `config/model.py`: CONTRIBUTING.md has the steps.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from compressive import CompressiveLM, ModelConfig
from compressive.model.compression import COMPRESSORS, Compressor

BOOK = next((Path(__file__).parent.parent / "books" / "train").glob("*.txt"))


class GatedPooling(Compressor):
    """The mean of each group's members, weighted per feature by a learned gate."""

    def __init__(self, config: ModelConfig, rate: int) -> None:
        super().__init__(config, rate)
        self.gate = nn.Linear(config.d_model, config.d_model)

    def compress(self, slots: Tensor, valid: Tensor | None = None) -> Tensor:
        """Turn (B, n, D) into (B, n // rate, D); `valid` (B, n // rate, rate) is for spanning_slots="partial"."""
        members = self.groups(slots)  # (B, n // rate, rate, D)
        scores: Tensor = self.gate(members)
        if valid is not None:
            scores = scores.masked_fill(~valid[..., None], -1e9)
        return (scores.softmax(dim=2) * members).sum(dim=2)


COMPRESSORS["gated"] = GatedPooling


def build(config: ModelConfig, compression: str) -> CompressiveLM:
    """Build a model whose layers compress with a registered compressor, one of one's own included."""
    model = CompressiveLM(config)
    for layer, rate in zip(model.trunk.layers, config.compression_rates, strict=True):
        layer.compression = COMPRESSORS[compression](config, rate)
    return model


def train(steps: int) -> tuple[list[float], list[float]]:
    """Train on the bytes of a book; return the losses and the compression losses of all steps."""
    torch.manual_seed(0)
    config = ModelConfig(
        n_layers=2, d_model=64, n_heads=4, d_ff=128, window=32, memory_size=32, compressed_size=16, compression_rate=4
    )
    model = build(config, "gated")
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    tokens = torch.tensor(list(BOOK.read_bytes()[: 8 * (steps * 32 + 1)])).view(8, -1)  # eight streams
    memory = model.initial_memory(batch_size=8)
    losses, compression_losses = [], []
    for step in range(steps):
        window = slice(step * 32, step * 32 + 33)
        x, y = tokens[:, window][:, :-1], tokens[:, window][:, 1:]
        out = model(x, memory, targets=y)
        memory = out.memory
        (out.nll.mean() + out.compression_loss).backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(out.nll.detach().mean()))
        compression_losses.append(float(out.compression_loss.detach()))
    print("trained by the compression loss alone:", sum(p.numel() for p in model.compressor_parameters()), "parameters")
    return losses, compression_losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    losses, compression_losses = train(parser.parse_args().steps)
    tenth = max(1, len(losses) // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"loss {first:.3f} to {last:.3f} nats per byte over {len(losses)} steps")
    print(f"compression loss {compression_losses[-1]:.5f} at the end")
