"""Who a rank is, by the variables of each launcher, and what is refused; how ranks prove that they belong together."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from llmq.comm.environment import Place, first_node, gpu_index, recognised, tasks_of_nodes, watchdog_s
from llmq.comm.world import derived_token, of_first_rank
from llmq.errors import UsageError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ONE = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}  # in a batch script
LAUNCHERS = {"torchrun": TORCHRUN, "srun": SRUN, "Open MPI": OPEN_MPI, "MPICH": MPICH}


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_launcher_is_recognised(kind):
    place = recognised({"PATH": "/bin", **LAUNCHERS[kind]})
    assert place is not None and place.kind == kind
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 2)
    meeting = {"torchrun": ("node1", 29501), "srun": ("gpu07", 20000 + 16 * 4711 % 12000)}
    assert (place.master_addr, place.master_port) == meeting.get(kind, (socket.gethostname(), 0))
    assert place.token is None and f"8, 2 on this machine, started by {kind} (" in place.in_words


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        (
            TORCHRUN,
            "torchrun --nnodes=4 --node-rank=0 --master-addr=node1 --master-port=29500 --nproc-per-node=2 -m llmq",
        ),
        ({**TORCHRUN, "WORLD_SIZE": "2", "RANK": "1"}, "torchrun --nproc-per-node=2 -m llmq"),
        ({key: value for key, value in TORCHRUN.items() if not key.startswith("LOCAL_")}, "llmq-train"),
        (SRUN, "srun --ntasks=8 llmq-train"),
        (OPEN_MPI, "mpirun -n 8 llmq-train"),
        (MPICH, "mpirun -n 8 llmq-train"),
    ],
)
def test_what_starts_as_many_ranks(environ, start):
    assert " ".join(recognised(environ).start) == start


def test_a_place_is_what_its_variables_say():
    place = Place(5, 8, 1, 2, "node1", 29500, "abc", "llmq-launch", has_store=True)
    assert recognised(place.environ(), gpus=2) == place
    other = replace(place, again=True, join_s=7.0, start=("llmq-launch", "--master-addr=a b", "--"))
    assert recognised(other.environ()) == other


@pytest.mark.parametrize("environ", [{}, ONE, {**ONE, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_process_on_its_own(environ):
    assert recognised(environ) is None


def test_variables_of_ours_override_a_launchers():
    own = {"LLMQ_MASTER_PORT": "1234", "LLMQ_JOB_TOKEN": "abc", "LLMQ_JOIN_TIMEOUT": "5"}
    for environ in (SRUN, OPEN_MPI):
        assert recognised({**environ, "LLMQ_MASTER_ADDR": "10.0.0.7"}).master_addr == "10.0.0.7"
    for environ in (TORCHRUN, SRUN):
        place = recognised(environ | own)
        assert (place.master_port, place.token, place.join_s) == (1234, "abc", 5.0)


def test_how_soon_a_rank_is_lost():
    assert watchdog_s({}) == 60 and watchdog_s({"LLMQ_WATCHDOG_SECONDS": "2.5"}) == 2.5
    with pytest.raises(UsageError, match="LLMQ_WATCHDOG_SECONDS soon is not a number of seconds above 0"):
        watchdog_s({"LLMQ_WATCHDOG_SECONDS": "soon"})


def test_a_random_port_of_torchrun_is_not_followed():
    """torchrun --standalone takes any free port: the next one may be in use by an outgoing connection."""
    assert 20_000 <= recognised({**TORCHRUN, "MASTER_PORT": "45123"}).master_port < 32_000


def without(environ, *names):
    """The variables but these."""
    return {name: value for name, value in environ.items() if name not in names}


AGENTS = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}  # one per machine


@pytest.mark.parametrize(
    ("environ", "kind", "local_size"),
    [
        (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "torchrun", None),  # one rank per machine, by Kubeflow
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, "srun", 2),  # at a site that sets MPI's for every step
        *(({**TORCHRUN, **AGENTS, "SLURM_STEP_NUM_TASKS": tasks}, "torchrun", 2) for tasks in "14"),
    ],
)
def test_variables_that_are_fewer_or_of_several_launchers(environ, kind, local_size):
    place = recognised(environ)
    assert (place.kind, place.rank, place.local_size) == (kind, 5, local_size)


@pytest.mark.parametrize(
    ("environ", "gpus", "said"),
    [
        (TORCHRUN, 4, r"--gpus 4, but torchrun started 2 of the 8 ranks on this machine \(RANK, WORLD_SIZE\)"),
        (SRUN, 8, r"--gpus 8, but srun started 2 of the 8 ranks"),
        (without(TORCHRUN, "WORLD_SIZE"), 1, "RANK is set, but WORLD_SIZE is not"),
        (without(TORCHRUN, "RANK", "MASTER_PORT"), 1, "WORLD_SIZE is set, but RANK, MASTER_PORT is not"),
        (without(TORCHRUN, "LOCAL_RANK"), 1, "LOCAL_WORLD_SIZE is set, but LOCAL_RANK is not"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), 1, "but OMPI_COMM_WORLD_SIZE is not"),
        (without(SRUN, "SLURM_STEP_NODELIST"), 1, "SLURM_STEP_NODELIST"),
        ({**TORCHRUN, "RANK": "8"}, 1, "rank 8 of 8 is none"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, 1, "local rank 2 of 2"),
        ({**TORCHRUN, "RANK": "five"}, 1, "RANK is 'five', which is not a whole number"),
        ({**SRUN, "SLURM_NODEID": "4"}, 1, "SLURM_NODEID 4 is none of the nodes"),
        ({**SRUN, "LLMQ_JOIN_TIMEOUT": "0"}, 1, "LLMQ_JOIN_TIMEOUT 0 is not a number of seconds above 0"),
        ({**TORCHRUN, **SRUN}, 1, r"two launchers at once: torchrun \(RANK, .* srun \(SLURM_PROCID"),
        ({**TORCHRUN, **OPEN_MPI}, 1, "two launchers at once: torchrun .* Open MPI"),
        ({**MPICH, **OPEN_MPI, "PMI_RANK": "4"}, 1, "two launchers at once: Open MPI .* MPICH"),
    ],
)
def test_what_contradicts_itself_is_refused(environ, gpus, said):
    with pytest.raises(UsageError, match=said):
        recognised(environ, gpus)


def test_the_gpu_of_a_rank():
    torchrun, srun = recognised(TORCHRUN), recognised(SRUN)
    assert gpu_index(None, 8) == 0 and gpu_index(torchrun, 2) == gpu_index(srun, 2) == 1
    assert gpu_index(srun, 1) == 0  # the others are hidden from it
    with pytest.raises(UsageError, match="rank 5 is number 1 on its machine, which shows it 1 GPUs"):
        gpu_index(torchrun, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[01-03,7]", "node01"),
        ("a,b[9-11]-ib,c", "a"),
        ("rack[1-2]node[08-09],a", "rack1node08"),
        ("tux[0098-0101].cluster", "tux0098.cluster"),
    ],
)
def test_the_first_node_of_slurms_list(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", "a[1-3", "a]", "a,,b", "a,", "a[,1]", "a[]"])
def test_what_is_no_list_of_nodes(nodes):
    with pytest.raises(UsageError):
        first_node(nodes)


def test_tasks_of_each_node():
    assert tasks_of_nodes("8(x2),4") == [8, 8, 4] and tasks_of_nodes("1") == [1]
    with pytest.raises(UsageError, match="'8x2' is not a list of tasks"):
        tasks_of_nodes("8x2")


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """Where the secret of an empty cache folder will be."""
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path))
    return tmp_path / "job" / "secret"


def test_many_that_begin_together_have_one_secret_that_others_cannot_read(secret):
    with ThreadPoolExecutor(16) as pool:
        tokens = list(pool.map(lambda n: derived_token("slurm 7.0"), range(64)))
    assert len(set(tokens)) == 1 and derived_token("slurm 8.0") not in tokens
    assert secret.stat().st_mode & 0o777 == 0o600 and os.listdir(secret.parent) == ["secret"]
    secret.unlink()
    assert derived_token("slurm 7.0") not in tokens  # of another secret
    secret.chmod(0o640)
    with pytest.raises(UsageError, match="can be read by others: delete it"):
        derived_token("slurm 7.0")


def test_without_mpi4py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"pip install 'llmq-train\[mpi\]'"):
        of_first_rank([])
