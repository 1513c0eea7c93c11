"""Cores: those of a GPU as sysfs tells them, and shares of the CPU."""

import os

import pytest

from llmq.hardware.cores import cores_beside, cores_of_ranks, read_cores

ADDRESS = "0000:18:00.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 8 cores, of which 0 to 3 and 6 are beside a GPU."""
    folder = tmp_path / "sys/bus/pci/devices" / ADDRESS
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text("0-3,6\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return tmp_path


def test_a_list_of_cores():
    assert read_cores("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11} and read_cores("") == set()


def test_the_cores_beside_a_gpu(machine, monkeypatch):
    assert cores_beside(ADDRESS, machine) == {0, 1, 2, 3, 6}
    assert cores_of_ranks(2, [ADDRESS, ""], machine) == [{0, 1, 2, 3, 6}, set()]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 4})
    assert cores_of_ranks(1, [ADDRESS], machine) == [{2, 3}]


def test_a_system_without_affinities(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores_of_ranks(2, None) == [set(), set()]


@pytest.mark.parametrize("num", [1, 3, 8, 11])
def test_shares_of_the_cpu(machine, num):
    shares = cores_of_ranks(num, None)
    assert len(shares) == num and all(len(share) == max(1, 8 // num) for share in shares)
    assert len(frozenset().union(*shares)) == min(8, num * (8 // num or 1))
