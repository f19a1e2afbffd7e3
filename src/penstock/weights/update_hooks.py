"""Functions of the user that are called at every update of a stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from torch import Tensor

from penstock.errors import ConfigError, VersionError
from penstock.weights.memory.buffers import NOT_WHOLE
from penstock.weights.store import VersionStore

UpdateHook = Callable[[int, Mapping[str, Tensor]], object]
"""(number of the update, weights of a stage by name) -> nothing."""
SHOWN = "raised by a function given to on_update, which was shown"
UpdateHooks = OrderedDict[int, UpdateHook]


def call_hooks(hooks: UpdateHooks, update: int, store: VersionStore) -> None:
    """Show the newest weights of a stage to all hooks.

    Raises:
        ConfigError: one has written into them.
        VersionError: they are not whole, so that reading them would crash the process.
    """
    if store.master.epoch == NOT_WHOLE:
        raise VersionError(f"{store.where}: functions given to on_update are to be called while weights are not whole")
    for hook in tuple(hooks.values()):
        before = [flat._version for flat in store.master.flats]
        try:
            hook(update, {name: view.detach() for name, view in store.master.views.items()})
        except Exception as error:
            error.add_note(f"{SHOWN} update {update} of {store.where}")
            raise
        if [flat._version for flat in store.master.flats] != before:
            raise ConfigError(
                f"a function given to on_update has written into the weights of {store.where}, which passes may have "
                "read already; change weights in a step hook of the optimizer (register_step_post_hook), or between "
                "two runs"
            )
