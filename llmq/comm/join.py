"""A rank joins the others: its place and its device to the world that they talk in."""

from __future__ import annotations

import atexit
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from llmq.comm.job_token import NO_SHARED_HOME, derived_token, drawn_token
from llmq.comm.launch import MPI, Place
from llmq.comm.world import OneRank, World
from llmq.errors import WorldError
from llmq.hardware.device import Device

if TYPE_CHECKING:
    from llmq.comm.rendezvous import Store


def join_world(place: Place | None, device: Device) -> World:
    """The world of this rank, once all ranks have come. WorldError, which names those that have not, if they do not.

    On a GPU it is NCCL's, on the CPU MPI's where MPI started the ranks, else one of sockets.
    """
    if place is None or place.size == 1:
        return OneRank()
    if place.kind in MPI and device.kind == "cpu":
        from llmq.comm.mpi import MpiWorld

        return MpiWorld()
    store = _join_store(place)
    if device.kind == "cuda":
        from llmq.comm.nccl import NcclWorld

        return NcclWorld(store, place.rank, place.size)
    from llmq.comm.tcp import TcpWorld

    return TcpWorld(store, place.rank, place.size)


def _join_store(place: Place) -> Store:
    """The store where the ranks meet; rank 0 keeps it, unless the launcher does."""
    from llmq.comm.rendezvous import Store, StoreServer

    if place.kind in MPI:
        place = _met_by_mpi(place)
    token = place.token or derived_token(place.job)
    if place.rank == 0 and not place.has_store:
        server = StoreServer(place.master_addr, place.master_port, place.size, token, place.join_s)
        atexit.register(server.close)  # which gives the other ranks time to leave
    try:
        return Store.join(place.master_addr, place.master_port, place.rank, place.size, token, place.join_s)
    except WorldError as error:
        if place.token is None and place.local_size != place.size:
            raise WorldError(f"{error}; {NO_SHARED_HOME}") from error
        raise


def _met_by_mpi(place: Place) -> Place:
    """The place with the address, port and token that rank 0 chooses; MPI brings them to the others."""
    from llmq.comm.mpi import MpiWorld

    mine = (socket.gethostname(), free_port(), drawn_token()) if place.rank == 0 else None
    host, port, token = MpiWorld().gather(mine)[0]
    return replace(place, master_addr=host, master_port=port, token=token)


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]
