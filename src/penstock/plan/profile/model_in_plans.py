"""The model of a plan in its file: the keys that train it, or one with which no other is trained in its place."""

from __future__ import annotations

from typing import Any

from penstock.plan.profile.schema import BY_FORMULAS, Profile

_NAMED = 4  # of frozen blocks


def model_settings(profile: Profile) -> dict[str, Any]:
    """Return the keys of `penstock train` for the model; where it has no such model, its name, which it refuses."""
    trained = {} if profile.freezes else dict(profile.settings)  # penstock train freezes nothing
    return trained or {"model": {"planned": profile.name}}


def said_of_model(profile: Profile) -> list[str]:
    """Return what the file of a plan says of its model, its data and its optimizer."""
    said = [f"profile: {' '.join(profile.source.split())}"] if profile.source else []
    if profile.freezes:
        names = [layer.name for layer in profile.layers if not layer.trained]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return [
            *said,
            "penstock train trains all parameters, but these blocks were planned frozen: "
            f"{', '.join(names[:_NAMED])}{more}",
            "divide the model in Python, with requires_grad_(False) on their parameters",
        ]
    if not profile.settings:
        return [
            *said,
            "penstock train does not know the model: set model.layers, model.width, .. of a GPT with as many blocks as",
            "balance adds up to; or divide blocks of your own in Python; data and optimizer are yours to set, too",
        ]
    if profile.source.startswith(BY_FORMULAS):
        return [*said, "for the model whose shape was planned; data and optimizer are yours to set"]
    return [*said, "for the model, the data and the optimizer that were profiled"]
