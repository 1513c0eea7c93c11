"""What a user can fix: one exception per exit code, each carrying one clear message (the value, the limit, the fix)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from llmq.redact import redacted


class LlmqError(ValueError):
    """Base of everything that a command reports as one message without a traceback. `exit_code` is the shell's.

    A message has no secrets."""

    exit_code = 1

    def __init__(self, *about: object) -> None:
        super().__init__(*(redacted(one) if isinstance(one, str) else one for one in about))


class UsageError(LlmqError):
    """An unknown flag or key, a bad value, options that contradict each other, a device that is not there."""

    exit_code = 2


class DataError(LlmqError):
    """A data or model file that is absent, corrupt, or does not fit the run."""

    exit_code = 3


class MemoryLimitError(LlmqError):
    """The plan does not fit: says how many bytes are missing and which option helps, and below what takes how much.

    `args[0]` is the message alone, `requests` the table.
    """

    exit_code = 4

    def __init__(self, message: str = "", requests: str = "") -> None:
        super().__init__(message)
        self.requests = requests

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.requests}" if self.requests else str(self.args[0])


class RefusedMemoryError(MemoryLimitError):
    """Memory that was asked for is not given, though the plan fitted: `num_bytes`, None where a library does not say,
    in a `home` (device or host) of which `free_bytes` are left."""

    def __init__(
        self, message: str = "", *, home: str = "device", num_bytes: int | None = None, free_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.home, self.num_bytes, self.free_bytes = home, num_bytes, free_bytes


class NonFiniteError(LlmqError):
    """Loss, gradients or weights are not finite, or the loss keeps jumping: training cannot continue, or the result is
    not a model."""

    exit_code = 5


class RefusedStepError(NonFiniteError):
    """A step was not finite, and the run is to stop then: all ranks raise it before the step counts, and the steps
    before it are saved."""


class WorldError(LlmqError):
    """A rank of the run is missing, has ended or hangs: says which one, and where."""

    exit_code = 6


class StorageError(LlmqError):
    """The disk is full, not writable, or would lose something of value; or another run writes to the same place."""

    exit_code = 7


class PluginError(LlmqError):
    """A plug-in that is not imported or has failed: says which one, where and why."""

    exit_code = 8


@contextmanager
def all_problems() -> Iterator[list[str]]:
    """A list of problems, which are raised as one DataError at the end."""
    problems: list[str] = []
    yield problems
    if problems:
        raise DataError("\n".join(problems))


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Adds a DataError to `problems`, so that what follows is looked at too."""
    try:
        yield
    except DataError as error:
        problems.append(str(error))


INTERRUPTED = 130  # Ctrl-C: the step was ended and saved
TERMINATED = 75  # SIGTERM: the same, and the scheduler may start the job again (EX_TEMPFAIL)


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message on a name that is not there: the one that looks most like it."""
    near = get_close_matches(word, list(known), n=1)
    return f": did you mean {near[0]}?" if near else otherwise
