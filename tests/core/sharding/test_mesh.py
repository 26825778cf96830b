"""Meshes from ICI and DCN shapes, with Auto axes; settings that cannot be are refused."""

import os
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from praxis_lite import ConfigError
from praxis_lite.core import MeshConfig, attached_mesh, make_mesh, simulate_devices


def test_a_mesh_has_the_default_axes_which_are_auto(mesh_of):
    mesh = mesh_of(1, 4, 2)
    assert dict(mesh.shape) == {"replica": 1, "data": 4, "mdl": 2}
    # Under Explicit axes, jax.make_mesh's default, uneven slicing is an error.
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_dcn_shape_multiplies_and_its_slices_are_outermost_on_their_axis():
    config = MeshConfig(ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(1, 2, 1))
    assert config.shape == (1, 4, 2)
    assert config.num_devices == 8
    ids = np.vectorize(lambda device: device.id)(make_mesh(config).devices)
    # Devices 0 to 3 are one slice: rows 0 and 1 of the data axis.
    np.testing.assert_array_equal(ids, [[[0, 1], [2, 3], [4, 5], [6, 7]]])
    config = MeshConfig(ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(1, 1, 2))
    ids = np.vectorize(lambda device: device.id)(make_mesh(config).devices)
    np.testing.assert_array_equal(ids, [[[0, 1, 4, 5], [2, 3, 6, 7]]])


def test_more_devices_than_there_are_is_refused(mesh_of):
    message = "'data': 3, 'mdl': 3.*9.*8.*mesh.ici_mesh_shape"
    with pytest.raises(ConfigError, match=message):
        mesh_of(1, 3, 3)


class Accelerator:
    """As much of a jax.Device as make_mesh looks at before it builds anything."""

    platform = "tpu"


def test_idle_accelerators_are_refused_unless_asked_for():
    devices = [Accelerator()] * 4
    with pytest.raises(ConfigError, match=r"3.*4.*allow_unused_devices"):
        make_mesh(MeshConfig(ici_mesh_shape=(1, 3, 1)), devices)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ici_mesh_shape": (4, 2)}, r"mesh.ici_mesh_shape.*\(4, 2\)"),
        ({"ici_mesh_shape": (1, 0, 2)}, r"mesh.ici_mesh_shape.*\(1, 0, 2\)"),
        ({"ici_mesh_shape": (1, True, 2)}, r"mesh.ici_mesh_shape.*\(1, True, 2\)"),
        ({"ici_mesh_shape": (1, 2.0, 2)}, r"mesh.ici_mesh_shape.*\(1, 2\.0, 2\)"),
        ({"ici_mesh_shape": (1, 1, 1), "dcn_mesh_shape": (2,)}, r"mesh.dcn_mesh_shape.*\(2,\)"),
        ({"ici_mesh_shape": (1, 2), "axis_names": ("data", "data")}, r"\('data', 'data'\)"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        MeshConfig(**settings)


def test_simulating_devices_keeps_collectives_from_waiting_for_each_other(monkeypatch):
    assert jax.device_count() == 8  # JAX has started: what is set here changes no device.
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=somewhere")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("NPROC", "5")
    simulate_devices(3)
    assert int(os.environ["NPROC"]) >= 4 * 3
    flags = "--xla_dump_to=somewhere --xla_cpu_enable_concurrency_optimized_scheduler=false"
    assert os.environ["XLA_FLAGS"] == flags
    monkeypatch.setenv("NPROC", "100003")
    simulate_devices(3)
    assert os.environ["NPROC"] == "100003"
    assert jax.device_count() == 8
    simulate_devices(257)  # As many as can be simulated; whether they do, make_mesh says.
    assert os.environ["XLA_FLAGS"] == flags


def test_a_job_on_a_smaller_mesh_leaves_the_devices_for_a_later_one(monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert jax.config.jax_num_cpu_devices == 8
    counts = []
    monkeypatch.setattr(jax.config, "update", lambda name, count: counts.append(count))
    for count in (3, 11):
        simulate_devices(count)
    assert counts == [8, 11]


def test_what_is_attached_is_all_accelerators_or_one_cpu_device(monkeypatch):
    config = MeshConfig(ici_mesh_shape=(1, 4, 2), dcn_mesh_shape=(2, 1, 1))
    assert attached_mesh(config).shape == (1, 1, 1)
    devices = [types.SimpleNamespace(platform="gpu")] * 3
    monkeypatch.setattr(jax, "devices", lambda: devices)
    actual = attached_mesh(config)
    assert actual.shape == (1, 3, 1) and actual.axis_names == config.axis_names
    devices *= 5
    assert attached_mesh(MeshConfig(ici_mesh_shape=(1, 5, 3))).shape == (1, 5, 3)


def test_a_mesh_after_jax_has_started_says_what_to_call_before(monkeypatch):
    assert jax.device_count() == 8  # JAX has started.
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    simulate_devices(11)  # Too late.
    with pytest.raises(ConfigError, match=r"8.*simulate_devices\(11\)"):
        make_mesh(MeshConfig(ici_mesh_shape=(1, 11, 1)))
