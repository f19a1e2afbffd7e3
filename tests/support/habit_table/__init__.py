"""The habits, by section; importing this enters them all into `support.habits.HABITS`."""

from support.habit_table import (
    data_and_losses,
    in_the_loop,
    kept_state,
    modules,
    optimizers,
    randomness_and_gradients,
    tensors,
)

__all__ = [
    "data_and_losses",
    "in_the_loop",
    "kept_state",
    "modules",
    "optimizers",
    "randomness_and_gradients",
    "tensors",
]
