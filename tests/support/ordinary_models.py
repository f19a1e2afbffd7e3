"""Ordinary models, as people write their own, and their data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D = 8


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 5, D, generator=torch.Generator().manual_seed(0)), torch.tensor(0.5).expand(4)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(0)), torch.tensor(0.5).expand(4)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor(0.5).expand(4)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x))
        out += x
        found: Tensor = self.relu(out)
        return found


class ResNet(nn.Module):
    """As torchvision has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(4), Residual(4))
        self.layer2 = nn.Sequential(Residual(4))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.relu(self.layer2(self.layer1(x)))
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        found: Tensor = self.fc(x)
        return found


class Patches(nn.Module):
    """A vision Transformer: bare parameters, a token that is prepended, a result from one place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, D, 4, stride=4)
        self.cls, self.places = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, 5, D))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True), 2, norm=nn.LayerNorm(D),
            enable_nested_tensor=False,
        )  # fmt: skip
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        x = self.encoder(x)
        found: Tensor = self.head(x[:, 0])
        return found


class Decoder(nn.Module):
    """Two embeddings, a mask that is a buffer, and a head that shares its weights; layers in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.lm_head = nn.Linear(D, 16, bias=False)
        self.lm_head.weight = self.body.tok.weight

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.body(tokens)
        if scale is not None:
            x = x * scale
        found: Tensor = self.lm_head(x) / 2
        return found


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = x + mask @ self.map(x)
        return found


class Body(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(16, D), nn.Embedding(5, D)
        self.layers = nn.ModuleList(Masked() for _ in range(3))
        self.register_buffer("mask", torch.ones(5, 5).tril(), persistent=False)
        self.norm = nn.LayerNorm(D)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tok(tokens) + self.pos(places)
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.norm(x) * D**0.5


class Skips(nn.Module):
    """A value of the first layer is used by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.first(x))
        found: Tensor = self.last(F.gelu(self.third(-self.second(first) * 0.5 + 1) + first, approximate="tanh"))
        return found


class MaskMadeOnce(nn.Module):
    """A Transformer as users write it: a causal mask, made once, goes to every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(8, 11)
        self.register_buffer("future", torch.triu(torch.full((5, 5), float("-inf")), diagonal=1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = self.future.tril(5)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)  # type: ignore[no-any-return]


class Twofold(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Asserts(nn.Module):
    """As nanoGPT begins."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(16, D), nn.Embedding(8, D), nn.Dropout(0.0)
        self.h = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        _, length = idx.size()
        assert length <= 8, f"cannot take {length} tokens"
        places = torch.arange(0, length, dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(places))
        for block in self.h:
            x = block(x)
        return x if targets is None else F.mse_loss(x, targets)


class SizeOfActivations(nn.Module):
    """A mask of the size of what a layer returned, cut in each layer; sums in place, operations of few layers."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, D), nn.ModuleList(Masked() for _ in range(8))
        self.head = nn.Linear(D, 16)
        self.register_buffer("mask", torch.rand(6, 6).tril())

    def forward(self, tokens: Any) -> Tensor:
        tokens = tokens if isinstance(tokens, Tensor) else tokens[0]
        x = self.embed(tokens)
        length, early = x.shape[1], self.mask[:5, :5] * 0.5
        for place, layer in enumerate(self.layers):
            x = layer(x, early if place < 3 else self.mask[:length, :length])
            x += 0.5
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            found: Tensor = self.head(x * early.sum())
        return found


class Sequences(nn.Module):
    """Torch's own Transformer, of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, D)
        self.body = nn.Transformer(D, 2, 1, 2, 16, 0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.body(self.embed(source), self.embed(target))
        return found
