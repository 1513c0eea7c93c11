"""Mix files: what they name, and that each value that is wrong is named with its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmq.data.batches.mix_file import read_mix
from llmq.errors import UsageError


def write_mix(folder: Path, text: str) -> str:
    (folder / "mix.yaml").write_text(text)
    return str(folder / "mix.yaml")


def test_a_mix_file_is_read(tmp_path: Path) -> None:
    path = write_mix(
        tmp_path,
        "- {train_file: a.bin, weight: 0.3}\n- train_file: [b.bin, 'c*.bin']\n  weight: 1e-1\n"
        "- {data: gsm8k, weight: 2}\n",
    )
    files = [("a.bin",), ("b.bin", "c*.bin"), ()]
    assert [(entry.train_file, entry.data) for entry in read_mix(path)] == [
        (files[0], None),
        (files[1], None),
        (files[2], "gsm8k"),
    ]
    assert [(entry.name, entry.weight) for entry in read_mix(path)] == [
        ("a.bin", 0.3), ("b.bin, c*.bin", 0.1), ("gsm8k", 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "yaml: None: Input should be a valid list: write lines such as `- {train_file"),
        ("train_file: a", "should be a valid list"),
        ("- [", "is not YAML"),
        ("- a.bin", "source 1: 'a.bin': Input should be a valid dict"),
        ("- {train_file: a, weight: 1}\n- {weight: 1}", "source 2: {'weight': 1}: needs either train_file"),
        ("- {train_file: a, data: b, weight: 1}", "source 1: .* needs either"),
        ("- {train_file: [1], weight: 1}", "source 1, train_file, 0: 1: Input should be a valid string"),
        ("- {train_file: a}", "source 1, weight: .*: Field required"),
        ("- {train_file: a, weight: -1}", "weight: -1: Input should be greater than 0: write lines such as"),
        ("- {train_file: a, weight: yes}", "weight: True: a number is needed"),
        ("- {train_file: a, weight: .inf}", "weight: inf: Input should be a finite number"),
        ("- {trainfile: a, weight: x}", r"(?s)weight: 'x': .*valid number.*trainfile: 'a': Extra inputs are not"),
    ],
)
def test_a_bad_mix_file_is_refused_by_name_and_source(tmp_path: Path, text: str, says: str) -> None:
    path = write_mix(tmp_path, text)
    with pytest.raises(UsageError, match=says) as caught:
        read_mix(path)
    assert path in str(caught.value)


def test_mutated_mix_files_give_our_errors_or_a_mixture(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    good = b"- {train_file: a.bin, weight: 0.3}\n- train_file: [b.bin, c.bin]\n  weight: 2\n- {data: x, weight: 1}\n"
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            bad[rng.integers(len(bad))] = rng.choice(list(b"{}[]:,-'\"\n 0a.\xff\x00&*!|>%@"))
        (tmp_path / "mix.yaml").write_bytes(bytes(bad))
        try:
            assert all(entry.weight > 0 for entry in read_mix(str(tmp_path / "mix.yaml")))
        except UsageError as error:
            assert "mix.yaml" in str(error)
