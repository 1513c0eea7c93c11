"""What a dry run prints of many GPUs: the levels, which of them fit, and which one the run has."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import write_documents

import llmq
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import device
from llmq.options.parse import Options
from llmq.training.ranks import joined


@pytest.fixture
def many(given):
    """A dry run for four GPUs that are not here."""
    return {**given, "dry_run": True, "device": "cuda", "gpu": "H100", "gpus": 4, "zero_level": 2}


def rows(given):
    """The lines of the table of levels, without its heads."""
    return [line for line in given["console"].getvalue().splitlines() if "--zero-level " in line and "fit" in line]


def test_a_dry_run_for_many_gpus_shows_every_level(many):
    alone = llmq.train(**{**many, "gpus": 1}).plan
    assert "On each of" not in many["console"].getvalue()
    plan = llmq.train(**many).plan
    assert plan.spec.sharding.size == 4 and plan.spec.sharding.gradients and not plan.spec.sharding.weights
    assert "On each of 4 GPUs:" in many["console"].getvalue() and plan.spec.batch_size == alone.spec.batch_size
    found = rows(many)
    assert [line.split()[1] for line in found] == ["0", "1", "2", "3"]
    assert [line.endswith("fits (this run)") for line in found] == [False, False, True, False]
    assert all("fits" in line for line in found)


def test_a_quiet_dry_run_is_one_line(given, many):
    llmq.train(**given, dry_run=True, verbosity=-1)
    (line,) = given["console"].getvalue().splitlines()
    assert line.startswith("The plan fits: 1.0 MiB of ") and line.endswith(" that are free on cpu")
    many["console"] = io.StringIO()
    llmq.train(**{**many, "verbosity": -1, "model_dtype": "bf16"})
    fits = r"The plan fits: \S+ MiB of \S+ GiB that are free on each of 4 H100 SXM, [\d,]+ tokens/s predicted"
    assert re.fullmatch(fits, many["console"].getvalue().strip())
    given["console"] = io.StringIO()
    llmq.train(**given, dry_run=True, verbosity=-2)
    assert given["console"].getvalue() == ""


def test_a_plan_of_padding_is_a_warning(given):
    """Also of a quiet dry run."""
    write_documents("docs", 40, np.random.default_rng(0))
    more = {"train_file": "docs.bin", "eval_file": None, "eval_every_n_steps": 0, "seq_len": 400, "packing": False}
    llmq.train(**{**given, **more, "dry_run": True, "verbosity": -1})
    assert "Warning: 96% of the training rows of 400 tokens is padding: --seq-len 32" in given["console"].getvalue()


def test_a_dry_run_shows_what_each_level_has_on_the_host(many):
    """Gradients and weights of the blocks leave the GPU at every level, and shares take less of the host."""
    hosted = {"offload_gradients": True, "stream_weights": True, "offload_optimizer": True}
    llmq.train(**many)
    plain = rows(many)
    many["console"].truncate(0)
    llmq.train(**many, **hosted)
    found, said = rows(many), many["console"].getvalue()
    assert " host " in said and [line.split()[4:6] for line in found] == [["0", "bytes"]] * 4
    assert all(len(line.split()) == len(other.split()) + 2 for line, other in zip(found, plain, strict=True))


def test_processes_of_a_machine_share_its_host_memory(many, monkeypatch):
    """On one with cards that are not here, too."""
    options = Options.parse({**{key: value for key, value in many.items() if key != "console"}, "name": "shared"})
    with joined(options) as ranks:
        assert (ranks.size, ranks.device.num_sharing) == (4, 4)
    monkeypatch.setattr(device, "pick_device", lambda options: device.Device("cuda"))
    with joined(options) as ranks:
        assert (ranks.size, ranks.device.num_sharing) == (4, 4)


@pytest.mark.slow
def test_levels_are_shown_of_a_run_that_does_not_fit(many, few_remedies, monkeypatch):
    monkeypatch.setattr(device, "memory_bytes", lambda *_: (2**40, 1000))
    with pytest.raises(MemoryLimitError, match="1,000 bytes are free"):
        llmq.train(**many)
    assert len(rows(many)) == 4 and all("does not fit" in line for line in rows(many))


def test_all_gpus_of_another_machine_are_not_counted(many):
    with pytest.raises(UsageError, match="--gpus 0 counts the GPUs of this machine, and --gpu H100 is another"):
        llmq.train(**{**many, "gpus": 0})


def test_a_rope_that_changes_with_the_length_is_named(given):
    path = Path(given["model"]) / "config.json"
    scaling = {
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 8,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | scaling))
    llmq.train(**given, dry_run=True)
    assert "larger base (dynamic): rows have 16 tokens, more than 8" in given["console"].getvalue()
