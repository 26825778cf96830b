"""Names of topologies: what they stand for, and what is refused with which words."""

import types

import pytest

from praxis_lite import ConfigError
from praxis_tools.plan import topology as topologies
from praxis_tools.plan.topology import attached_topology, topology_of


def test_simulated_devices_and_a_modeled_cluster():
    actual = topology_of("cpu:8")
    assert (len(actual.devices), actual.num_slices, actual.compiled_for) == (8, 1, "cpu")
    cluster = topology_of("gpu:h100:2x4")
    assert (len(cluster.devices), cluster.num_slices) == (8, 2)
    assert (cluster.devices_per_slice, cluster.chip.name) == (4, "h100")
    assert cluster.compiled_for == "cpu"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v9:2x2", "'v9'.*v5e, v6e.*16x16.*gpu:h100:4x8.*cpu:8"),
        ("v5e", "--topology=v5e.* ''"),
        ("v5e:4xfour", "'4xfour'"),
        ("v5e:4x4x4", "v5e:4x4x4.* 2 "),
        ("gpu:h10:1x8", "'h10'.*h100"),
        ("gpu:h100:8", "'8'.*1"),
        ("cpu:2x2", "'2x2'.*2"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_those_that_do(name, words):
    with pytest.raises(ConfigError, match=words):
        topology_of(name)


def test_without_libtpu_the_command_to_install_it_is_said(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'praxis_lite\[plan\]'"):
        topology_of("v5e:16x16")


def test_slices_are_of_tpus():
    with pytest.raises(ConfigError, match="--num_slices=2.*GPUs"):
        topology_of("cpu:8", 2)


def device(kind, platform, coords=None, process=0):
    return types.SimpleNamespace(
        device_kind=kind, platform=platform, coords=coords, process_index=process, slice_index=0
    )


def test_attached_devices_by_their_kind():
    torus = [device("TPU v5 lite", "tpu", (x, y, 0)) for x in range(2) for y in range(4)]
    actual = attached_topology(torus)
    assert (actual.name, actual.dims, actual.compiled_for) == ("v5e:2x4", (2, 4), "tpu")
    gpus = attached_topology([device("NVIDIA H100 80GB HBM3", "gpu")] * 8)
    assert (gpus.chip.name, gpus.compiled_for) == ("h100", "gpu")
    # Slower variants, and a part of a GPU.
    for kind in ("Something else", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert attached_topology([device(kind, "gpu")]) is None


@pytest.mark.parametrize(
    ("chip", "dims", "expected"),
    [
        ("v5e", (16, 16), (True, True)),
        ("v6e", (8, 16), (False, True)),
        ("v5e", (4, 8), (False, False)),
        ("v5p", (4, 4, 4), (True, True, True)),
        ("v5p", (12, 16, 20), (True, True, True)),
        # Part of a cube of 4 x 4 x 4: the optical switches are at the cube's faces.
        ("v5p", (2, 4, 4), (False, False, False)),
        ("v4", (2, 2, 1), (False, False, False)),
        ("tpu7x", (4, 4, 8), (True, True, True)),
    ],
)
def test_where_links_join_the_ends_of_a_torus(chip, dims, expected):
    assert topologies.CHIPS[chip].wraps(dims) == expected
