"""Encoders from observations to features: IMPALA's residual network for images, a small MLP for vectors."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A residual block of two 3 × 3 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + self.second(F.relu(self.first(F.relu(x))))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """IMPALA's large network (Espeholt et al. 2018, figure 3, right): (n, H, W, C) uint8 to (n, features)."""

    def __init__(self, shape: Sequence[int], channels: Sequence[int], blocks: int, features: int) -> None:
        super().__init__()
        height, width, previous = shape
        sections: list[nn.Module] = []
        for count in channels:
            pool = nn.MaxPool2d(3, stride=2, padding=1)
            sections += [nn.Conv2d(previous, count, 3, padding=1), pool, *(Block(count) for _ in range(blocks))]
            height, width, previous = (height + 1) // 2, (width + 1) // 2, count
        self.sections = nn.Sequential(*sections)
        self.output = nn.Linear(height * width * previous, features)

    def forward(self, x: Tensor) -> Tensor:
        """Encode images. The memory format is channels-last, as in the input and as GPU convolutions prefer."""
        x = self.sections(x.permute(0, 3, 1, 2).float() / 255)
        x = F.relu(x).permute(0, 2, 3, 1).flatten(1)
        return F.relu(self.output(x))


class MLP(nn.Module):
    """Two layers: (n, inputs) to (n, features)."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, features), nn.ReLU(), nn.Linear(features, features), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.layers(x.float())  # type: ignore[no-any-return]


def build_encoder(shape: Sequence[int], channels: Sequence[int], blocks: int, features: int) -> nn.Module:
    """Build the encoder for observations of a shape: images (H, W, C), or vectors (n,).

    Raises ValueError for other shapes.
    """
    if len(shape) == 1:
        return keep_scale(MLP(shape[0], features))
    if len(shape) != 3:
        raise ValueError(f"observations of shape {tuple(shape)}: expected images (H, W, C) or vectors (n,)")
    return keep_scale(ResNet(shape, channels, blocks, features)).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def keep_scale(network: nn.Module) -> nn.Module:
    """Initialise weights so that activations keep their scale from the image to the features (He et al. 2015).

    The core reads the features beside the last action, which is one-hot. With torch's default initialisation the
    features of the full network have a scale of 0.02, and differ between images by 0.008 (docs/log.md). Residual blocks
    start as the identity, so that their outputs do not add up.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    for module in network.modules():
        if isinstance(module, Block):
            nn.init.zeros_(module.second.weight)
    return network
