"""How ranks prove that they belong together: a secret made once, by one of many, and readable by its owner alone."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmq.comm.world import derived_token, of_first_rank
from llmq.errors import UsageError


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """Where the secret of an empty cache folder will be."""
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path))
    return tmp_path / "job" / "secret"


def test_many_that_begin_together_have_one_secret(secret):
    with ThreadPoolExecutor(16) as pool:
        tokens = list(pool.map(lambda n: derived_token("slurm 7.0"), range(64)))
    assert len(set(tokens)) == 1 and derived_token("slurm 8.0") not in tokens
    assert secret.stat().st_mode & 0o777 == 0o600 and os.listdir(secret.parent) == ["secret"]


def test_another_secret_makes_other_tokens(secret):
    token = derived_token("slurm 7.0")
    secret.unlink()
    assert derived_token("slurm 7.0") != token


def test_a_secret_that_others_can_read_is_refused(secret):
    derived_token("slurm 7.0")
    secret.chmod(0o640)
    with pytest.raises(UsageError, match="can be read by others: delete it"):
        derived_token("slurm 7.0")


def test_without_mpi4py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"pip install 'llmq-train\[mpi\]'"):
        of_first_rank([])
