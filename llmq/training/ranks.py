"""This process among the ranks of a run: it joins them, agrees with them, and is watched with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from llmq.comm.environment import TRAIN, WATCHDOG_S, gpu_index, recognised, starts_ranks, watchdog_s
from llmq.comm.world import ALONE, World
from llmq.errors import UsageError
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.options.field import flag
from llmq.options.parse import Options, shown
from llmq.plan import levels

if TYPE_CHECKING:
    from llmq.comm.environment import Place
    from llmq.comm.membership import Membership
    from llmq.comm.store import Beat

Result = TypeVar("Result")
OF_ONE_RANK = ("device", "gpu", "gpus", "verbosity")  # options in which ranks may differ
RESTARTING = ("--gpus", "llmq-launch")  # launchers that know --restart-failed


class Ranks:
    """The ranks of a run as this one sees them. `said` is a line on who started them, `device` this rank's own, `start`
    and `again` as of a Place, and `can_restart` whether what started them starts a lost one again.

    A dry run is alone, and plans as the first of this many ranks (`planned`).
    """

    def __init__(
        self,
        world: World = ALONE,
        said: str = "",
        device: Device | None = None,
        *,
        start: tuple[str, ...] = TRAIN,
        again: bool = False,
        planned: int | None = None,
        can_restart: bool = False,
    ) -> None:
        self.world, self.said, self.device = world, said, device
        self.start, self.again, self.can_restart = start, again, can_restart
        self.rank, self.size = world.rank, planned or world.size
        self.step = 0  # that this rank is in
        self.shared: Mapping[str, Any] = {}  # by the first rank, of what it found and chose for all
        self.on_lost: Callable[[str], None] = lambda lost: None  # the last that this rank does
        self._watched: Membership | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints, and writes what there is once."""
        return self.rank == 0

    def agreed(self, value: Result) -> Result:
        """What the first rank gives; what JSON can hold."""
        return value if self.world.size == 1 else self.world.gather(value if self.is_first else None)[0]

    def all_of(self, value: Result) -> list[Result]:
        """What each rank gives, in order; what JSON can hold."""
        return [value] if self.world.size == 1 else self.world.gather(value)

    def agreed_array(self, array: np.ndarray | None) -> np.ndarray:
        """The array that the first rank gives."""
        about = self.agreed(None if array is None else (array.shape, array.dtype.name))
        assert about is not None
        found, none = np.empty(*about), np.empty(0, np.uint8)
        sent = none if array is None else np.ascontiguousarray(array)
        self.world.exchange([sent] * self.size, [found, *[none] * (self.size - 1)])
        return found

    def check_same(self, options: Options) -> None:
        """UsageError, on all ranks, that names the options that one of them has and the first one has not."""
        mine = {key: value for key, value in options.to_flat().items() if key not in OF_ONE_RANK}
        first, *others = self.all_of(mine)
        for rank, other in enumerate(others, 1):
            different = [key for key in first if other.get(key) != first[key]]
            if different:
                given = ", ".join(f"{flag(key)} {shown(other.get(key))} ({shown(first[key])})" for key in different)
                raise UsageError(
                    f"rank {rank} was started with other options than rank 0, whose are in brackets: {given}: start "
                    "all ranks with the same"
                )

    def in_turn(self, work: Callable[[], Result], tell: Callable[[Result], Mapping[str, Any]]) -> Result:
        """What `work` returns, which the first rank does alone before the others do.

        They find its caches, and in `shared` what it tells of its result.
        """
        if self.world.size == 1:
            return work()
        with self.long("waiting for its turn"):
            if self.is_first:
                result = work()
                self.shared = tell(result)
            self.shared = self.agreed(self.shared)
            if not self.is_first:
                result = work()
            self.world.gather(None)
        return result

    def long(self, what: str) -> AbstractContextManager[None]:
        """Around what may take longer than the others would wait for a rank that computes."""
        return nullcontext() if self._watched is None else self._watched.long(what)

    @contextmanager
    def watched(self, folder: Path, patience: float = WATCHDOG_S) -> Iterator[None]:
        """Within, a rank that is lost is found in `patience` seconds, and all end and say so, `on_lost` in the log.

        Python stacks go to a file in `folder`. Ranks that are threads have no store, and are not watched.
        """
        member = getattr(self.world, "membership", None)
        if member is None:
            yield
            return
        stacks = folder / f"rank-{self.rank:05}-stacks.txt"
        with member.watched(
            self._beat, stacks, patience=patience, on_lost=lambda lost: self.on_lost(lost)
        ) as self._watched:
            yield

    def _beat(self) -> Beat:
        from llmq.comm.store import Beat

        progress = getattr(self.world, "progress", None)
        collective, count = progress() if progress is not None else ("", 0)
        return Beat(self.step, collective, count)


@contextmanager
def joined(options: Options, place: Place | None = None) -> Iterator[Ranks]:
    """The ranks of the run that this process is one of, as the one at `place`, or by the variables of what started it;
    alone without any.

    UsageError for variables that contradict each other or `--gpus`, for other options than other ranks have, and where
    several processes are asked for, which are the caller's to start. WorldError where ranks do not come.
    """
    if options.to_flat()["dry_run"]:
        size, where = device.planned_gpus(options.system), device.pick_device(options.system)
        yield Ranks(device=replace(where, num_sharing=size), planned=size, can_restart=size > 1)
        return
    gpus = options.to_flat()["gpus"]
    place = place or recognised(os.environ, gpus)
    if starts_ranks(options.to_flat()["launcher"], place, gpus):
        asked = f"--gpus {gpus}" if gpus != 1 else "--launcher ray"
        raise UsageError(
            f"{asked} needs several processes, and this is one alone: llmq-train and llmq.train() start them, as do "
            "llmq-launch, torchrun, srun and mpirun"
        )
    if place is None:
        yield Ranks()
        return
    about: dict[str, Any] = {"start": place.start, "again": place.again, "can_restart": place.kind in RESTARTING}
    if place.size == 1:
        yield Ranks(**about)
        return
    from llmq.comm.world import copied_in_words, join_world

    patience = watchdog_s(os.environ)
    picked = replace(device.pick_device(options.system), num_sharing=place.local_size or 1)
    where = device.use(picked, partial(gpu_index, place))
    world = join_world(place, where, levels.copying(options.sharding))
    said = "; ".join(filter(None, (place.in_words, copied_in_words(world))))
    ranks = Ranks(world, said, where, **about)
    try:
        with ranks.watched(Path(options.to_flat()["log_file"]).parent, patience):
            ranks.check_same(options)
            yield ranks
    finally:
        world.close()
