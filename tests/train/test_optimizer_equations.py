"""Adan, basis rotation and Muon against their equations."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.weights.optim.basis_rotation import BasisRotation
from penstock.weights.optim.directions import check_predictable, direction
from penstock.weights.optim.muon import Muon
from support.named_parameters import gradients, made, orthogonalised, run, some


@pytest.mark.slow
def test_adan_s_equations() -> None:
    """Xie et al., arXiv 2208.06677, Algorithm 1, with bias corrections and the proximal decay; m, v, n as there."""
    (name, p) = some(dtype=torch.float64)[0]
    b1, b2, b3 = 0.9, 0.92, 0.95
    w, m, v, n, last = p.detach().clone(), *(torch.zeros_like(p) for _ in range(3)), None
    optimizer = made("adan", [(name, p)])
    run(optimizer, [(name, p)], 6)
    for t, (g,) in enumerate(gradients([(name, p)], 6), 1):
        change = torch.zeros_like(g) if last is None else g - last
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * change
        n = b3 * n + (1 - b3) * (g + b2 * change) ** 2
        size = (n / (1 - b3**t)).sqrt() + 1e-8
        w = (w - 0.03 * (m / (1 - b1**t) + b2 * v / (1 - b2**t)) / size) / (1 + 0.03 * 0.2)
        last = g
    torch.testing.assert_close(p.detach(), w, rtol=1e-9, atol=1e-12)


def basis_by_hand(p: Tensor, found: list[Tensor], refresh: int, sides: tuple[bool, bool]) -> Tensor:
    """Algorithm 1 of arXiv 2602.03515 with eigenbases from an eigendecomposition, refreshed by power iteration."""
    lr, decay, b1, b2 = 0.03, 0.2, 0.9, 0.95
    w, m, s = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
    left, right = torch.zeros(len(p), len(p)).to(p), torch.zeros(p.shape[1], p.shape[1]).to(p)
    u, v = torch.eye(len(p)).to(p), torch.eye(p.shape[1]).to(p)
    for t, g in enumerate(found, 1):
        m = b1 * m + (1 - b1) * g
        left, right = b2 * left + (1 - b2) * (g @ g.T), b2 * right + (1 - b2) * (g.T @ g)
        if t == 1:
            u = torch.linalg.eigh(left).eigenvectors.flip(1) if sides[0] else u
            v = torch.linalg.eigh(right).eigenvectors.flip(1) if sides[1] else v
        elif t % refresh == 0:
            if sides[0]:
                order = sorted(range(len(p)), key=lambda i, u=u: -float(u[:, i] @ left @ u[:, i]))  # type: ignore[misc]
                u, s = torch.linalg.qr(left @ u[:, order]).Q, s[order]
            if sides[1]:
                order = sorted(range(p.shape[1]), key=lambda i, v=v: -float(v[:, i] @ right @ v[:, i]))  # type: ignore[misc]
                v, s = torch.linalg.qr(right @ v[:, order]).Q, s[:, order]
        s = b2 * s + (1 - b2) * (u.T @ g @ v) ** 2
        step = u @ ((u.T @ m @ v) / (s.sqrt() + 1e-8)) @ v.T
        w = w - lr * decay * w - lr * math.sqrt(1 - b2**t) / (1 - b1**t) * step
    return w


@pytest.mark.parametrize("number", [0, 1], ids=["wide", "high"])
@pytest.mark.parametrize("sides", ["both", "smaller"])
def test_basis_rotation_s_equations(sides: str, number: int) -> None:
    """In double precision; the matrices are 4 x 6 and 6 x 3, so the smaller side is the left one and the right one."""
    one = [some(dtype=torch.float64)[number]]
    start, found = one[0][1].detach().clone(), [g for (g,) in gradients(one, 23)]
    run(made("basis-rotation", one, refresh=5, sides=sides), one, 23)
    turned = (True, True) if sides == "both" else (number == 0, number == 1)
    torch.testing.assert_close(one[0][1].detach(), basis_by_hand(start, found, 5, turned), rtol=1e-8, atol=1e-10)
    other = basis_by_hand(start, found, 4, turned)
    assert (other - one[0][1].detach()).abs().max() > 1e-4  # the refresh matters


def test_basis_rotation_turns_with_the_problem() -> None:
    """Rotating a problem rotates what it does, as long as bases are true eigenbases: Adam does not do that."""
    g = torch.Generator().manual_seed(2)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q for n in (4, 3))
    start = torch.randn(4, 3, generator=g, dtype=torch.float64)
    found = [torch.randn(4, 3, generator=g, dtype=torch.float64) for _ in range(8)]
    ends = []
    for a, b in ((torch.eye(4).double(), torch.eye(3).double()), (u, v)):
        p = nn.Parameter(a @ start @ b.T)
        optimizer = BasisRotation([p], lr=0.1, refresh=4)
        for gradient in found:
            p.grad = a @ gradient @ b.T
            optimizer.step()
        ends.append(a.T @ p.detach() @ b)
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-8)


def test_basis_rotation_is_for_matrices() -> None:
    for shape in ((3,), (2, 2, 2)):
        with pytest.raises(ConfigError, match="needs real matrices, not a parameter of shape"):
            BasisRotation([nn.Parameter(torch.zeros(shape))])
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        BasisRotation([nn.Parameter(torch.zeros(2, 2))], refresh=0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)], ids=str)
@pytest.mark.parametrize(("kind", "near"), [(torch.optim.Muon, 2e-2), (Muon, 1e-5)], ids=["torch's", "in float32"])
def test_muon_s_direction(kind: Any, near: float, shape: tuple[int, int], adjust: str, nesterov: bool) -> None:
    """The iteration by hand, up to its precision; it is the step of Muon if the next gradient is its momentum."""
    g = torch.Generator().manual_seed(3)
    p = nn.Parameter(torch.zeros(shape))
    optimizer = kind([p], lr=0.5, weight_decay=0.0, momentum=0.8, nesterov=nesterov, adjust_lr_fn=adjust)
    momentum = torch.zeros(shape, dtype=torch.float64)
    check_predictable(optimizer)
    assert direction(optimizer, p, optimizer.param_groups[0]) is None
    for _ in range(4):
        p.grad = torch.randn(shape, generator=g)
        momentum = 0.8 * momentum + 0.2 * p.grad.double()
        optimizer.step()
    found = direction(optimizer, p, optimizer.param_groups[0])
    assert found is not None
    assert found.dtype == torch.float32
    rows, columns = shape
    factor = math.sqrt(max(1, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(shape))
    wanted = factor * orthogonalised(momentum)
    assert (found - wanted).abs().max() < near * factor
    assert torch.equal(found, direction(optimizer, p, optimizer.param_groups[0], uncorrected=True))  # type: ignore[arg-type]
    p.grad = optimizer.state[p]["momentum_buffer"].clone()
    p.data.zero_()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    torch.testing.assert_close(p.detach(), -found, rtol=near, atol=near * factor)


def stepped(kind: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a wide and a tall matrix after three steps with weight decay and another rate in the second group."""
    g = torch.Generator().manual_seed(4)
    pair = [nn.Parameter(torch.randn(shape, generator=g)) for shape in ((6, 17), (12, 3))]
    optimizer = kind([{"params": pair[:1]}, {"params": pair[1:], "lr": 0.2}], lr=0.5, weight_decay=0.3, **settings)
    for _ in range(3):
        for p in pair:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    return pair[0].detach(), pair[1].detach()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_in_bfloat16_is_torch_s(nesterov: bool, adjust: str) -> None:
    settings = {"momentum": 0.8, "nesterov": nesterov, "adjust_lr_fn": adjust}
    wanted = stepped(torch.optim.Muon, **settings)
    for found, torch_s in zip(stepped(Muon, ns_dtype="bfloat16", **settings), wanted, strict=True):
        assert torch.equal(found, torch_s)
    for found, torch_s in zip(stepped(Muon, **settings), wanted, strict=True):
        assert not torch.equal(found, torch_s)  # in float32 on a CPU
        torch.testing.assert_close(found, torch_s, rtol=0.05, atol=0.05)


def test_muon_goes_on_from_the_state_of_torch_s_in_the_precision_chosen() -> None:
    def made(kind: Any, **settings: Any) -> Any:
        return kind([nn.Parameter(torch.eye(2, 3))], 0.25, **settings)

    saved = made(torch.optim.Muon, momentum=0.5).state_dict()
    for chosen in ("float32", "bfloat16", None):
        optimizer = made(Muon, ns_dtype=chosen)
        optimizer.load_state_dict(saved)
        (group,) = optimizer.param_groups
        assert (group["ns_dtype"], group["momentum"], group["lr"]) == (chosen, 0.5, 0.25)
        other = made(Muon)
        other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["ns_dtype"] == chosen
        copied = pickle.loads(pickle.dumps(optimizer))
        assert copied.param_groups[0]["ns_dtype"] == chosen


def test_muon_refuses_other_precisions() -> None:
    matrix = nn.Parameter(torch.eye(2))
    with pytest.raises(ConfigError, match="ns_dtype of Muon must be 'float32', 'bfloat16' or None; got 'float16'"):
        Muon([matrix], ns_dtype="float16")
    with pytest.raises(ConfigError, match=r"got torch\.float32"):
        Muon([{"params": [matrix], "ns_dtype": torch.float32}])


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_muon_leaves_a_momentum_in_bfloat16_as_it_is(ns_dtype: str) -> None:
    matrix = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    matrix.grad = torch.tensor([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]], dtype=torch.bfloat16)
    optimizer = Muon([matrix], momentum=0.5, nesterov=False, ns_dtype=ns_dtype)
    optimizer.step()
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], matrix.grad / 2)
