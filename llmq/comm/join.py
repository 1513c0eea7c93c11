"""A rank joins the others: its place and its device to the world that they talk in."""

from __future__ import annotations

import atexit

from llmq.comm.job_token import NO_SHARED_HOME, derived_token
from llmq.comm.launch import MPI, Place
from llmq.comm.peer_copies import NO_COPIES, Copying
from llmq.comm.world import OneRank, World
from llmq.errors import WorldError
from llmq.hardware.device import Device


def join_world(place: Place | None, device: Device, copying: Copying = NO_COPIES) -> World:
    """The world of this rank, once all ranks have come. WorldError, which names those that have not, if they do not.

    That of the host is MPI's where MPI started the ranks, else one of sockets. GPUs have NCCL's beside it, on the
    current device, and copy engines for what `copying` says, on which a UsageError is as `NcclWorld` has it.
    """
    if place is None or place.size == 1:
        return OneRank()
    host = _host_world(place)
    if device.kind == "cpu":
        return host
    from llmq.comm.nccl import NcclWorld

    return NcclWorld(host, copying)


def copied_in_words(world: World) -> str:
    """What copy engines move, which may have been chosen by timing; empty if nothing."""
    return getattr(world, "copies", NO_COPIES).in_words


def _host_world(place: Place) -> World:
    """The world for what is in host memory. Rank 0 keeps the store where ranks meet, unless the launcher does."""
    if place.kind in MPI:
        from llmq.comm.mpi import MpiWorld

        return MpiWorld()
    from llmq.comm.rendezvous import Store, StoreServer
    from llmq.comm.tcp import TcpWorld

    token = place.token or derived_token(place.job)
    if place.rank == 0 and not place.has_store:
        server = StoreServer(place.master_addr, place.master_port, place.size, token, place.join_s)
        atexit.register(server.close)  # which gives the other ranks time to leave
    try:
        store = Store.join(place.master_addr, place.master_port, place.rank, place.size, token, place.join_s)
    except WorldError as error:
        if place.token is None and place.local_size != place.size:
            raise WorldError(f"{error}; {NO_SHARED_HOME}") from error
        raise
    return TcpWorld(store, place.rank, place.size)
