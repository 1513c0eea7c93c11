"""Who a process is among the ranks of a run, read off the variables that its launcher sets.

Known are our own (set by `--gpus N`, `llmq-launch` and Ray's actors), torchrun's, srun's, and those of Open MPI and
MPICH. One launcher may start another, as in `srun torchrun`: the inner one counts, which is the first of that list.

The store at which ranks meet (llmq/comm/rendezvous.py) has a port of its own: torchrun's is taken by its own store, and
Slurm names none, so that it follows from the number of the job. LLMQ_MASTER_PORT overrides it, and LLMQ_MASTER_ADDR the
address that follows from srun's variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from llmq.comm.node_list import node_names, tasks_of_nodes
from llmq.errors import UsageError

MPI = ("Open MPI", "MPICH")  # the kinds whose ranks find each other through MPI itself
HIDING = ("srun", *MPI)  # the kinds that may show each rank its own GPU alone, as srun --gpus-per-task=1 does
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # for stores: below the ports that Linux gives to outgoing connections
JOIN_S = 600.0  # that a rank waits for the others to come; LLMQ_JOIN_TIMEOUT overrides it
WATCHDOG_S = 60.0  # in which a rank that is lost is found; LLMQ_WATCHDOG_SECONDS overrides it
TRAIN = ("llmq-train",)  # what starts a process on its own, and with its options --gpus and --launcher ranks
OUR_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """A rank of a run, by its launcher.

    `local_size` is None where the launcher does not tell how many ranks the machine has. `token` is what the ranks
    prove to each other, None if it is not given (llmq/comm/job_token.py then makes one, of `job`). `has_store` says
    that the launcher keeps the store; else rank 0 does. An MPI kind has neither address nor port. `start` is a command
    that starts as many ranks, before the arguments of `llmq-train`; `again` says that these are started after others
    that were lost.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    master_addr: str
    master_port: int
    token: str | None
    kind: str
    variables: str  # those by which it was recognised
    job: str = ""
    has_store: bool = False
    join_s: float = JOIN_S
    start: tuple[str, ...] = TRAIN
    again: bool = False

    @property
    def in_words(self) -> str:
        """One line: `Ranks: 8, 4 on this machine, started by torchrun (RANK, WORLD_SIZE); store at node1:29501`."""
        here = f", {self.local_size} on this machine" if self.local_size is not None else ""
        store = f"; store at {self.master_addr}:{self.master_port}" if self.master_addr else ""
        return f"Ranks: {self.size}{here}, started by {self.kind} ({self.variables}){store}"

    def environ(self) -> dict[str, str]:
        """Our own variables, by which a process that has them is recognised as this rank."""
        assert self.local_size is not None and self.token is not None
        values = (self.rank, self.size, self.local_rank, self.local_size, self.master_addr, self.master_port)
        own = {f"LLMQ_{name}": str(value) for name, value in zip(OUR_OWN, values, strict=True)}
        own |= {
            "LLMQ_JOB_TOKEN": self.token,
            "LLMQ_JOIN_TIMEOUT": str(self.join_s),
            "LLMQ_START": shlex.join(self.start),
        }
        own |= {"LLMQ_HAS_STORE": str(int(self.has_store)), "LLMQ_AGAIN": str(int(self.again))}
        return own | {"LLMQ_LAUNCHER": self.kind}


def recognised(environ: Mapping[str, str], gpus: int = 1) -> Place | None:
    """This process among the ranks of a run; None if it was started by itself.

    `gpus` is the value of --gpus, 1 if it is not given. UsageError, which names the variables, if they contradict each
    other or it, or if some are missing.
    """
    readers = (_by_llmq, _by_torchrun, _by_open_mpi, _by_mpich, _by_srun)
    found = [place for read in readers if (place := read(environ)) is not None]
    if not found:
        return None
    place, *others = found
    for other in others:
        if place.kind in MPI and (place.rank, place.size) == (other.rank, other.size):
            place = other  # a site may have srun set MPI's variables for every program
        elif not _may_start(other, place):
            raise UsageError(
                f"two launchers at once: {place.kind} ({place.variables}) says rank {place.rank} of {place.size}, "
                f"{other.kind} ({other.variables}) rank {other.rank} of {other.size}: use one of them, or unset the "
                "variables of the other"
            )
    if not 0 <= place.rank < place.size:
        raise UsageError(f"{place.variables}: rank {place.rank} of {place.size} is none: ranks are 0 to size - 1")
    if place.local_size is not None and not 0 <= place.local_rank < place.local_size <= place.size:
        raise UsageError(
            f"{place.variables}: local rank {place.local_rank} of {place.local_size} on this machine does not fit "
            f"into a world of {place.size}"
        )
    if gpus > 1 and place.local_size is not None and gpus != place.local_size:
        raise UsageError(
            f"--gpus {gpus}, but {place.kind} started {place.local_size} of the {place.size} ranks on this machine "
            f"({place.variables}): start one process per GPU with it and leave --gpus out, or start one without it"
        )
    return place


def gpu_index(place: Place | None, num_gpus: int) -> int:
    """Which of the GPUs that this process sees is its own: that of its local rank, or the only one.

    UsageError if there are too few.
    """
    if place is None or (num_gpus == 1 and place.kind in HIDING):
        return 0
    if place.local_rank >= num_gpus:
        raise UsageError(
            f"rank {place.rank} is number {place.local_rank} on its machine, which shows it {num_gpus} GPUs: start one "
            "rank per GPU, or use --device cpu"
        )
    return place.local_rank


def watchdog_s(environ: Mapping[str, str]) -> float:
    """Seconds in which a rank that is lost is found, the patience of the watchdog. UsageError if they are no number."""
    return _seconds(environ, "LLMQ_WATCHDOG_SECONDS", WATCHDOG_S)


def store_port(number: int) -> int:
    """A port for the store of a job with this number."""
    return FIRST_PORT + number % NUM_PORTS


def _may_start(outer: Place, inner: Place) -> bool:
    """Whether `outer` can have started the launcher of `inner`: once on each machine, or mpirun within a Slurm job."""
    if outer.kind == "torchrun":
        return False
    return (inner.local_size or 1) * outer.size == inner.size or (outer.kind == "srun" and inner.kind in MPI)


def _by_llmq(environ: Mapping[str, str]) -> Place | None:
    """Our own variables, all of which every launcher of ours sets."""
    names = tuple(f"LLMQ_{name}" for name in OUR_OWN)
    if names[0] not in environ:
        return None
    _need(environ, *names, "LLMQ_JOB_TOKEN")
    rank, size, local_rank, local_size = (_number(environ, name) for name in names[:4])
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=environ["LLMQ_MASTER_ADDR"],
        master_port=_number(environ, "LLMQ_MASTER_PORT"),
        token=environ["LLMQ_JOB_TOKEN"],
        kind=environ.get("LLMQ_LAUNCHER", "llmq-launch"),
        variables="LLMQ_RANK, LLMQ_WORLD_SIZE",
        has_store=environ.get("LLMQ_HAS_STORE") == "1",
        join_s=_join_s(environ),
        start=tuple(shlex.split(environ["LLMQ_START"])) if "LLMQ_START" in environ else TRAIN,
        again=environ.get("LLMQ_AGAIN") == "1",
    )


def _by_torchrun(environ: Mapping[str, str]) -> Place | None:
    """torchrun's variables; of others that set the same, such as Kubeflow's, there may be no local ones."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    _need(environ, *needed)
    size, port = _number(environ, "WORLD_SIZE"), _number(environ, "MASTER_PORT")
    if size > 1 and "LOCAL_WORLD_SIZE" in environ:
        _need(environ, "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    # Where torchrun's agent keeps a store of its own, that is what listens at MASTER_PORT.
    own = port + 1 if port + 1 < FIRST_PORT + NUM_PORTS else store_port(port)
    job = (environ["MASTER_ADDR"], port, environ.get("TORCHELASTIC_RUN_ID"), environ.get("TORCHELASTIC_RESTART_COUNT"))
    here = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    return Place(
        rank=_number(environ, "RANK"),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_size=here,
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "LLMQ_MASTER_PORT", own),
        token=environ.get("LLMQ_JOB_TOKEN"),
        kind="torchrun",
        variables="RANK, WORLD_SIZE",
        job=f"torchrun {job}",
        join_s=_join_s(environ),
        start=_torchrun(size, here, environ["MASTER_ADDR"], port) if here else TRAIN,
        again=environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
    )


def _torchrun(size: int, here: int, address: str, port: int) -> tuple[str, ...]:
    """The command of the first machine."""
    machines = (f"--nnodes={size // here}", "--node-rank=0", f"--master-addr={address}", f"--master-port={port}")
    return ("torchrun", *(machines if size > here else ()), f"--nproc-per-node={here}", "-m", "llmq")


def _by_srun(environ: Mapping[str, str]) -> Place | None:
    """srun's variables, in a job step of several tasks: a batch script and a shell of salloc are one process."""
    if "SLURM_STEP_ID" not in environ or environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    needed = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    _need(environ, *needed, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    job, step, node = (_number(environ, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"))
    tasks = tasks_of_nodes(environ["SLURM_STEP_TASKS_PER_NODE"])
    if node >= len(tasks):
        raise UsageError(f"SLURM_NODEID {node} is none of the nodes of SLURM_STEP_TASKS_PER_NODE {tasks}")
    return Place(
        rank=_number(environ, "SLURM_PROCID"),
        size=_number(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_size=tasks[node],
        # Rank 0 is on the first node, however tasks are distributed.
        master_addr=environ.get("LLMQ_MASTER_ADDR") or node_names(environ["SLURM_STEP_NODELIST"])[0],
        master_port=_number(environ, "LLMQ_MASTER_PORT", store_port(16 * job + step)),
        token=environ.get("LLMQ_JOB_TOKEN"),
        kind="srun",
        variables="SLURM_PROCID, SLURM_STEP_NUM_TASKS",
        job=f"slurm {job}.{step} {environ.get('SLURM_RESTART_COUNT', '0')}",
        join_s=_join_s(environ),
        start=("srun", f"--ntasks={environ['SLURM_STEP_NUM_TASKS']}", *TRAIN),
    )


def _by_open_mpi(environ: Mapping[str, str]) -> Place | None:
    """The variables of Open MPI's mpirun."""
    return _by_mpi(environ, "Open MPI", *(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


def _by_mpich(environ: Mapping[str, str]) -> Place | None:
    """The variables of Hydra, which is the mpirun of MPICH, MVAPICH and Intel."""
    return _by_mpi(environ, "MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _by_mpi(
    environ: Mapping[str, str], kind: str, rank: str, size: str, local_rank: str, local_size: str
) -> Place | None:
    """A rank of MPI by the names of its variables."""
    if not {rank, size} & environ.keys():
        return None
    _need(environ, rank, size)
    return Place(
        rank=_number(environ, rank),
        size=_number(environ, size),
        local_rank=_number(environ, local_rank, 0),
        local_size=_number(environ, local_size) if local_size in environ else None,
        master_addr="",
        master_port=0,
        token=environ.get("LLMQ_JOB_TOKEN"),
        kind=kind,
        variables=f"{rank}, {size}",
        join_s=_join_s(environ),
        start=("mpirun", "-n", environ[size], *TRAIN),
    )


def _join_s(environ: Mapping[str, str]) -> float:
    """Seconds to wait for the other ranks."""
    return _seconds(environ, "LLMQ_JOIN_TIMEOUT", JOIN_S)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """A variable that is a number of seconds. UsageError if it is none."""
    text = environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"{name} {text} is not a number of seconds above 0: leave it out for {default:g}")
    return seconds


def _need(environ: Mapping[str, str], *names: str) -> None:
    """UsageError naming what is there and what is missing, unless all of these are set."""
    missing = [name for name in names if name not in environ]
    if missing:
        there = next(name for name in names if name in environ)
        raise UsageError(f"{there} is set, but {', '.join(missing)} is not: set {', '.join(names)}, or none of them")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable that is a whole number of at least 0; UsageError if it is none."""
    if name not in environ and default is not None:
        return default
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r}, which is not a whole number")
    return int(text)
