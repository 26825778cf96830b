"""Hostile checkpoints: refused in one paragraph; nothing outside is touched, nothing aborts."""

import functools
import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import MeshConfig, StateLayout, make_mesh
from praxis_lite.run.checkpoints.checkpoints import Checkpoints
from praxis_lite.run.checkpoints.digest import digest_of
from tests.run.checkpoints import looking
from tests.run.checkpoints.hostile_steps import (
    CASES,
    HARMLESS,
    MANIFEST_MAGIC,
    NODE_MAGIC,
    body_of,
    commit,
    encoded,
    make,
    put_node,
)
from tests.run.checkpoints.saved_steps import SPECS, save_steps, true_state

READ = """
from praxis_lite.run.checkpoints.digest import digest_of
from praxis_lite.run.checkpoints.steps import step_files

def read(step_dir):
    if wrong := step_files.verify(step_dir):
        raise ConfigError("; ".join(wrong))
    digest_of(step_dir)
"""
look = functools.partial(looking.look, READ)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return save_steps(tmp_path_factory.mktemp("good") / "checkpoints", {3: true_state()}) / "3"


@pytest.fixture(scope="module")
def steps(good, tmp_path_factory):
    """The step of each case, by its name."""
    folder = tmp_path_factory.mktemp("hostile")
    result = {name: make(name, good, folder) for name in CASES}
    for name in ("manifest.json", "commit.json"):
        (result["format_1"] / name).unlink()
    return result


@pytest.fixture(scope="module")
def looks(good, steps):
    return look(good, steps.values())


def test_there_are_many_cases():
    assert len(CASES) + len(HARMLESS) >= 74


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_step_is_refused_in_words(steps, looks, name):
    told = looks[str(steps[name])]
    assert told is not None, "the process ended"
    assert told["how"] == "refused", told["words"]
    assert re.search(CASES[name][1], told["words"]), told["words"]
    assert "\n" not in told["words"] and len(told["words"]) < 1500
    assert told["done"] == [] and told["imported"] == []
    step_dir = str(steps[name])
    for path in told["opened"]:
        inside = os.path.normpath(path).startswith(step_dir) and ".." not in path.split("/")
        assert inside or path.startswith(("/proc/", "/sys/fs/cgroup/")), path


def test_what_lies_beside_the_arrays_is_not_read(good, tmp_path):
    steps = [make(name, good, tmp_path) for name in HARMLESS]
    for step_dir, told in look(good, steps).items():
        assert told["how"] == "accepted", told
        assert told["done"] == [] and told["imported"] == []
        assert digest_of(Path(step_dir)) == digest_of(good)


def test_a_restore_refuses_them_too(steps, tmp_path):
    """By the error that `main` prints as one paragraph."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), true_state())
    layout = StateLayout(shapes, SPECS, dict(mesh.shape))
    restored = []
    for name, step_dir in steps.items():
        before = tree_of(step_dir.parents[1])
        with Checkpoints(step_dir.parent, note=lambda line: None) as checkpoints:
            try:
                checkpoints.restore(layout, mesh, step=3)
                restored.append(name)
            except ConfigError as error:
                assert "\n" not in str(error), name
        assert tree_of(step_dir.parents[1]) == before, name
    assert restored == []


def tree_of(folder):
    """Returns the files of a folder: names, sizes, times of change; outside the step too."""
    actual = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        actual[str(path)] = status.st_size, status.st_mtime_ns, status.st_mode
    return actual


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not there")
def test_nothing_outside_is_opened_by_tensorstore_either(good, steps, tmp_path):
    """TensorStore's own calls are no events of Python's."""
    trace = tmp_path / "trace"
    names = [n for n in CASES if n.startswith(("link", "data_files", "base", "absolute", "files"))]
    command = ["strace", "-f", "-qq", "-e", "trace=open,openat,creat", "-o", str(trace)]
    probe = subprocess.run([*command, "true"], capture_output=True)
    if probe.returncode != 0:
        pytest.skip("strace may not trace here")
    look(good, [steps[name] for name in names], before=command)
    text = trace.read_text()
    assert text.count("manifest.ocdbt") >= 2  # It is seen what TensorStore opens.
    assert "/outside/" not in text and "/etc/hostname" not in text and "/etc/passwd" not in text


def mutated(rng, data):
    """Returns the bytes with one to eight random changes."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(4)
        if how == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at : at + 1] = b"\xff" * rng.choice([1, 2, 4, 9]) + bytes([rng.randrange(2)])
        elif how == 2:
            del data[at : at + rng.randrange(1, 9)]
        else:
            data[at : at + 1] = rng.randbytes(rng.randrange(1, 9))
    return bytes(data)


def mutate(rng, step_dir):
    """Changes one of OCDBT's own files at random, and makes its checksum fit."""
    item = step_dir / rng.choice(["mdl_vars", "opt_states"])
    node = next((item / "d").iterdir())
    path = rng.choice([item / "manifest.ocdbt", node, node, node])
    magic = MANIFEST_MAGIC if path.name == "manifest.ocdbt" else NODE_MAGIC
    new = encoded(magic, mutated(rng, body_of(path.read_bytes())))
    if path == node:
        put_node(item, new)
    else:
        path.write_bytes(new)


def fuzz(good, folder, count, seed):
    """Returns how many of the mutations were refused, and accepted."""
    manifest = json.loads((good / "manifest.json").read_text())
    result = []
    for number in range(count):
        step_dir = folder / str(number) / "3"
        shutil.copytree(good, step_dir)
        mutate(random.Random(f"{seed} {number}"), step_dir)
        commit(step_dir, dict(manifest))
        result.append(step_dir)
    actual = look(good, result)
    for step_dir in result:
        told = actual[str(step_dir)]
        assert told is not None, f"the process ended at {step_dir}"
        assert told["how"] != "other", told["words"]
    hows = [told["how"] for told in actual.values()]
    return hows.count("refused"), hows.count("accepted")


@pytest.mark.slow
def test_random_changes_are_refused_or_read(good, tmp_path):
    refused, accepted = fuzz(good, tmp_path, 100, seed=2)
    assert refused > 60 and refused + accepted == 100


def test_the_good_step_is_good(good):
    assert look(good, [good])[str(good)]["how"] == "accepted"
    assert len(digest_of(good)) == 32
