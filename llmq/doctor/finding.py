"""What a check finds, and how a check is run: in a thread with a time limit, and whatever it raises is a finding too.

A driver, a network file system or a name server that hangs takes its check with it, and no other.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from llmq.redact import redacted

OK, WARNING, FAULT = "ok", "warning", "fault"
ORDER = (OK, WARNING, FAULT)
BUG = "run llmq-doctor again, and report it if it stays"


@dataclass(frozen=True)
class Finding:
    """One line. A warning or a fault has how it `shows` in a run and its `fix`; `numbers` are what was measured, in the
    units that their names end in. `name` stays the same from version to version, with a GPU's number in it."""

    name: str
    value: str
    status: str = OK
    shows: str = ""
    fix: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.value, self.shows))) + (f": {self.fix}" if self.fix else "")


def worst(findings: list[Finding]) -> str:
    """The worst status of all."""
    return max((one.status for one in findings), key=ORDER.index, default=OK)


def bounded(name: str, check: Callable[[], Iterator[Finding]], limit_s: float) -> list[Finding]:
    """What a check finds within the limit; an error, or no end, is a fault after what it had found until then."""
    found: list[Finding] = []

    def work() -> None:
        try:
            found.extend(iter(check()))
        except Exception as error:
            about = redacted(" ".join(f"{type(error).__name__}: {error}".split()))
            found.append(Finding(name, about[:500], FAULT, "this check failed", BUG))

    thread = threading.Thread(target=work, name=f"llmq-doctor-{name}", daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(limit_s)
    if not thread.is_alive():
        return found
    waited = f"no answer within {time.monotonic() - began:.0f} s"
    return [*found, Finding(name, waited, FAULT, "a run that asks the same waits as well", BUG)]
