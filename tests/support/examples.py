"""How many examples tests of properties try: all of theirs, or a fifth under `make test`."""

from hypothesis import settings

ALL = 100  # what hypothesis tries where nothing is said


def examples(number: int) -> int:
    """What of so many examples is tried under the profile that is loaded."""
    return max(1, number * settings.default.max_examples // ALL)
