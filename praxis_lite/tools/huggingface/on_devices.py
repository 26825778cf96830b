"""A model of Hugging Face on the devices that a command line means."""

import os
from collections.abc import Sequence
from typing import Literal

import fiddle as fdl

from praxis_lite.core.sharding.mesh import attached_mesh, filled_mesh, make_mesh, simulate_devices
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.run.config.class_attributes import configured
from praxis_lite.run.experiment import registry
from praxis_lite.tools.huggingface.model import EXPERIMENT, HuggingFaceModel, load


def load_on_devices(
    directory: str | os.PathLike[str], mesh: MeshConfig | Literal["attached", "job"], *,
    settings: Sequence[str] = (),
) -> HuggingFaceModel:
    """Returns a model of Hugging Face; see `load`.

    Args:
      mesh: as of `praxis_lite.load`; "job" is that of the experiment huggingface.CausalLm with the
        settings. Simulated if there are no accelerators and JAX has not started yet.
    """
    if isinstance(mesh, str):
        config = fdl.build(configured(registry.get_experiment(EXPERIMENT), settings).mesh)
        mesh = attached_mesh(config) if mesh == "attached" else config
    mesh = filled_mesh(mesh)
    simulate_devices(mesh.num_devices)
    return load(directory, make_mesh(mesh), settings=settings)
