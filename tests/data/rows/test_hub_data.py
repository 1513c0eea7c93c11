"""Data sets of the Hub: which files are which config and split, and the whole way against a stand-in."""

import io
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import hub_stand_in
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_stand_in import COMMIT, CONVERTED, Hub, Repo, serve

from llmq.data.rows.hub_data import HubSpec, by_split, converted_layout, layout
from llmq.errors import DataError, UsageError

DRIVER = """
import json, sys
from huggingface_hub import constants
from llmq.data.rows.find_sources import find_anything
from llmq.errors import LlmqError
for name, fraction, streaming, constants.HF_HUB_OFFLINE in json.loads(sys.argv[1]):
    try:
        found = find_anything(name, fraction, streaming=streaming)
        read = lambda rows: None if rows is None else [row.value["n"] for _, row in rows.read()]
        answer = {"train": read(found.train), "eval": read(found.evaluation), "title": found.title, "rule": found.rule,
                  "key": repr(found.identity()), "place": next(found.train.read())[1].place}
        print(json.dumps({**answer, "eval_tokens": found.eval_tokens, "limit": found.limit}))
    except LlmqError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""


def parquet(*numbers: int) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"n": list(numbers), "text": [f"row {n}" for n in numbers]}), out)
    return out.getvalue()


def jsonl(*numbers: int) -> bytes:
    return "".join(json.dumps({"n": n, "text": f"row {n}"}) + "\n" for n in numbers).encode()


CARD = [
    {"config_name": "small", "default": True, "data_files": [
        {"split": "train", "path": "small/train-*.parquet"}, {"split": "validation", "path": ["small/val.parquet"]},
    ]},
    {"config_name": "large", "data_dir": "large", "data_files": "*.jsonl"},
]  # fmt: skip
SETS = {
    "org/card": Repo(
        {
            "README.md": b"", "small/train-0.parquet": parquet(*range(6)),
            "small/train-1.parquet": parquet(*range(6, 10)),
            "small/val.parquet": parquet(100, 101), "large/a.jsonl": jsonl(*range(20)), "other.parquet": parquet(7),
        },
        CARD,
    ),
    "org/plain": Repo(
        {"dataset_infos.json": b"{}", "data/train-0.parquet": parquet(*range(10)), "data/test-0.parquet": parquet(5)}
    ),
    "org/streamed": Repo({"a.parquet": parquet(*range(7)), "b.parquet": parquet(7, 8, 9)}),
    "org/script": Repo(
        {"script.py": b"raise SystemExit(9)", "data.tar": b"x"},
        None,
        {"main/train/0000.parquet": parquet(*range(4)), "main/validation/0000.parquet": parquet(9),
         "b/test/0.parquet": b""},
    ),
    "org/partial": Repo({"partial.py": b""}, None, {"main/partial-train/0000.parquet": parquet(1)}),
    "org/images": Repo({"a.png": b""}),
    "GAIR/LIMO": Repo({"limo.jsonl": jsonl(*range(60))}),
    "roneneldan/TinyStories": Repo({"data/train-0.parquet": parquet(1, 2), "data/validation-0.parquet": parquet(3)}),
    "openai/gsm8k": Repo(
        {"main/train-0.parquet": parquet(1, 2), "main/test-0.parquet": parquet(3)},
        [{"config_name": "main", "data_files": [
            {"split": "train", "path": "main/train-*"}, {"split": "test", "path": "main/test-*"}]}],
    ),
    "HuggingFaceFW/fineweb": Repo(
        {"sample/10BT/000.parquet": parquet(1, 2), "data/CC/0.parquet": parquet(8)},
        [{"config_name": "default", "data_files": "data/*/*"},
         {"config_name": "sample-10BT", "data_files": "sample/10BT/*"}],
    ),
    "gvlassis/ClimbMix": Repo(
        {f"cluster_id={n}/0.parquet": parquet(n * 10, n * 10 + 1) for n in range(1, 21)},
        [{"config_name": f"cluster_id={n}", "data_files": f"cluster_id={n}/*"} for n in range(1, 21)],
    ),
}  # fmt: skip


class Case(NamedTuple):
    """A name that is asked for, and how."""

    name: str
    fraction: float | None = None
    streaming: bool = False
    offline: bool = False


STREAMED = Case("org/streamed", None, True)  # whose files are not kept
GOOD = [
    Case("org/card"), Case("org/card:large"), Case("org/card:small:train[5:90%]"), Case("org/card", 0.2),
    Case("org/plain::test", 0), Case("org/script:main"), Case("tiny-stories"), Case("gsm8k"), Case("limo"),
    Case("fineweb-10b"), Case("fineweb-1b"), Case("climb-20b"), Case("gsm8k", 0.1), STREAMED,
]  # fmt: skip
BAD = [
    (Case("org/gone"), "DataError", "no public data set of that name"),
    (Case("org/card@v2"), "DataError", "org/card has no revision 'v2': see .*/datasets/org/card/tree"),
    (Case("org/card:huge"), "DataError", "org/card has no config huge: give one of small, large"),
    (Case("org/card:validation"), "DataError", "for the split of that name org/card::validation"),
    (Case("org/card:large:dev"), "DataError", r"org/card \(config large\) has no split dev, but train"),
    (Case("org/script"), "DataError", "several configs: give org/script:CONFIG with one of b, main"),
    (Case("org/partial"), "DataError", "converted only the beginning of org/partial"),
    (Case("org/images"), "DataError", "has no files of rows .*loading scripts of data sets are never run"),
    (Case("org/card:small:train[9:2]"), "UsageError", "the slice .*has no rows"),
    (Case("a/b/c"), "UsageError", "neither a path nor a data set"),
    (Case("no such name!"), "UsageError", "neither a local folder nor a name on the Hub"),
    (Case("org/unknown", offline=True), "DataError", "org/unknown was not used before"),
    (STREAMED._replace(offline=True), "DataError", "a.parquet of org/streamed is not in .*HF_HUB_OFFLINE forbids"),
]
PLAIN = GOOD[4]
AGAIN = PLAIN._replace(offline=True)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, dict[Case, dict[str, Any]]]]:
    """A stand-in, and what a process answered that asked there."""
    home, cases = tmp_path_factory.mktemp("hub"), [*GOOD, *(case for case, _, _ in BAD), AGAIN]
    with serve(SETS) as hub:
        yield hub, dict(zip(cases, hub_stand_in.ask(DRIVER, home, hub.url, cases), strict=True))
    # a streamed file is on the disk only while it is read
    assert list((home / "llmq/streaming").iterdir()) == [] and not list((home / "hf").rglob("*streamed*/**/*.parquet"))


def test_configs_splits_and_slices(answered) -> None:
    card, large, sliced, fraction, plain, script = (answered[1][name] for name in GOOD[:6])
    assert (card["train"], card["eval"], card["title"]) == (list(range(10)), [100, 101], "card-small")
    assert card["place"] == "org/card/small/train-0.parquet:1" and "those of the validation split" in card["rule"]
    assert COMMIT[:12] in card["rule"] and f"'{COMMIT}'" in card["key"]
    assert (large["train"], large["eval"]) == ([n for n in range(20) if n not in (9, 19)], [9, 19])
    assert (sliced["train"], sliced["eval"]) == (list(range(5, 9)), [100, 101])
    assert (fraction["train"], fraction["eval"]) == ([0, 1, 2, 3, 5, 6, 7, 8], [4, 9])
    assert (plain["train"], plain["eval"]) == ([5], None)
    assert (script["train"], script["eval"]) == ([0, 1, 2, 3], [9]) and CONVERTED[:12] in script["rule"]


def test_files_are_fetched_once_and_nothing_that_could_run_and_streams_are_read_whole(answered) -> None:
    hub, answers = answered
    assert answers[AGAIN] == answers[PLAIN] and sum("api/datasets/org/plain" in path for _, path in hub.requests) == 1
    assert (answers[STREAMED]["train"], answers[STREAMED]["eval"]) == (list(range(10)), None)
    fetched = [path for path in hub.fetched() if "streamed" not in path]
    assert len(fetched) == len(set(fetched)) > 20
    assert not any(path.endswith((".py", ".tar", ".md", "other.parquet")) for path in fetched)


def test_the_sets_of_llmq_have_its_rules(answered) -> None:
    stories, gsm8k, limo, web, billion, climb, refused = (answered[1][name] for name in GOOD[6:13])
    assert (stories["train"], stories["eval"]) == ([1, 2], [3])
    assert (gsm8k["train"], gsm8k["eval"]) == ([1, 2], [3])
    assert len(limo["train"]) == 20 and sorted(limo["train"] + limo["eval"]) == list(range(60))
    assert limo["eval"] != sorted(limo["eval"])
    assert (web["train"], web["eval"], web["eval_tokens"], web["limit"]) == ([1, 2], None, 10_000_000, None)
    assert (billion["eval_tokens"], billion["limit"]) == (10_000_000, 10**9)
    assert (climb["eval_tokens"], climb["limit"]) == (20_000_000, 2 * 10**10)
    assert set(climb["train"]) == {n * 10 + k for n in range(1, 21) for k in (0, 1)}
    assert refused["error"] == "UsageError" and "gsm8k has its own part for evaluation" in refused["text"]


@pytest.mark.parametrize(("case", "kind", "says"), BAD)
def test_what_is_not_there_is_said(answered, case: Case, kind: str, says: str) -> None:
    answer = answered[1][case]
    assert answer["error"] == kind and re.search(says, answer["text"]) and "\n" not in answer["text"], answer


def test_a_spec_in_parts() -> None:
    spec = HubSpec.parse("wikitext:wikitext-2-raw-v1:train[:10%]")
    assert spec == HubSpec("wikitext", "main", "wikitext-2-raw-v1", "train", ("", "10%"))
    assert HubSpec.parse("org/name@refs/pr/1::test") == HubSpec("org/name", "refs/pr/1", split="test")
    for text in ("a:b:c:d", "a[1:2]", "", ":b", "a:b:", "a:b:[1:2]", "a:b:c[1]"):
        with pytest.raises(UsageError):
            HubSpec.parse(text)


def test_layouts_by_name() -> None:
    files = dict.fromkeys(["data/train-0.parquet", "data/valid-0.parquet", "train.csv", "x.json", "a.txt"], 1)
    splits = {"train": ["data/train-0.parquet"], "validation": ["data/valid-0.parquet"]}
    assert layout("a/b", files, []) == {"default": splits}
    assert layout("a/b", {"b.py": 1, **files}, []) == {}
    assert layout("a/b", {"x.csv": 1, "dataset_infos.json": 1, "y.jsonl": 1}, []) == {"default": {"train": ["y.jsonl"]}}
    assert layout("a/b", {"x.txt": 1}, []) == {}
    deep = {"a/b/c.parquet": 1, "a/c.parquet": 1, "c.parquet": 1}
    for pattern, names in [
        ("**", deep), ("**/c.parquet", deep), ("a/**", ["a/b/c.parquet", "a/c.parquet"]), ("*", ["c.parquet"]),
        ("a**/*.parquet", ["a/c.parquet"]), ("a/*", ["a/c.parquet"]), ("[a-b]/?.parquet", ["a/c.parquet"]),
        ("[!a].parquet", ["c.parquet"]), ("[b-a]", []),
    ]:  # fmt: skip
        found = layout("a/b", deep, [{"config_name": "x", "data_files": pattern}])
        assert [path for paths in found.get("x", {}).values() for path in paths] == sorted(names), pattern
    found = by_split(["contest.jsonl", "latest-dev.jsonl"])
    assert found == {"train": ["contest.jsonl"], "validation": ["latest-dev.jsonl"]}
    with pytest.raises(DataError, match="has no files of rows"):
        converted_layout("a/b", {"x.parquet": 1})
