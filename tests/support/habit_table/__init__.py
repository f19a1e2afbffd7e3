"""The habits, by section; importing this enters them all into `support.habits.HABITS`."""

from support.habit_table import (
    caches_and_hooks,
    data_and_losses,
    in_the_loop,
    kept_state,
    modules,
    optimizers,
    randomness_and_gradients,
    rarer_losses_and_batches,
    tensors,
)

__all__ = [
    "caches_and_hooks",
    "data_and_losses",
    "in_the_loop",
    "kept_state",
    "modules",
    "optimizers",
    "randomness_and_gradients",
    "rarer_losses_and_batches",
    "tensors",
]
