"""What an optimizer is to the rest of llmq: the states that it keeps, and the op that updates a row with them.

Stores hold these states beside the masters. Their dtypes, the allocator table, offloading, checkpoints, bytes on the
host and what would make a run fit follow from a rule's `states`; nothing else lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from llmq.tensor import Form, Ref

MASTER = "master"  # the space of the parameters that an optimizer updates
State = Mapping[str, Ref]  # what is kept of a row, or of a part of it, by space: its master first, then a rule's states


@dataclass(frozen=True)
class StateKind:
    """A number that a rule keeps for each number of a parameter.

    `name` is the space of its storages, and names its options: `m` has --opt-m-dtype and --offload-opt-m. `title` is
    its category in the allocator table. In 8 bits it has a scale for each 128 numbers of a row; one without a sign is
    then held by its root (`is_root`).
    """

    name: str
    title: str
    is_root: bool = False

    def form(self, dtype: str) -> Form | None:
        """The form that it is held in; None for a dtype that needs no scales."""
        codes = {"e4m3": "e4m3", "int8": "uint8" if self.is_root else "int8"}
        return Form(codes[dtype], "row", "blocks") if dtype in codes else None

    @property
    def narrow(self) -> tuple[str, str]:
        """The dtypes that are suggested where memory is short, in 2 bytes and in 1: a root needs e4m3's range."""
        return "bf16", "e4m3" if self.is_root else "int8"


class Rule(Protocol):
    """A frozen dataclass of an optimizer's constants. `weight_decay` is that of rows which decay."""

    @property
    def weight_decay(self) -> float: ...

    @property
    def states(self) -> tuple[StateKind, ...]:
        """What it keeps beside the masters, in the order of its op."""

    def identity(self) -> dict[str, Any]:
        """What a checkpoint has in common with the run that continues it, by option; constants may change."""

    def update(self, ops: Any, state: State, weight: Ref | None, grad: Ref, step: tuple[Ref, ...], **row: Any) -> None:
        """One call: a piece of a row's state, and the copies of its weight, <- the state and its gradient.

        `step` is scale, apply, learning rate and number of the step, as (1,) cells; `row` are weight_decay, and what
        says how the row is rounded (seed, stream, first) and how fast it learns (rate).
        """


def spaces(rule: Rule) -> tuple[str, ...]:
    """The spaces of all that is kept of a row, in the order of `State`."""
    return (MASTER, *(kind.name for kind in rule.states))


def kept(rule: Rule) -> str:
    """What an error says of a rule's states."""
    names = " and ".join(f"{kind.name} ({kind.title})" for kind in rule.states)
    return f"the optimizer keeps {names or 'nothing but the master weights'}"


def narrower(rule: Rule, num_bytes: int) -> dict[str, str]:
    """Dtypes of 2 bytes or of 1 for the states of a rule, by name."""
    return {kind.name: kind.narrow[2 - num_bytes] for kind in rule.states}


def dtype_flags(dtypes: Mapping[str, str]) -> str:
    """Dtypes of states as they are typed: `--opt-m-dtype bf16 --opt-v-dtype bf16`."""
    return " ".join(f"--opt-{name}-dtype {dtype}" for name, dtype in dtypes.items())


def dtype_option(state: str) -> str:
    """The key of the option for a state's dtype."""
    return f"opt_{state}_dtype"


def offload_option(state: str) -> str:
    """The key of the option that keeps a state, or the masters, in host memory."""
    return f"offload_{state}" if state == MASTER else f"offload_opt_{state}"
