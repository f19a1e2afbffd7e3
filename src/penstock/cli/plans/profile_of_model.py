"""The profile of the model that a command is told of: read from a file, or by formulas for a name or a shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checks import check_whole, did_you_mean, in_words
from penstock.cli.options import whole_numbers
from penstock.cli.plans.plan_devices import clusters_of
from penstock.errors import ConfigError
from penstock.models.gpt_shape import PRESETS

if TYPE_CHECKING:
    from penstock.plan.cluster.schema import Cluster
    from penstock.plan.profile.schema import Profile
    from penstock.plan.scale.model_shape import ModelShape

WORDS = ("layers", "hidden", "sequence", "vocabulary")
"""What a shape has to say; `heads` may be left out."""
_EXAMPLE = "layers=24,hidden=2048,sequence=2048,vocabulary=51200"
_SIZES = (1, 2, 4)  # samples per microbatch
_HEAD = 128  # the size of a head where their number is not given


def planned_profile(
    profile: Path | None,
    model: str | None,
    sizes: str | None,
    cluster: str | None,
    devices: str | None,
    bandwidth: str | None,
    measured: bool,
) -> tuple[Profile, list[Cluster]]:
    """Return the profile to plan for, from a file or by formulas, and the clusters.

    Args:
        profile: its file.
        model: of which one is made for the devices of the first cluster.
        sizes: samples per microbatch, of a model.
        cluster, devices, bandwidth: of the devices, as options say it.
        measured: as of `cluster_named`.

    Raises:
        ConfigError: options are missing, all of which the message names; or some do not go together.
    """
    from penstock.plan.profile.files import read_profile

    if model is None:
        if sizes is not None:
            raise ConfigError("--microbatch-sizes is for --model; a profile has sizes of its own, so leave it out")
        known = None if profile is None else read_profile(profile)
        _check_all_given(known, cluster, devices, bandwidth)
        assert known is not None
        return known, clusters_of(cluster, measured)
    if profile is not None:
        raise ConfigError("--profile and --model both say what is planned for; give one of them")
    if cluster is None:
        raise ConfigError(
            "--model needs --cluster, whose devices formulas count with, as in --model 1.3b --cluster h100; for this "
            "machine measure instead: penstock profile --out mine.yaml, then penstock plan --profile mine.yaml"
        )
    shape, wanted, clusters = model_named(model), microbatch_sizes(sizes, _SIZES), clusters_of(cluster, measured)
    return profile_by_formulas(shape, clusters[0], wanted), clusters


def _check_all_given(known: Profile | None, cluster: str | None, devices: str | None, bandwidth: str | None) -> None:
    """Refuse to plan where options are missing that say for what.

    Raises:
        ConfigError: some are; the message names all of them.
    """
    given = {
        "--profile FILE": known is not None,
        "--devices N": devices is not None or cluster is not None,
        "--bandwidth B": bandwidth is not None or cluster is not None or (known is not None and bool(known.links)),
    }
    lacking = [option for option, is_there in given.items() if not is_there]
    if known is None or not given["--devices N"]:
        raise ConfigError(
            f"plan needs {' and '.join(lacking)} (no bandwidth where the profile has measured links, or for one "
            "device). First penstock profile --out mine.yaml, then penstock plan --profile mine.yaml --devices 4; or "
            "by formulas, without a profile: penstock plan --model 1.3b --cluster h100 --devices 16"
        )


def model_named(model: str) -> ModelShape:
    """Return the shape of a preset of the built-in GPT, or the one that is written out.

    Raises:
        ConfigError: it is neither.
    """
    from penstock.plan.scale.model_shape import ModelShape

    if model in PRESETS:
        of = PRESETS[model]
        return ModelShape(model, of.layers, of.width, of.context, of.heads, vocabulary=of.vocabulary)
    if "=" not in model:
        raise ConfigError(
            f"--model takes {in_words(PRESETS)}, or a shape as in {_EXAMPLE}, got {model!r:.80}."
            f"{did_you_mean(model, PRESETS)}"
        )
    return shape_of_numbers(_numbers_in(model), "--model needs {}, too, as in " + _EXAMPLE)


def _numbers_in(model: str) -> dict[str, int]:
    """Read the numbers of a shape.

    Raises:
        ConfigError: a word is unknown or stands twice, or its value is no number.
    """
    found, known = dict[str, int](), (*WORDS, "heads")
    for part in model.split(","):
        word, _, value = (each.strip() for each in part.partition("="))
        if word not in known:
            raise ConfigError(
                f"--model: a shape has {in_words(known, 'and')}, got {word!r:.80}.{did_you_mean(word, known)}"
            )
        if word in found:
            raise ConfigError(f"--model gives {word} twice; leave one out")
        (found[word],) = whole_numbers(f"--model: {word}", value)
    return found


def shape_of_numbers(numbers: Mapping[str, int | None], lacking: str, name: str | None = None) -> ModelShape:
    """Return the shape that some numbers describe.

    Args:
        numbers: by word; None where one is not given.
        lacking: what to say where some are missing, with {} in place of their words.
        name: of the model; its layers and hidden size if None.

    Raises:
        ConfigError: a number is missing, or out of its range.
    """
    from penstock.plan.scale.model_shape import ModelShape

    given = [numbers.get(word) for word in WORDS]
    missing = [word for word, number in zip(WORDS, given, strict=True) if number is None]
    if missing:
        raise ConfigError(lacking.format(", ".join(missing)))
    layers, hidden, sequence, vocabulary = (number or 0 for number in given)
    check_whole("vocabulary", vocabulary, 2)
    heads = numbers.get("heads")
    heads = _heads_of(hidden) if heads is None else heads
    return ModelShape(name or f"{layers} x {hidden}", layers, hidden, sequence, heads, vocabulary=vocabulary)


def _heads_of(hidden: int) -> int:
    """Return how many heads a hidden size has: the most of at least `_HEAD` that have whole pairs of entries."""
    most = max(hidden // _HEAD, 1)
    return next((count for count in range(most, 0, -1) if hidden % (2 * count) == 0), most)


def microbatch_sizes(text: str | None, default: Sequence[int]) -> list[int]:
    """Return the samples of a microbatch that a profile by formulas has numbers for.

    Raises:
        ConfigError: they are no whole numbers above 0.
    """
    found = list(default) if text is None else sorted(set(whole_numbers("--microbatch-sizes", text)))
    check_whole("--microbatch-sizes", found[0])
    return found


def profile_by_formulas(shape: ModelShape, cluster: Cluster, sizes: Sequence[int]) -> Profile:
    """Return the profile of a shape on the devices of a cluster, with the keys that train it where the GPT can be such.

    Raises:
        ConfigError: there are too many layers.
    """
    from penstock.plan.scale.analytic_profile import analytic_profile

    found = analytic_profile(shape, cluster, sizes)
    if not (why := _no_gpt(found)):
        return found
    said = f"{found.source}; not a GPT that penstock train has: {why}"
    return found.model_copy(update={"settings": {}, "source": said})


def tokens_of_sample(profile: Profile) -> int | None:
    """Return the tokens of a sample; None for a model that `penstock train` does not have."""
    from penstock.train.config.load import validate_config
    from penstock.train.setup.model_shape import shape_of

    try:
        return shape_of(validate_config(dict(profile.settings))).context if profile.settings else None
    except ConfigError:  # settings that somebody has written
        return None


def _no_gpt(profile: Profile) -> str:
    """Return why `penstock train` cannot train what a profile is of; nothing if it can."""
    from penstock.train.config.load import validate_config
    from penstock.train.setup.model_shape import shape_of

    if not profile.settings:
        return "it has another MLP"
    try:
        shape_of(validate_config(profile.settings))
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""
