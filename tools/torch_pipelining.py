"""Tries torch.distributed.pipelining on ordinary models: `PYTHONPATH=tests python -m tools.torch_pipelining`.

`pipeline()` exports each model as it is, with split points at the beginnings of the three later stages that Penstock
would have; the joined stages are compared with the model, output and gradients. `--out FILE` keeps the results.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils._pytree import tree_map

from penstock.partition.blocks import cut_blocks
from penstock.partition.replay.model_stages import UnitBlocks
from support.ordinary_models import ORDINARY, squares

STAGES = 4


def taken(model: nn.Module, inputs: Any, targets: torch.Tensor) -> str:
    """Say what `pipeline()` makes of a model."""
    blocks = UnitBlocks(copy.deepcopy(model), inputs, STAGES)
    parts = cut_blocks(blocks, STAGES)
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    plain = copy.deepcopy(model)
    wanted, _ = squares(plain(*copy.deepcopy(given)), targets)
    wanted.backward()
    try:
        pipe = pipeline(model, given, split_spec={names[0]: SplitPoint.BEGINNING for names in parts[1:]})
        found, _ = squares(fx.Interpreter(pipe.split_gm).run(*given), targets)
        found.backward()
    except Exception as error:  # whatever export says
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return f"refused ({type(error).__name__}: {re.sub('/[^ ]*/', '', lines[0]).strip():.110})"
    if pipe.num_stages != STAGES:
        return f"{pipe.num_stages} of {STAGES} stages"
    parameters = list(pipe.split_gm.named_parameters())
    names: dict[int, set[str]] = {}
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    copies = False
    for name, parameter in plain.named_parameters():
        own = [p for n, p in parameters if re.sub(r"^submod_(pp_)?\d+[.]", "", n) in names[id(parameter)]]
        gradients = [p.grad for p in own if p.grad is not None]
        copies |= len(gradients) > 1
        total = sum(gradients) if gradients else torch.zeros_like(parameter)
        if parameter.grad is not None and not torch.allclose(parameter.grad, total, rtol=1e-9):
            return f"another gradient of {name}"
    if copies:
        return "exact, if gradients of shared weights are added by hand"
    return "exact" if torch.allclose(wanted, found, rtol=1e-12) else "another output"


def main() -> None:
    """Try all models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for the results")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    found = {}
    for kind, (make, data) in ORDINARY.items():
        inputs, targets = tree_map(lambda t: t.double() if t.is_floating_point() else t, data())
        torch.manual_seed(0)
        found[kind] = taken(make().double(), inputs, targets)
        sys.stdout.write(f"{kind}: {found[kind]}\n")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
