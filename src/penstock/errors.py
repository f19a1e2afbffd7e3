"""The exceptions that Penstock raises for mistakes that a user can correct.

Every message says what is wrong, where (config key, rank, stage, microbatch), the numbers, and what to do.
`assert` is kept for our own bugs.
"""

import signal


class PenstockError(Exception):
    """Base class of all errors that Penstock raises on purpose.

    Attributes:
        hint: advice that the command line prints below the message.
    """

    hint: str = ""


class ConfigError(PenstockError, ValueError):
    """A configuration value is unknown, of the wrong type, or cannot be combined with another one."""


class DataError(PenstockError, ValueError):
    """The training data is missing, unreadable, too short, or differs between ranks."""


class ScheduleError(PenstockError, ValueError):
    """A schedule cannot be parsed, built, or proven."""


class DeadlockError(ScheduleError):
    """Some ranks of a schedule would wait for ever.

    Attributes:
        waits: who waits for what, without advice.
    """

    def __init__(self, waits: str) -> None:
        advice = "\nrun what one rank waits for earlier on the rank that it comes from"
        waits = waits.removesuffix(advice)  # where it is raised again with more words before it
        super().__init__(waits + advice)
        self.waits = waits


class VersionError(PenstockError, RuntimeError):
    """A pass tried to read weights that are not, or are no longer, the version that the schedule names."""


class TransportError(PenstockError, RuntimeError):
    """A message did not arrive, arrived late, or is not the one that the schedule names."""


class CheckpointError(PenstockError, RuntimeError):
    """Saved weights are missing, incomplete, or do not fit the model."""


class CapabilityError(PenstockError, RuntimeError):
    """An optimizer, block or backend cannot do what the method needs."""


class WorkerError(PenstockError):
    """A worker process of the job failed with an error.

    Attributes:
        trace: the traceback of the first worker that failed.
    """

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class UnsavedRunError(PenstockError):
    """A run has ended and its weights are saved, but none of its checkpoints could be written."""


class EndedError(PenstockError):
    """A signal told this worker to stop: because another worker failed, or from outside the job."""


class InterruptedRunError(PenstockError):
    """A second signal stopped the job at once; all worker processes are gone.

    Attributes:
        signal: the second signal.
    """

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"{self.signal.name} has ended the run at once")
