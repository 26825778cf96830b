"""examples/minimal.py runs, learns, goes on where it was killed, and is as short as README says."""

import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINIMAL = ROOT / "examples/minimal.py"
# Makes eight steps of the example in the folder argv[1], saves the fifth, and is killed.
KILLED = f"""
import os, runpy, signal, sys, time
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("minimal", {str(MINIMAL)!r})
minimal = module_from_spec(spec)
spec.loader.exec_module(minimal)
minimal.simulate_devices(8)
minimal.SAVE_EVERY = 5
batch = minimal.batch

def last_batch(step):
    if step == 8:
        while not os.path.exists(os.path.join(sys.argv[1], "5")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(step)

minimal.batch = last_batch
minimal.train(minimal.partitioner_on(1, 4, 2), sys.argv[1])
"""


@pytest.mark.slow
def test_it_prints_what_is_split_how_and_learns_as_one_device_does(capsys):
    runpy.run_path(str(MINIMAL), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(r"blocks/0/up +\(13, 37\) +\(16, 38\)  data, mdl +304 of +1924 bytes", out)
    assert re.search(r"blocks/0/up +\(13, 37\) +\(15, 38\)  data, mdl +380 of +1924 bytes", out)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 20
    assert "one device: losses differ by at most" in out


@pytest.mark.slow
def test_killed_it_goes_on_on_another_mesh_to_the_losses_of_one_device(tmp_path, monkeypatch):
    killed, whole = str(tmp_path / "killed"), str(tmp_path / "whole")
    ended = subprocess.run([sys.executable, "-c", KILLED, killed], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL and os.listdir(killed) == ["5"]
    spec = importlib.util.spec_from_file_location("minimal", MINIMAL)
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    monkeypatch.setattr(minimal, "SAVE_EVERY", 5)
    after, weights = minimal.train(minimal.partitioner_on(1, 3, 2), killed, num_steps=11)
    expected, expected_weights = minimal.train(minimal.partitioner_on(1, 1, 1), whole, num_steps=11)
    assert list(after) == list(range(5, 11))
    assert after == pytest.approx({step: expected[step] for step in after}, abs=1e-6)
    for path, weight in weights.items():
        assert abs(weight - expected_weights[path]).max() < 1e-5, path


@pytest.mark.slow
def test_it_is_short_and_needs_the_core_and_checkpoints_alone():
    source = MINIMAL.read_text(encoding="utf-8")
    assert source.count("\n") <= 170
    code = f"import runpy, sys; runpy.run_path({str(MINIMAL)!r}); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    loaded = set(ran.stdout.decode().split())
    assert {"praxis_lite.core.partitioner.partitioner", "praxis_lite.checkpoints"} <= loaded
    of_an_experiment = (
        "experiment",
        "trainer",
        "job.command",
        "config.build",
        "config.allowed_names",
    )
    assert not loaded & {
        "fiddle",
        "tensorflow",
        "grain",
        "praxis_tools",
        *(f"praxis_lite.{name}" for name in of_an_experiment),
    }
    assert "examples/minimal.py" in (ROOT / "docs/reading_order.md").read_text(encoding="utf-8")
