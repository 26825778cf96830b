"""Tests hf:// URLs of models, tokenizers and datasets, with a local server for the Hub's API."""

import json
import logging
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, load_file, save

from praxis_lite import ConfigError
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.experiment import registry
from praxis_lite.host import hub as hub_module
from praxis_lite.host.places import check_upload, local_folder, uploaded
from praxis_lite.inputs import HuggingFaceDataset
from praxis_lite.inputs.sources.files.paths import matching_files
from praxis_lite.inputs.tokenizers import load_tokenizer
from tests.support.commands import praxis
from tests.support.fake_hub import READER, WRITER, FakeHub, client_of, fake_hub
from tests.support.goldens import GOLDENS

LLAMA = GOLDENS / "hf/llama"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with fake_hub() as hub:
        folder = tmp_path_factory.mktemp("data")
        for split, numbers in (("train", range(13)), ("test", range(100, 107))):
            lines = "".join(f"{json.dumps({'n': n})}\n" for n in numbers)
            (folder / f"{split}.jsonl").write_text(lines)
        hub.add("org/data", folder, "datasets")
        hub.add("org/llama", LLAMA)
        hub.add("org/secret", LLAMA, is_private=True)
        hub.add("org/gated", LLAMA, refusal="GatedRepo")
        yield hub


@pytest.fixture
def reader(hub, tmp_path, monkeypatch):
    hub_module._downloaded.cache_clear()
    hub.requests.clear()
    with client_of(hub, monkeypatch, tmp_path / "home"):
        yield hub


# huggingface_hub calls a deprecated function of its HTTP client for large files.
uploads = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.slow
@uploads
def test_a_model_is_imported_from_the_hub_and_uploaded_bitwise_equal(hub, tmp_path, monkeypatch):
    expected = load_file(LLAMA / "model.safetensors")
    repo = hub.add("org/tagged", LLAMA)
    repo.branches["v1"] = repo.branches["main"]
    # The default branch has different weights.
    zeros = save({name: np.zeros_like(x) for name, x in expected.items()})
    repo.commit("main", {**repo.commits[repo.branches["v1"]], "model.safetensors": zeros})
    job = str(tmp_path / "job")
    with client_of(hub, monkeypatch, tmp_path / "home", WRITER):
        praxis("hf", "import", "hf://org/tagged@v1", job)
        praxis("hf", "export", job, "hf://me/llama")
    uploaded_repo = hub.repos["models", "me/llama"]
    files = uploaded_repo.commits[uploaded_repo.branches["main"]]
    assert {name: x.tobytes() for name, x in load(files["model.safetensors"]).items()} == {
        name: x.tobytes() for name, x in expected.items()
    }
    assert json.loads(files["config.json"]) == json.loads((LLAMA / "config.json").read_text())
    (came_from,) = (tmp_path / "job").rglob("came_from.txt")
    assert came_from.read_text() == "org/tagged\n"  # As PEFT expects base_model_name_or_path.


@uploads
def test_an_upload_is_one_commit_that_replaces_the_weights(hub, tmp_path, monkeypatch):
    with client_of(hub, monkeypatch, tmp_path / "home", WRITER):
        for names in (("model.safetensors",), ("model-1-of-2.safetensors", "config.json")):
            with uploaded("hf://me/new@trained", "config.json") as folder:
                for name in names:
                    (folder / name).write_bytes(name.encode())
    repo = hub.repos["models", "me/new"]
    files = repo.commits[repo.branches["trained"]]
    assert {name: x for name, x in files.items() if x} == {x: x.encode() for x in names}
    assert repo.is_private and len(repo.commits) == 3


def test_hf_dir_downloads_no_weights_for_the_config(reader):
    experiment = registry.get_experiment("huggingface.CausalLm")
    config = configured(experiment, ["HF_DIR=hf://org/llama"])
    assert config.run.init_from_huggingface == "hf://org/llama"
    expected = configured(experiment, [f"HF_DIR={LLAMA}"])
    assert config.task.model == expected.task.model
    assert any("config.json" in request for request in reader.requests)
    assert not any("safetensors" in request for request in reader.requests)


def test_a_tokenizer_and_its_ids(reader, tmp_path):
    (tmp_path / "text.txt").write_text("the model, the data, the mesh " * 7)
    local = tmp_path / "bpe"
    praxis("tokenizers", "train", tmp_path / "text.txt", local, "--vocab-size=263")
    reader.add("org/bpe", local)
    ids = load_tokenizer("hf://org/bpe").encode("the mesh").tolist()
    assert ids == load_tokenizer(local).encode("the mesh").tolist()


def test_globs_of_files_on_the_hub(reader):
    (path,) = matching_files("hf://datasets/org/data/tr*.jsonl")
    assert Path(path).read_text().splitlines() == [f'{{"n": {n}}}' for n in range(13)]
    assert not any("test.jsonl" in request for request in reader.requests)
    with pytest.raises(ConfigError, match=r"\*\.csv"):
        matching_files("hf://datasets/org/data/*.csv")


@pytest.mark.slow
@pytest.mark.parametrize("url", ["hf://datasets/org/data", "hf://org/data"])
def test_rows_of_a_dataset_on_the_hub(reader, monkeypatch, tmp_path, url):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    source = HuggingFaceDataset(url, "test")
    assert [source[i]["n"] for i in range(len(source))] == list(range(100, 107))
    # The version is the commit, and not the path of the cache.
    commit = reader.repos["datasets", "org/data"].branches["main"]
    assert commit in source.fingerprint()["version"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://org/lama", "org/lama does not exist .*HF_TOKEN"),
        ("hf://org/secret", "org/secret does not exist .*private"),
        ("hf://org/gated", "org/gated requires .*access"),
        ("hf://org/llama@v7", "v7 has a revision that does not exist"),
        ("hf://llama", "hf://llama is not a valid URL"),
        ("hf://org/llama/config.json", "contains the path 'config.json'"),
    ],
)
def test_errors_before_anything_is_read(reader, url, message):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        local_folder(url, ("config.json",))
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("token", [None, READER])
def test_export_without_permission_fails_before_the_weights_are_read(
    hub, tmp_path, monkeypatch, token
):
    with client_of(hub, monkeypatch, tmp_path / "home", token):
        for url in ("hf://org/llama", "hf://org/new"):
            with pytest.raises(ConfigError, match=f"{url} refuses permission to write .*HF_TOKEN"):
                check_upload(url)
    assert ("models", "org/new") not in hub.repos


@pytest.mark.parametrize("accepts", [False, True], ids=["refused", "silent"])
def test_without_a_network_the_cache_is_used(reader, tmp_path, monkeypatch, caplog, accepts):
    folder = local_folder("hf://org/llama", ("config.json",))
    hub_module._downloaded.cache_clear()
    monkeypatch.setattr(hub_module, "_TIMEOUT_S", 0.3)
    offline = FakeHub()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if accepts:  # Connections succeed, but no request is answered.
            listening.listen()
        offline.endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with client_of(offline, monkeypatch, tmp_path / "home"):
            start = time.monotonic()
            with caplog.at_level(logging.WARNING, "praxis_lite"):
                assert local_folder("hf://org/llama", ("config.json",)) == folder
            assert "cached copy of hf://org/llama" in caplog.text
            with pytest.raises(ConfigError, match=r"org/other .*cannot be reached.*HF_ENDPOINT"):
                local_folder("hf://org/other", ("config.json",))
            with pytest.raises(ConfigError, match=r"org/other .*cannot be reached.*HF_ENDPOINT"):
                check_upload("hf://org/other")
            assert time.monotonic() - start < 10
