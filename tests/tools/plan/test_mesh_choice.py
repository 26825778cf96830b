"""The mesh for the devices that there are: legal, within memory, near the experiment's, stable."""

import functools
import math
import os
import re
import subprocess
import sys
import types

import jax
import pytest

from praxis_lite.config.build import build
from praxis_lite.core.errors import OutOfMemory
from praxis_lite.core.sharding.mesh import make_mesh
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.experiment import registry
from praxis_lite.host import host_memory
from praxis_lite.inputs.pipeline_checks import checked_spec
from praxis_lite.trainer.checks.memory import check_fits
from praxis_lite.trainer.job_on_mesh import partitioner_on
from praxis_tools.plan.search import mesh_choice
from praxis_tools.plan.search.mesh_choice import choose_mesh
from tests.support.job_runs import CHECKOUT


@functools.cache
def job_of(name):
    return build(registry.get_experiment(name)().config())


def chosen(name, num_devices):
    return choose_mesh(job_of(name), jax.devices()[:num_devices])


def bytes_on(name, shape):
    """Returns the bytes of the state of training on one device of a mesh."""
    job = job_of(name)
    config = MeshConfig(ici_mesh_shape=shape, axis_names=job.mesh.axis_names)
    layout = partitioner_on(job, make_mesh(config)).layout
    return sum(leaf.bytes_per_device for leaf in layout.leaves())


def check_legal(name, num_devices):
    """Checks that a step can be traced on the chosen mesh; returns the mesh."""
    job, devices = job_of(name), jax.devices()[:num_devices]
    config = choose_mesh(job, devices)
    assert config.num_devices == num_devices and config.axis_names == job.mesh.axis_names
    partitioner = partitioner_on(job, make_mesh(config, devices))
    check_fits(partitioner.layout, partitioner.mesh, "train")
    partitioner.train_step.trace(checked_spec(job.datasets["train"], "datasets.train"))
    return config


def test_the_mesh_for_seven_devices_is_legal():
    assert sorted(check_legal("explicit.DigitsFsdp", 7).shape)[-1] == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm.Synthetic", "moe.Synthetic", "pipelined.Synthetic"])
def test_the_mesh_for_six_devices_is_legal(name):
    check_legal(name, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(registry.list_experiments()))
def test_the_mesh_of_every_experiment_for_some_devices_is_legal(name):
    if not name.startswith("python_texts"):  # Its data are prepared by a command of its own.
        for num_devices in range(1, 9):
            check_legal(name, num_devices)


def test_rows_that_the_devices_do_not_divide_cost_what_is_filled_up(monkeypatch):
    # Without a network only the busiest device counts: 16 rows over five devices are 4 of 3.2.
    free = types.SimpleNamespace(
        name="cpu",
        peak=lambda: 1.0,
        link_bandwidth=1e30,
        torus_dims=0,
        hbm_bandwidth=1e30,
        hbm_bytes=math.inf,
    )
    ranked = {
        item.mesh.shape: item.seconds
        for item in mesh_choice._rank_candidates(job_of("lm.Synthetic"), jax.devices()[:5], free)
    }
    assert set(ranked) == {(1, 1, 5), (1, 5, 1), (5, 1, 1)}
    whole = mesh_choice._rank_candidates(job_of("lm.Synthetic"), jax.devices()[:1], free)[0].seconds
    assert ranked[5, 1, 1] / whole == pytest.approx(4 / 16, rel=1e-6)
    # 32 model dims over five devices are 35 on them.
    assert 4 / 16 < ranked[1, 5, 1] / whole < 4 / 16 * 35 / 32


def test_the_sizes_of_a_model_are_guessed_from_its_weights():
    job = job_of("lm.Synthetic")
    specs = job.task.model.weight_specs()
    mesh = MeshConfig(ici_mesh_shape=(1, 2, 1))
    shape, _ = mesh_choice._formula_inputs(job.task, specs, mesh, rows=16, tokens_per_row=32)
    assert (shape.model_dims, shape.hidden_dims, shape.num_layers) == (32, 128, 2)


def test_equally_fast_meshes_are_chosen_by_their_distance_from_the_experiments_own(monkeypatch):
    monkeypatch.setattr(mesh_choice, "step_seconds", lambda *given: 1.0)
    assert chosen("lm.Synthetic", 8).shape == (1, 4, 2)
    assert chosen("lm.Synthetic", 6).shape == (1, 3, 2)
    assert chosen("lm.Synthetic", 7).shape == (1, 7, 1)
    assert chosen("moe.Synthetic", 8).shape == (2, 2, 2)


def test_a_mesh_whose_state_does_not_fit_is_passed_over(monkeypatch):
    whole, split = bytes_on("lm.Synthetic", (8, 1, 1)), bytes_on("lm.Synthetic", (1, 8, 1))
    assert split < whole / 5
    # The fastest has copies.
    monkeypatch.setattr(
        mesh_choice, "step_seconds", lambda shape, layout, chip: 1.0 / layout.replica
    )
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 8 * whole)
    assert chosen("lm.Synthetic", 8).shape == (8, 1, 1)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2.5 * whole)
    actual = chosen("lm.Synthetic", 8).shape
    assert actual[0] == 2 and 8 * bytes_on("lm.Synthetic", actual) <= 2.5 * whole


def test_if_no_mesh_fits_the_error_says_how_many_devices_hold_the_state(monkeypatch):
    least = min(bytes_on("lm.Synthetic", shape) for shape in [(1, 5, 1), (1, 1, 5)])
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 5 * least / 2.5)
    with pytest.raises(OutOfMemory, match="5 devices.*--min_processes") as caught:
        chosen("lm.Synthetic", 5)
    assert int(re.search(r"At least (\d+) ", str(caught.value))[1]) == 13


def test_slices_stay_along_their_axis_if_they_divide_it():
    def on(shape, num_slices):
        config = MeshConfig(ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(1, 2, 1))
        mesh = mesh_choice._mesh(config, shape, num_slices, is_torus=True)
        assert mesh.shape == shape and mesh.allow_split_physical_axes
        return tuple(mesh.ici_mesh_shape), mesh.dcn_mesh_shape

    assert on((1, 6, 2), 3) == ((1, 2, 2), (1, 3, 1))
    assert on((1, 4, 3), 3) == ((1, 4, 3), None)
    assert on((1, 7, 1), 1) == ((1, 7, 1), None)
    devices = [types.SimpleNamespace(slice_index=k // 4, process_index=0) for k in range(12)]
    config = MeshConfig(ici_mesh_shape=(1, 4, 1), dcn_mesh_shape=(1, 2, 1))
    assert mesh_choice._num_slices(config, devices) == 3
    assert mesh_choice._num_slices(config, devices[:-1]) == 1  # A slice that lost a device.


@pytest.mark.nightly
def test_every_process_chooses_the_same_whatever_its_hashes():
    names, numbers = ("classify.Spirals", "explicit.DigitsFsdp", "moe.Synthetic"), (6, 7, 8)
    program = (
        "from praxis_lite.core.sharding.mesh import simulate_devices\n"
        "simulate_devices(8)\n"
        "from tests.tools.plan.test_mesh_choice import chosen\n"
        f"print([chosen(name, n).shape for name in {names} for n in {numbers}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=CHECKOUT,
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(CHECKOUT)},
        check=True,
    )
    expected = [chosen(name, n).shape for name in names for n in numbers]
    assert done.stdout.splitlines()[-1] == str(expected)
