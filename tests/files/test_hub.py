"""Models of the Hub, against a stand-in."""

import json
import os
from pathlib import Path

import hub_stand_in
import numpy as np
import pytest
from hub_stand_in import COMMIT, Repo, serve

from llmq.errors import DataError, StorageError, UsageError
from llmq.files import hub
from llmq.files.hub import model_folder
from llmq.files.huggingface import Export
from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows

CONFIG = ModelConfig("LlamaForCausalLM", 100, 64, 96, 2, 4, 2, 16, 1e-5, 64, dtype="fp32", eos_token_ids=(2,))
DRIVER = """
import json, sys
import llmq.files.hub
from llmq.errors import LlmqError
for name, revision, kind in json.loads(sys.argv[1]):
    try:
        said = []
        folder = str(llmq.files.hub.model_folder(name, revision, kind, said.append))
        print(json.dumps({"folder": folder, **({"said": said} if said else {})}))
    except LlmqError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """Files of a sharded model with a tokenizer, and much that must not be fetched."""
    folder = tmp_path_factory.mktemp("model") / "m"
    draw = np.random.default_rng(0)
    export = Export(folder, CONFIG, parameter_rows(CONFIG), "fp32", shard_bytes=150_000)
    export.write(lambda row: draw.standard_normal(row.shape, np.float32))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    wanted = {
        **files,
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{} ",
        "additional_chat_templates/a.jinja": b"a",
    }
    more = dict.fromkeys(
        ("pytorch_model.bin", "modeling_x.py", "README.md", "consolidated.safetensors", "sub/config.json"), b"no"
    )
    return wanted, more


@pytest.fixture
def server(contents):
    wanted, more = contents
    with serve({"org/good": Repo({**wanted, **more})}) as hub:
        yield hub


def ask(home, url, *cases, **environment):
    """Runs model_folder for each (name, revision, kind) in a process with this environment; its answers in order."""
    return hub_stand_in.ask(DRIVER, home, url, cases, **environment)


def case(name, revision=None, kind="model"):
    return name, revision, kind


@pytest.mark.slow
def test_found_then_offline_then_unreachable(server, contents, tmp_path):
    wanted, _ = contents
    first, again, pinned = ask(tmp_path, server.url, case("org/good"), case("org/good"), case("org/good", COMMIT))
    folder = Path(first["folder"])
    assert again == pinned == first and folder.is_relative_to(tmp_path)
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == wanted
    fetched = [path.rsplit("/", 1)[1] for path in server.fetched()]
    assert sorted(fetched) == sorted(name.rsplit("/", 1)[-1] for name in wanted)  # once each, and nothing else
    weights = [n for n, name in enumerate(fetched) if name.endswith(".safetensors")]
    assert len(weights) > 1 and weights == list(range(len(fetched) - len(weights), len(fetched)))  # weights come last

    offline = {"HF_HUB_OFFLINE": "1"}
    asked = len(server.requests)
    answers = ask(tmp_path, server.url, case("org/good"), case("org/goood"), case("org/good", "v2"), **offline)
    assert answers[0] == first and len(server.requests) == asked
    assert answers[1]["error"] == answers[2]["error"] == "DataError"
    assert "nearest: org/good" in answers[1]["text"] and "HF_HUB_OFFLINE" in answers[1]["text"]
    assert "revision v2" in answers[2]["text"] and answers[1]["text"].startswith("there is no folder org/goood, and ")

    nobody = "http://127.0.0.1:9"
    away = ask(tmp_path, nobody, case("org/good"), case("org/good", COMMIT), case("org/other"))
    assert away[0]["folder"] == first["folder"] and away[1] == first  # of a commit nothing is asked
    assert away[0]["said"] == [f"{nobody} cannot be reached: org/good (main, {COMMIT[:12]}) is taken from the cache"]
    assert "check the network" in away[2]["text"]
    assert away[2]["text"].startswith(f"there is no folder org/other, and {nobody} cannot be reached")

    shard = next(name for name in wanted if name.startswith("model-00002"))
    (folder / shard).unlink()
    (broken,) = ask(tmp_path, server.url, case("org/good"), **offline)
    assert "not complete" in broken["text"] and shard in broken["text"]
    (broken,) = ask(tmp_path, nobody, case("org/good"))
    assert "cannot be reached" in broken["text"]  # what is there is not all of it


@pytest.mark.slow
def test_gated_absent_and_unusable(server, contents, tmp_path):
    wanted, _ = contents
    good = dict(wanted)
    config = json.loads(good["config.json"])
    repos = {
        "org/gated": good,
        "org/moe": {**good, "config.json": json.dumps({**config, "num_experts": 8}).encode()},
        "org/pickled": {"config.json": good["config.json"], "pytorch_model.bin": b"no"},
        "org/empty": {"README.md": b""},
        "org/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"no"},
        "org/torn": {name: data for name, data in good.items() if not name.startswith("model-00002")},
        "org/spm": {"config.json": good["config.json"], "tokenizer.model": b"x"},
    }
    server.repos |= {name: Repo(files) for name, files in repos.items()}
    server.gated.add("org/gated")
    (tmp_path / "org" / "goodies").mkdir(parents=True)
    (tmp_path / "org" / "goodies" / "config.json").write_text("{}")
    names = ["gated", "absent", "goods", "moe", "pickled", "empty", "adapter", "torn", "../x", "b@d"]
    cases = [case(f"org/{name}") for name in names]
    cases += [case("org/good", "v9"), case("org/spm", None, "tokenizer"), case("org/spm", None, "config")]
    answers = dict(zip([*names, "revision", "spm", "spm config"], ask(tmp_path, server.url, *cases), strict=True))
    text = {name: answer.get("text", "") for name, answer in answers.items()}
    for phrase in (f"{server.url}/org/gated", "hf auth login", "HF_TOKEN"):
        assert phrase in text["gated"]
    assert "no public model" in text["absent"] and "HF_TOKEN" in text["absent"]
    assert "org/goodies" in text["goods"]
    assert "num_experts (8)" in text["moe"]
    assert "pickled weights" in text["pickled"] and "save_pretrained" in text["pickled"]
    assert "no config.json: it is not a transformers model" in text["empty"]
    assert "no config.json: it is an adapter" in text["adapter"] and "give its base model" in text["adapter"]
    assert "model-00002" in text["torn"]
    assert "no revision 'v9'" in text["revision"]
    assert "sentencepiece" in text["spm"] and "save_pretrained" in text["spm"]
    assert answers["b@d"]["error"] == "UsageError" and "ORG/NAME" in text["b@d"]
    assert all("Traceback" not in t for t in text.values())
    assert sorted(os.listdir(answers["spm config"]["folder"])) == ["config.json", "tokenizer.model"]
    assert not any(name.endswith((".safetensors", ".bin")) for name in server.fetched())  # refused before the weights

    (allowed,) = ask(tmp_path, server.url, case("org/gated"), HF_TOKEN="hf_good")
    assert (Path(allowed["folder"]) / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.slow
def test_a_tokenizer_is_fetched_without_weights(server, tmp_path):
    (answer,) = ask(tmp_path, server.url, case("org/good", None, "tokenizer"))
    names = sorted(os.listdir(answer["folder"]))
    assert names == [
        "additional_chat_templates", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert server.fetched()[0].endswith("/tokenizer.json")
    (offline,) = ask(tmp_path, server.url, case("org/good", None, "tokenizer"), HF_HUB_OFFLINE="1")
    assert offline == answer


@pytest.mark.slow
def test_a_download_that_was_cut_off_goes_on_when_run_again(server, contents, tmp_path):
    wanted, _ = contents
    shard = next(name for name in wanted if name.startswith("model-00002"))
    server.cut[shard] = False
    (answer,) = ask(tmp_path, server.url, case("org/good"))
    assert answer["error"] == "DataError" and shard in answer["text"] and "run the same command again" in answer["text"]
    (answer,) = ask(tmp_path, server.url, case("org/good"), HF_HUB_OFFLINE="1")
    assert "not complete" in answer["text"] and shard in answer["text"]
    server.cut.clear()
    server.requests.clear()
    (answer,) = ask(tmp_path, server.url, case("org/good"))
    assert (Path(answer["folder"]) / shard).read_bytes() == wanted[shard]
    assert [path.rsplit("/", 1)[1] for path in server.fetched()] == [shard]  # the others were kept


def test_a_full_disk_is_found_before_a_download(monkeypatch):
    monkeypatch.setattr(hub, "free_bytes", lambda folder: hub.SPACE_LEFT + 4000)
    with pytest.raises(StorageError, match=r"org/absent needs 5,000 bytes more in .* free 1,000 bytes, or set HF_HOME"):
        hub.fetch("org/absent", "main", ["a", "b"], {"a": 2000, "b": 3000, "c": 7})


def test_local_folders_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    assert model_folder("org/name") == Path("org/name")
    with pytest.raises(UsageError, match="--revision v1"):
        model_folder("org/name", "v1")
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        model_folder(str(folder), kind="tokenizer")
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(DataError, match=r"only a sentencepiece tokenizer\.model.*save_pretrained"):
        model_folder(str(folder), kind="tokenizer")
    (folder / "tokenizer.json").write_text("{}")
    assert model_folder(str(folder), kind="tokenizer") == folder
    for name in ("./org/nam", str(tmp_path / "org" / "nam"), "a/b/c", "~/no such folder here"):
        with pytest.raises(DataError, match="there is no folder"):
            model_folder(name)
    with pytest.raises(DataError, match="is a file"):
        model_folder("org/name/tokenizer.json")
