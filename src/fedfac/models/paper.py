"""The networks of the paper's experiments (section 5.1), numbered as it counts their layers.

FEMNIST: two convolutions and two fully connected layers; Λ = {2} is the second convolution. Shakespeare: a two-layer
LSTM and two fully connected layers; Λ = {3} is the first of those. CIFAR-10: ResNet-18, 17 convolutions and a fully
connected layer, projection shortcuts not counted; Λ = {16, 17} are the two convolutions of the last block. CIFAR-100:
VGG-16, 13 convolutions and 3 fully connected layers; Λ = {15} is the middle one of those. All start from scratch.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from fedfac.errors import ConfigError, ModelError
from fedfac.models.small import image_shape

VGG16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")


def femnist_cnn(*, shape: tuple[int, ...], classes: int, dropout: float = 0.5) -> nn.Module:
    """1 conv1 (5×5, 32), 2 conv2 (5×5, 64), 3 fc1 (512), 4 fc2: 608,702 parameters for 28 × 28 and 62 classes.

    It ends in logits: there is no softmax before the loss.
    """
    channels, height, width = image_shape("femnist-cnn", shape, least=16)
    rest = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * rest[0] * rest[1], 512),
            relu3=nn.ReLU(),
            dropout=nn.Dropout(dropout),
            fc2=nn.Linear(512, classes),
        )
    )


class CharLSTM(nn.Module):
    """1 and 2 the LSTM's two layers (256 units each), 3 fc1 (512), 4 fc2: the next character.

    For inputs with a target at every position it predicts at every position: (batch, classes, time).
    """

    def __init__(self, classes: int, *, embedding: int = 8, hidden: int = 256, width: int = 512, every: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.fc1 = nn.Linear(hidden, width)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(width, classes)
        self.every = every

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next character."""
        states = self.lstm(self.embedding(text))[0]
        if self.every:
            outputs: Tensor = self.fc2(self.relu(self.fc1(states))).transpose(1, 2)
            return outputs
        last: Tensor = self.fc2(self.relu(self.fc1(states[:, -1])))
        return last


def char_lstm(*, shape: tuple[int, ...], classes: int, every_position: bool = False) -> nn.Module:
    """The paper's network for text: embedding 8, LSTM 2 × 256, FC 512, FC vocabulary."""
    if len(shape) != 1:
        raise ModelError(f"char-lstm eats lines of characters (time,); the data has samples of {shape}")
    return CharLSTM(classes, every=every_position)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut (He et al. 2016)."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != channels:
            self.shortcut = nn.Sequential(
                OrderedDict(conv=nn.Conv2d(before, channels, 1, stride, bias=False), bn=nn.BatchNorm2d(channels))
            )

    def forward(self, x: Tensor) -> Tensor:
        """relu(F(x) + shortcut(x))."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        added: Tensor = self.relu(out + self.shortcut(x))
        return added


class ResNet18(nn.Module):
    """1 the stem, 2–5, 6–9, 10–13, 14–17 the convolutions of the four stages, 18 the head."""

    def __init__(self, channels: int, classes: int, *, stem: int) -> None:
        super().__init__()
        small = stem == 3
        self.conv1 = nn.Conv2d(channels, 64, stem, 1 if small else 2, padding=stem // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.pool: nn.Module = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.stages = nn.Sequential(
            *(nn.Sequential(BasicBlock(a, b, stride), BasicBlock(b, b, 1)) for a, b, stride in sizes)
        )
        self.average = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(512, classes)

    @property
    def fedfac_layers(self) -> list[str]:
        """The layers that the paper counts, in its order: the projection shortcuts are not among them."""
        blocks = [f"stages.{i}.{j}.conv{k}" for i in range(4) for j in range(2) for k in (1, 2)]
        return ["conv1", *blocks, "fc"]

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.fc(self.flatten(self.average(self.stages(x))))
        return out


def resnet18(*, shape: tuple[int, ...], classes: int, stem: int = 3) -> nn.Module:
    """ResNet-18. A stem of 7 (and a max-pooling) is ImageNet's: on 32 × 32 it leaves 1 × 1 maps at the end."""
    if stem not in (3, 7):
        raise ConfigError(f"stem is {stem}; allowed: 3 (for small images) and 7 (ImageNet's)")
    channels, _, _ = image_shape("resnet18", shape, least=8)
    return ResNet18(channels, classes, stem=stem)


def vgg16(*, shape: tuple[int, ...], classes: int, width: int = 512, dropout: float = 0.5) -> nn.Module:
    """VGG-16 with batch normalisation: 1–13 convolutions, 14 and 15 FC of ``width`` (the paper: 4096), 16 the head."""
    channels, height, side = image_shape("vgg16", shape, least=32)
    parts: list[nn.Module] = []
    before = channels
    for entry in VGG16:
        if isinstance(entry, int):
            parts += [nn.Conv2d(before, entry, 3, padding=1), nn.BatchNorm2d(entry), nn.ReLU()]
            before = entry
        else:
            parts.append(nn.MaxPool2d(2))
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*parts),
            flatten=nn.Flatten(),
            fc1=nn.Linear(512 * (height // 32) * (side // 32), width),
            relu1=nn.ReLU(),
            dropout1=nn.Dropout(dropout),
            fc2=nn.Linear(width, width),
            relu2=nn.ReLU(),
            dropout2=nn.Dropout(dropout),
            fc3=nn.Linear(width, classes),
        )
    )
