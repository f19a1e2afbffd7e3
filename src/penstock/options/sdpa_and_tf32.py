"""Settings of torch that choose kernels, made while passes run and taken back in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.errors import ConfigError

SdpaName = Literal["flash", "efficient", "cudnn", "math"]
_Step = TypeVar("_Step")


@dataclass(frozen=True)
class Kernels:
    """Settings of torch that hold for a whole process: they are made while passes run, and taken back in between.

    Attributes:
        tf32: whether GPUs may round the factors of float32 products to 10 bits of mantissa, in matrix products,
            convolutions and recurrent layers (`torch.backends.cuda.matmul.fp32_precision` and its like); None leaves
            that as it is.
        sdpa: the one backend of `torch.nn.functional.scaled_dot_product_attention` that is allowed; None leaves the
            choice to torch.
    """

    tf32: bool | None = None
    sdpa: SdpaName | None = None

    def check(self) -> None:
        """Refuse what is no such setting.

        Raises:
            ConfigError: it is none.
        """
        if self.tf32 is not None and not isinstance(self.tf32, bool):
            raise ConfigError(f"tf32 must be True, False, or None (as torch is set); got {self.tf32!r:.80}")
        if self.sdpa is not None and self.sdpa not in get_args(SdpaName):
            raise ConfigError(
                f"sdpa must be one of {', '.join(get_args(SdpaName))}, or None (torch chooses); got {self.sdpa!r:.80}"
            )

    def check_device(self, device: torch.device) -> None:
        """Refuse what a device does not have.

        Raises:
            ConfigError: the backend is one of GPUs, and the device is the CPU.
        """
        if device.type == "cpu" and self.sdpa in ("efficient", "cudnn"):
            raise ConfigError(f"sdpa={self.sdpa} is a backend of GPUs, but ranks compute on the CPU; use flash or math")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the settings, and take them back at the end."""
        with ExitStack() as stack:
            if self.sdpa is not None:
                stack.enter_context(sdpa_kernel(_BACKENDS[self.sdpa]))
            if self.tf32 is not None:
                stack.enter_context(_float32_products("tf32" if self.tf32 else "ieee"))
            yield

    def during(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        """Return an iterator that makes the settings while it works, not while its caller does."""
        return steps if self == Kernels() else self._each(steps)

    def _each(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        while True:
            with self.applied():
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step


_BACKENDS = MappingProxyType(
    {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
)


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Meanwhile GPUs take the factors of float32 products in this precision: "ieee" or "tf32"."""
    backends: Any = torch.backends  # their attributes are made when they are looked up
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = precision
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
