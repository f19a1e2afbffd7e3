"""Ordinary models, as people write their own, and their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

D = 8


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 5, D, generator=torch.Generator().manual_seed(0)), torch.tensor(0.5).expand(8)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(0)), torch.tensor(0.5).expand(8)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor(0.5).expand(8)


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
        self.h = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

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


def normed(width: int, out: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution as in most models of images."""
    conv = nn.Conv2d(width, out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skips that are joined at the other end, of another size perhaps."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([normed(3, 4), normed(4, 8)])
        self.middle = normed(8, 8)
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.joined = nn.ModuleList([normed(16, 8), normed(8, 4)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, skip in zip(self.up, self.joined, reversed(skips), strict=True):
            x = up(x)
            if x.shape != skip.shape:
                x = F.interpolate(x, size=skip.shape[2:])
            x = join(torch.cat((skip, x), dim=1))
        found: Tensor = self.head(x)
        return found


class Denoiser(nn.Module):
    """A diffusion network: images, and the time of each."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))
        self.first, self.last = nn.Conv2d(3, D, 3, padding=1), nn.Conv2d(D, 3, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1) for _ in range(3))
        self.shifts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = t[:, None] * torch.exp(-torch.arange(D // 2, device=t.device) / 2.0)
        emb = self.time(torch.cat([waves.sin(), waves.cos()], dim=-1).to(x.dtype))
        h = self.first(x)
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            h = h + F.silu(layer(h) + shift(emb)[:, :, None, None])
        found: Tensor = self.last(h)
        return found


class Siamese(nn.Module):
    """An encoder that is called twice, and a distance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.head = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        found: Tensor = self.head((self.encoder(one) - self.encoder(other)).abs())
        return found


class DLRM(nn.Module):
    """Numbers and categories, whose products of pairs a second network takes."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(4, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(16, D, mode="sum") for _ in range(3))
        self.top = nn.Sequential(nn.Linear(D + 6, D), nn.ReLU(), nn.Linear(D, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x] + [table(categories[:, i]) for i, table in enumerate(self.tables)], dim=1)
        pairs = torch.bmm(features, features.transpose(1, 2))
        row, column = torch.tril_indices(4, 4, offset=-1)
        found: Tensor = self.top(torch.cat([x, pairs[:, row, column]], dim=1))
        return found


class GCN(nn.Module):
    """Convolutions on graphs, with dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(4))
        self.dropout = 0.0

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degrees = adjacency.sum(-1).clamp(min=1).rsqrt()
        adjacency = degrees[:, :, None] * adjacency * degrees[:, None, :]
        for i, layer in enumerate(self.layers):
            x = adjacency @ layer(x)
            if i < len(self.layers) - 1:
                x = F.dropout(F.relu(x), p=self.dropout, training=self.training)
        return F.log_softmax(x, dim=-1)


class NanoGPT(nn.Module):
    """Logits and loss, the head's weights shared."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(16, D), nn.Embedding(5, D)
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True) for _ in range(4))
        self.ln_f, self.lm_head = nn.LayerNorm(D), nn.Linear(D, 16, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = ResNet()
        self.backbone.fc = nn.Identity()  # type: ignore[assignment]
        self.head = nn.Linear(4, 3)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        features = self.backbone(image)
        return {"logits": self.head(features), "features": features}


class VAE(nn.Module):
    """Several outputs; noise as an input, so that plain torch has the same."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mu, self.logvar = nn.Linear(D, D), nn.Linear(D, 4), nn.Linear(D, 4)
        self.decoder = nn.Sequential(nn.Linear(4, D), nn.ReLU(), nn.Linear(D, D))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.encoder(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * noise[..., :4]
        return self.decoder(z), mu, logvar


class Routed(nn.Module):
    """The best expert of each token, and a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 2), nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        best, which = scores.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = which == index
            out[rows] = expert(x[rows]) * best[rows][:, None]
        return x + out, (scores.mean((0, 1)) * F.one_hot(which, 2).to(x.dtype).mean((0, 1))).sum()


class Experts(nn.Module):
    """Layers with experts, whose losses are collected in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Routed() for _ in range(4)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return self.head(x), torch.stack(losses).sum()


class Packed(nn.Module):
    """Recurrent layers on sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, D), nn.Linear(2 * D, 3)
        self.first = nn.GRU(D, D, batch_first=True, bidirectional=True)
        self.second = nn.GRU(2 * D, D, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = self.first(x)
        _, last = self.second(x)
        found: Tensor = self.head(last.transpose(0, 1).flatten(1))
        return found


class Recurrent(nn.Module):
    """LSTMs that take a state and return it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, D), nn.Linear(D, 16)
        self.layers = nn.ModuleList(nn.LSTM(D, D, batch_first=True) for _ in range(3))

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, list[Any]]:
        x, states = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            x, new = layer(x, None if state is None else state[i])
            states.append(new)
        return self.head(x), states


class Asks(nn.Module):
    """Helpers that ask what a layer is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, D), nn.Linear(D, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.applied(layer, x)
        return x

    def applied(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, nn.Linear) and x.dim() == 4:
            x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return torch.tanh(layer(x))


class Translator(nn.Module):
    """Sequence to sequence: recurrent networks with attention, token by token, the right one given."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(16, D), nn.Embedding(16, D)
        self.encoder = nn.GRU(D, D, batch_first=True)
        self.cell, self.combine = nn.GRUCell(D, D), nn.Linear(2 * D, D)
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, 16)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(source))
        state, outputs = state[0], []
        for step in range(target.shape[1]):
            state = self.cell(self.target(target[:, step]), state)
            weights = torch.bmm(memory, state.unsqueeze(2)).softmax(1)
            context = (weights * memory).sum(1)
            outputs.append(torch.tanh(self.combine(torch.cat([state, context], 1))))
        found: Tensor = self.out(self.norm(torch.stack(outputs, 1)))
        return found


class Speech(nn.Module):
    """Features of sounds and their lengths: convolutions, recurrent layers, and probabilities with shorter lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(D, D, 3, 2, 1), nn.GELU(), nn.Conv1d(D, D, 3, 1, 1), nn.GELU())
        self.rnn = nn.ModuleList(nn.GRU(D, D, batch_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 5)

    def forward(self, sounds: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(sounds.transpose(1, 2)).transpose(1, 2)
        lengths = torch.div(lengths + 1, 2, rounding_mode="floor")
        mask = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
        x = x * mask[..., None]
        for layer in self.rnn:
            x = x + layer(x)[0]
        return self.head(self.norm(x)).log_softmax(-1), lengths


class Dense(nn.Module):
    """As DenseNet: each layer takes all before."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(normed(3, 4), DenseBlock(4), normed(16, 8, 1), nn.AvgPool2d(2), DenseBlock(8))
        self.classifier = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.features(x), inplace=True)
        found: Tensor = self.classifier(torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1))
        return found


class DenseBlock(nn.ModuleDict):
    def __init__(self, width: int) -> None:
        super().__init__({f"layer{i}": normed(width + 4 * i, 4) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.items():
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class VGG(nn.Module):
    """A long sequence of layers, some in place."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, out in ((3, 4), (4, 8), (8, 8)):
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(32, D), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(D, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        found: Tensor = self.classifier(torch.flatten(x, 1))
        return found


class Inception(nn.Module):
    """As GoogLeNet: branches that are joined, and a second head that trains only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = normed(3, 4)
        self.branches = nn.ModuleList(nn.ModuleList([normed(width, 4, 1), normed(width, 4, 3)]) for width in (4, 8, 8))
        self.aux, self.fc = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x, aux = self.stem(x), None
        for i, branches in enumerate(self.branches):
            x = torch.cat([branch(x) for branch in branches], 1)
            if i == 1 and self.training:
                aux = self.aux(x.mean((2, 3)))
        out = self.fc(x.mean((2, 3)))
        return (out, aux) if self.training else out


class Segmentation(nn.Module):
    """As torchvision's DeepLab: a backbone that returns a dict, two heads, and their results in the size of images."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Features()
        self.classifier = nn.Sequential(normed(8, 8), nn.Conv2d(8, 2, 1))
        self.aux_classifier = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size, features, result = x.shape[-2:], self.backbone(x), {}
        for name, head in ("out", self.classifier), ("aux", self.aux_classifier):
            result[name] = F.interpolate(head(features[name]), size=size, mode="bilinear", align_corners=False)
        return result


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"stem": normed(3, 4), "aux": normed(4, 4, 3, 2), "out": normed(4, 8, 3, 2)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, layer in self.layers.items():
            x = layer(x)
            found[name] = x
        return found


class Squeezed(nn.Module):
    """As EfficientNet: expansion, a convolution by channels, weights for channels, a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = normed(3, 4), nn.Linear(4, 3)
        self.blocks = nn.Sequential(*(MBConv(4) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return found


class MBConv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.depthwise = normed(width, 2 * width, 1), normed(2 * width, 2 * width, groups=2 * width)
        self.reduce, self.excite = nn.Conv2d(2 * width, 2, 1), nn.Conv2d(2, 2 * width, 1)
        self.project = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(self.expand(x))
        h = h * self.excite(F.silu(self.reduce(F.adaptive_avg_pool2d(h, 1)))).sigmoid()
        h = self.project(h)
        h += x
        return h


class Swin(nn.Module):
    """Attention in windows that are shifted in every second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Conv2d(3, D, 2, 2), nn.LayerNorm(D), nn.Linear(D, 3)
        self.blocks = nn.ModuleList(Window(shift=i % 2) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x).mean((1, 2)))
        return found


class Window(nn.Module):
    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.norm = shift, nn.LayerNorm(D)
        self.qkv, self.proj, self.bias = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
        q, k, v = self.qkv(y).chunk(3, -1)
        y = self.proj((q @ k.transpose(1, 2) / c**0.5 + self.bias).softmax(-1) @ v)
        y = y.view(b, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(b, h, w, c)
        return x + torch.roll(y, (self.shift, self.shift), (1, 2))


class Twins(nn.Module):
    """As timm's Twins: places by a convolution between the first layer and the second, tokens and images in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Conv2d(3, D, 2, 2), nn.Conv2d(D, D, 3, padding=1, groups=D)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        size = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 0:
                image = x.transpose(1, 2).unflatten(2, size)
                x = (self.place(image) + image).flatten(2).transpose(1, 2)
        found: Tensor = self.head(x.mean(1))
        return found


class Ghost(nn.Module):
    """As GhostNet: half of the channels are made of the others, a gate of a smaller image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = normed(3, 4), nn.Linear(8, 3)
        self.primary = nn.ModuleList([normed(4, 4, 1), normed(8, 4, 1)])
        self.cheap = nn.ModuleList(normed(4, 4, groups=4) for _ in range(2))
        self.gate = nn.ModuleList([nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for primary, cheap, gate in zip(self.primary, self.cheap, self.gate, strict=True):
            weights = torch.sigmoid(gate(F.avg_pool2d(x, 2)))
            first = primary(x)
            x = torch.cat([first, cheap(first)], 1)[:, :8]
            x = x * F.interpolate(weights, size=x.shape[-2:], mode="nearest")
        found: Tensor = self.head(x.mean((2, 3)))
        return found


class HighResolution(nn.Module):
    """As HRNet: images of two sizes side by side, each of which takes from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.second = normed(3, 4), normed(4, 8, 3, 2)
        self.large, self.small = (nn.ModuleList(normed(width, width) for _ in range(2)) for width in (4, 8))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(2))
        self.down = nn.ModuleList(nn.Conv2d(4, 8, 3, 2, 1) for _ in range(2))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        b = self.second(a)
        for large, small, up, down in zip(self.large, self.small, self.up, self.down, strict=True):
            a, b = large(a), small(b)
            a, b = a + F.interpolate(up(b), scale_factor=2.0), F.relu(b + down(a))
        found: Tensor = self.head(torch.cat([a.mean((2, 3)), b.mean((2, 3))], 1))
        return found


class BareParameter(nn.Module):
    """A parameter of the model itself that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(D))
        self.a, self.b, self.c, self.d = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.d(self.c(x)) + self.bias
        found: Tensor = self.b(x + self.a(x * self.bias))
        return found


class Base(nn.Module):
    """Asks for its type, which a class of it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)))
        x = x * 2 if type(self) is Base else x * 3
        found: Tensor = self.d(torch.relu(self.c(x)))
        return found


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class OwnCheckpoints(nn.Module):
    """Keeps no activations of its layers, as its own forward says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return x


def both(one: Callable[[], Any], other: Callable[[], Any]) -> Any:
    (first, targets), (second, _) = one(), other()
    return (first, second), targets


def lengths() -> tuple[Tensor, Tensor]:
    return torch.tensor([5, 3, 4, 5, 2, 5, 4, 3]), torch.tensor(0.5).expand(8)


def graphs() -> tuple[Tensor, Tensor]:
    edges = torch.rand(8, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.5
    return (edges | edges.transpose(1, 2) | torch.eye(5, dtype=torch.bool)).float(), torch.tensor(0.5).expand(8)


def numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.tensor(0.5).expand(8)


def categories() -> tuple[Tensor, Tensor]:
    return torch.randint(16, (8, 3, 2), generator=torch.Generator().manual_seed(1)), torch.tensor(0.5).expand(8)


ORDINARY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "U-Net with skips": (UNet, images),
    "diffusion (x, t)": (Denoiser, lambda: both(images, lengths)),
    "Siamese, its encoder called twice": (Siamese, lambda: both(vectors, vectors)),
    "DLRM": (DLRM, lambda: both(numbers, categories)),
    "GCN with F.dropout(training=)": (GCN, lambda: both(vectors, graphs)),
    "nanoGPT, (logits, loss)": (NanoGPT, lambda: both(tokens, tokens)),
    "wrapper of a ResNet, a dict": (Wrapper, images),
    "VAE, a tuple": (VAE, lambda: both(vectors, vectors)),
    "experts with their loss": (Experts, vectors),
    "packed GRUs with lengths": (Packed, lambda: both(tokens, lengths)),
    "nn.Transformer": (Sequences, lambda: both(tokens, tokens)),
    "LSTMs that return their state": (Recurrent, tokens),
    "a helper that asks isinstance": (Asks, images),
    "type(self) through super()": (Derived, vectors),
    "sequence to sequence, by steps": (Translator, lambda: both(tokens, tokens)),
    "speech with lengths": (Speech, lambda: both(vectors, lengths)),
    "ResNet": (ResNet, images),
    "DenseNet": (Dense, images),
    "VGG": (VGG, images),
    "ViT": (Patches, images),
    "GoogLeNet with a second head": (Inception, images),
    "DeepLab, a dict": (Segmentation, images),
    "EfficientNet": (Squeezed, images),
    "Swin": (Swin, images),
    "Twins": (Twins, images),
    "GhostNet": (Ghost, images),
    "HRNet": (HighResolution, images),
    "assertions": (Asserts, tokens),
    "skips": (Skips, vectors),
    "nn.TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True), 4), vectors,
    ),
    "a size of activations": (SizeOfActivations, tokens),
    "a class of nn.Sequential": (lambda: Twofold(*(nn.Linear(D, D) for _ in range(4))), vectors),
    "a mask made once": (MaskMadeOnce, tokens),
    "a tied head, a scale": (Decoder, tokens),
    "a bare parameter read twice": (BareParameter, vectors),
    "its own checkpoints": (OwnCheckpoints, vectors),
}  # fmt: skip


def squares(output: Any, target: Tensor) -> tuple[Tensor, int]:
    """A loss of all that a model returns: its sum, and the number of samples."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum(((leaf - 0.5).square().mean() * len(target) for leaf in leaves), torch.zeros(())), len(target)
