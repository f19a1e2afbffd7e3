"""Stand-ins for weights that are not there, where somebody else than a pass could read them.

With weights as rows a stage is whole only between a gather and a release, and its memory is freed meanwhile: a tensor
on it would crash the process. So modules then have tensors on which every operation is an error with a name, and the
parameters that users may have kept from before the run have the right shape and are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import VersionError

_ALLOWED = frozenset(
    [
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "grad")
    ]
    + [Tensor.numel, Tensor.size, Tensor.dim]
)
"""What may be asked of an absent tensor."""


class AbsentWeight(Tensor):
    """A parameter that is not whole at the moment; `where` and `name` say which."""

    __slots__ = ("name_", "where_")  # apart from the attributes of the parameter, in `__dict__`

    where_: str
    name_: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse whatever needs its values.

        Raises:
            VersionError: always, but for its shape and the like.
        """
        if func in _ALLOWED:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        found = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, AbsentWeight))
        raise VersionError(
            f"{found.where_}: {found.name_} is not whole at the moment, only its rows of one pipeline are here, as it "
            "is sharded; read weights between two runs, or in a function given to on_update"
        )


def absent(like: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return stand-ins for the weights of a stage, by name."""
    found: dict[str, Tensor] = {}
    for name, tensor in like.items():
        stand_in = _nothing(tensor).as_subclass(AbsentWeight)
        stand_in.where_, stand_in.name_ = where, name
        with torch._C.DisableTorchFunctionSubclass():
            stand_in.requires_grad_()
        found[name] = stand_in
    return found


def hide(parameter: nn.Parameter) -> None:
    """Let a parameter have NaN for values, in no memory."""
    parameter.data = _nothing(parameter)


def _nothing(like: Tensor) -> Tensor:
    """Return a tensor of the same kind with one value for all elements: NaN."""
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(like.shape)
