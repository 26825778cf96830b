"""The mesh of an elastic job: its own, that of `mesh_for`, or the plan's; and its record."""

import dataclasses

import fiddle as fdl
import pytest

from praxis_lite.config.build import build
from praxis_lite.config.config_json import config_lines
from praxis_lite.config.experiment_overrides import experiment_and_config
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.experiments import lm
from praxis_lite.job.processes.membership import Membership
from praxis_tools.elastic.mesh_of_devices import fit_job_to_devices

PART = Membership(
    generation=3,
    member=0,
    members=(0,),
    num_slots=1,
    coordinator="",
    key=b"",
    lost_status=75,
)


class Asked(lm.Synthetic):
    """Says what its attribute does, and by how many it was asked."""

    ANSWER = None
    TIMES = 1

    def mesh_for(self, num_devices):
        return self.ANSWER and self.ANSWER(num_devices * self.TIMES)


def meshes(answer, *settings, chosen=None):
    """Returns the mesh of the job, and that of the config, for the eight devices that there are."""

    def choose(job, devices):
        assert chosen is not None, "nothing was to be chosen"
        assert len(devices) == 8
        return dataclasses.replace(job.mesh, ici_mesh_shape=chosen)

    experiment = type("Asked", (Asked,), {"ANSWER": staticmethod(answer) if answer else None})
    made, config = experiment_and_config(experiment, settings)
    launched = LaunchedConfig(config, "zoo.Asked", mesh_for=made.mesh_for)
    job = fit_job_to_devices(PART, build(config), launched, choose)
    assert build(config).mesh == job.mesh
    return job.mesh, config


def of_shape(*shape, **settings):
    return lambda num_devices: fdl.Config(MeshConfig, ici_mesh_shape=shape, **settings)


def test_the_experiments_own_mesh_stays_if_it_has_as_many_devices():
    assert meshes(of_shape(1, 1, 8))[0].shape == (1, 4, 2)
    mesh, config = meshes(of_shape(1, 1, 8), "mesh.ici_mesh_shape=(1,-1,4)")
    assert tuple(mesh.ici_mesh_shape) == tuple(config.mesh.ici_mesh_shape) == (1, -1, 4)


def test_mesh_for_is_asked_on_the_instance_that_set_has_changed():
    mesh, config = meshes(
        lambda num: fdl.Config(MeshConfig, ici_mesh_shape=(1, num // 3, 1)),
        "mesh.ici_mesh_shape=(1,7,1)",
        "TIMES=3",
        "mesh.compiler_options={'cpu': {'xla_cpu_enable_fast_math': False}}",
    )
    assert mesh.shape == (1, 8, 1)
    assert mesh.compiler_options == {"cpu": {"xla_cpu_enable_fast_math": False}}
    assert "mesh.ici_mesh_shape=1,8,1" in config_lines(config)


def test_without_an_answer_the_plan_chooses_and_all_else_stays():
    mesh, config = meshes(None, "mesh.ici_mesh_shape=(1,7,1)", chosen=(2, 2, 2))
    _, before = experiment_and_config(lm.Synthetic, ["mesh.ici_mesh_shape=(2,2,2)"])
    assert mesh.shape == (2, 2, 2)
    assert config_lines(config) == config_lines(before)
    # A size that the others do not divide: there is no such mesh.
    assert meshes(None, "mesh.ici_mesh_shape=(3,-1,1)", chosen=(1, 8, 1))[0].shape == (1, 8, 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda num: MeshConfig(ici_mesh_shape=(1, num, 1)), r"mesh_for\(8\) returns .*MeshConfig"),
        (lambda num: (1, num, 1), r"mesh_for\(8\) returns .*\(1, 8, 1\).*, but expected a config"),
        (lambda num: fdl.Config(dict, a=num), "expected a config of a MeshConfig"),
        (of_shape(1, 4, 1), r"ici_mesh_shape \(1, 4, 1\).*, but expected 8 devices"),
        (of_shape(3, -1, 1), r"ici_mesh_shape \(3, -1, 1\).*, but expected 8 devices"),
        (of_shape(8, axis_names=("data",)), r"axes \('data',\), but.*\('replica', 'data', 'mdl'"),
        (of_shape(1, 8), "mesh.ici_mesh_shape"),
    ],
)
def test_a_wrong_answer_of_mesh_for_is_an_error(answer, message):
    with pytest.raises(ConfigError, match=message):
        meshes(answer, "mesh.ici_mesh_shape=(1,7,1)")
