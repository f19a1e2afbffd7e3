"""Types and limits of the values of a configuration, as YAML and command lines have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, PlainSerializer, PlainValidator, WrapValidator
from pydantic_core import PydanticCustomError

from penstock.byte_sizes import size_of
from penstock.errors import ConfigError
from penstock.schedule.ir.in_flight_option import read_in_flight

MANY, MOST = 10**6, 1e12  # largest counts and numbers, far above what is of use
LONGEST = 1e7  # seconds, about four months
MOST_THREADS = 4096
MOST_DELAY = 10_000  # updates; so many versions of the weights are kept
RecomputeMode = Literal["none", "block", "stage"]


def _as_number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text; a number is meant where the field is one."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _as_bytes(value: Any) -> Any:
    """Numbers of bytes may have a unit."""
    if not isinstance(value, str):
        return value
    try:
        return size_of("", value)
    except ConfigError:
        raise PydanticCustomError("byte_size", "Input should be a size in bytes, such as 2e9 or 16GiB,") from None


def _as_delays(value: Any) -> Any:
    """Names of blocks may look like numbers; what the names and numbers mean is the runtime's business."""
    whole = {str(key): number for key, number in value.items()} if isinstance(value, dict) else value
    numbers = whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else [whole or 0]
    if not isinstance(whole, str) and not all(
        isinstance(n, int) and not isinstance(n, bool) and n <= MOST_DELAY for n in numbers
    ):
        raise PydanticCustomError(
            "delays", "Input should be a number, a list of numbers, {block: number, ...} or a profile such as 1f1b:8"
        )
    return whole


def _as_recompute(value: Any) -> Any:
    """One word for all stages, or a list with one for each."""
    words = get_args(RecomputeMode)
    if isinstance(value, str) and value in (*words, "auto"):
        return value
    if isinstance(value, list) and all(isinstance(each, str) and each in words for each in value):
        return value
    raise PydanticCustomError(
        "recompute", "Input should be none, block, stage or auto, or a list of the first three, one for each stage"
    )


def _as_offload(value: Any) -> Any:
    """One word for all stages that recompute nothing, or a list with one for each stage."""
    if all(each in ("none", "activations") for each in (value if isinstance(value, list) else [value])):
        return value
    raise PydanticCustomError("offload", "Input should be none or activations, or a list of these, one for each stage")


def _as_device(value: Any) -> Any:
    """Whether there is such a GPU is known where the ranks are."""
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", value, re.ASCII):
        return value
    raise PydanticCustomError("device", "Input should be auto, cpu, cuda, or one by its number, such as cuda:1")


def _as_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _as_options(value: Any, others: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Options of orders are whole numbers; microbatches in flight may be one for every rank, or a word."""
    if not isinstance(value, dict) or "in_flight" not in value:
        return others(value)
    found, given = others({name: number for name, number in value.items() if name != "in_flight"}), value["in_flight"]
    try:
        found["in_flight"] = read_in_flight(given) if isinstance(given, str) else given
    except ConfigError as error:
        raise PydanticCustomError("in_flight", "{why}", {"why": str(error)}) from None
    if isinstance(given, list | tuple):
        found["in_flight"] = tuple(given)  # their number is checked with that of the ranks
    elif not isinstance(given, str | int) or isinstance(given, bool):
        raise PydanticCustomError("in_flight", "in_flight takes a number, one for every rank, or auto")
    return found


Number = Annotated[float, BeforeValidator(_as_number), AllowInfNan(False)]
ByteSize = Annotated[float, BeforeValidator(_as_bytes), AllowInfNan(False)]
BlockDelays = Annotated[int | str | list[int] | dict[str, int] | None, PlainValidator(_as_delays)]
DeviceName = Annotated[str, PlainValidator(_as_device)]
RecomputeModes = Annotated[str | list[str], PlainValidator(_as_recompute)]
OffloadModes = Annotated[str | list[str], PlainValidator(_as_offload)]
OrderOptions = Annotated[dict[str, int], WrapValidator(_as_options), PlainSerializer(_as_plain)]


class Strict(BaseModel):
    """Refuses unknown keys and values of other types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
