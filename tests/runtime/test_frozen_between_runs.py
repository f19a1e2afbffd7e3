"""Parameters that are frozen or trained anew between two runs: a saved state goes on as in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from support.snapshots import Kept

GENERATOR = torch.Generator().manual_seed(2)
DATA = [(torch.randn(8, 4, generator=GENERATOR), torch.randn(8, 4, generator=GENERATOR)) for _ in range(6)]


class Product(nn.Module):
    """Shares its weight with another layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, value: Tensor) -> Tensor:
        return value @ self.weight


def make_blocks(frozen: Sequence[str]) -> list[nn.Module]:
    torch.manual_seed(1)
    first = nn.Linear(4, 8)
    middle = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
    blocks = [nn.Sequential(first, nn.Tanh()), middle, nn.Linear(8, 8), Product(first.weight)]
    freeze(blocks, frozen)
    return blocks


def freeze(blocks: list[nn.Module], frozen: Sequence[str]) -> None:
    for name, parameter in nn.ModuleList(blocks).named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def by_plain_torch(before: Sequence[str], after: Sequence[str], delay: int, microbatches: int) -> dict[str, Tensor]:
    """One optimizer before, and one after that has taken over the states of what both train."""
    blocks = make_blocks(before)
    model = nn.Sequential(*blocks)
    older: dict[str, Tensor] = {}
    state: dict[nn.Parameter, Any] = {}
    for frozen, data in ((before, DATA[:3]), (after, DATA[3:])):
        freeze(blocks, frozen)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = adamw(trained)
        optimizer.state.update({p: state[p] for p in trained if p in state})
        older = {name: older[name] for name, p in model.named_parameters() if p.requires_grad and name in older}
        for x, y in data:
            newest = {name: p.detach().clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                [p.copy_(older.get(name, p)) for name, p in model.named_parameters() if delay]
            optimizer.zero_grad()
            for part, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
                (F.mse_loss(model(part), target) / microbatches).backward()
            with torch.no_grad():
                [p.copy_(newest[name]) for name, p in model.named_parameters()]
            older = newest
            optimizer.step()
        state = dict(optimizer.state)
    return {name: p.detach() for name, p in nn.ModuleList(blocks).named_parameters(remove_duplicate=False)}


NONE: tuple[str, ...] = ()
SETS = {
    "train one": (["2.weight"], NONE),
    "freeze one": (NONE, ["2.weight"]),
    "train a stage and what is shared": (["0.", "1."], NONE),
    "freeze a stage and what is shared": (NONE, ["0.", "1."]),
    "exchange": (["1.0.weight", "2.weight"], ["1.0.bias", "2.bias"]),
    "as before": (["0.", "1."], ["0.", "1."]),
}


def sharded(level: str, method: str = "1f1b", **more: Any) -> dict[str, Any]:
    given = {"method": method, "microbatches": 2, "data_parallel": penstock.DataParallel(2, sharding=level)}
    return given | {"stages": 2} | more


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "depth 1 to 4": ({"stages": 1}, {"stages": 4}),
    "depth 4 to 2, 2bw": ({"stages": 4, "method": "2bw"}, {"stages": 2, "method": "2bw"}),
    "none to full": (sharded("none"), sharded("full")),
    "full to optimizer": (sharded("full"), sharded("optimizer", stages=4)),
    "gradients to none, 2bw": (sharded("gradients", "2bw"), {"stages": 4, "method": "2bw"}),
    "full to full, 2bw": (sharded("full", "2bw-layered:chunks=2"), sharded("full", "2bw-layered:chunks=2")),
}


def train_both(before: Sequence[str], after: Sequence[str], pair: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    """Train three batches, load the state into a Pipeline of other blocks, and train three more."""
    saved, pipeline = None, None
    for frozen, options, data in ((before, pair[0], DATA[:3]), (after, pair[1], DATA[3:])):
        given = {"method": "1f1b", "microbatches": 4, "loss": F.mse_loss, "optimizer": adamw} | options
        pipeline = penstock.Pipeline(make_blocks(frozen), **given)
        if saved is not None:
            pipeline.load(saved)
        list(pipeline.run(data))
        saved = Kept(pipeline.snapshots())
    return pipeline


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("which", SETS)
def test_what_is_trained_changes_between_two_runs(which: str, pair: str) -> None:
    before, after = SETS[which]
    found = train_both(before, after, PAIRS[pair]).full_state_dict()
    wanted = by_plain_torch(before, after, "2bw" in pair, 4)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"method": "2bw-ahead"}, {"ema_decay": 0.9}, {"max_grad_norm": 1.0}], ids=str
)
def test_options_that_keep_more_of_a_parameter_go_on(options: dict[str, Any]) -> None:
    """An average, a prediction or a master copy of a parameter that is trained anew begins with its value."""
    options = {"stages": 2} | options
    for before, after in SETS.values():
        pipeline = train_both(before, after, (options, options))
        assert pipeline.is_finite()
        assert pipeline.batches == 6


def test_settings_by_hand_hold_for_what_is_trained_anew() -> None:
    """It joins a group, of which the rate was set between two runs."""
    pipeline = penstock.Pipeline(
        make_blocks(["2.weight"]), "1f1b", stages=2, microbatches=4, loss=F.mse_loss, optimizer=adamw
    )
    list(pipeline.run(DATA[:1]))
    for optimizer in pipeline.optimizers().values():
        optimizer.param_groups[0]["lr"] = 5e-3
    list(pipeline.run(DATA[1:2]))
    other = penstock.Pipeline(make_blocks(NONE), "1f1b", stages=2, microbatches=4, loss=F.mse_loss, optimizer=adamw)
    other.load(Kept(pipeline.snapshots()))
    list(other.run(DATA[2:3]))
    assert [optimizer.param_groups[0]["lr"] for optimizer in other.optimizers().values()] == [5e-3, 5e-3]
