"""The course of a check: a single device, then each mesh, then all other parts of a job."""

from collections.abc import Sequence

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.mesh import attached_devices, filled_mesh
from praxis_lite.tools.testing.bisect import REFUSALS, first_difference
from praxis_lite.tools.testing.certificate import Certificate, mesh_name
from praxis_lite.tools.testing.check import Check, Differs
from praxis_lite.tools.testing.meshes import Shape, chosen_meshes, reduced
from praxis_lite.tools.testing.parts import data, own_mesh

# What a check is made of, in its order.
PARTS = ("data", "initial weights", *own_mesh.PARTS)
FEW_STEPS = 3


def run(check: Check, meshes: Sequence[Shape] | None) -> Certificate:
    """Returns the certificate; it ends at the first mesh or property that differs.

    Args:
      meshes: shapes to check on, with `check.num_steps` steps on the experiment's own, FEW_STEPS
        on the others; None: those of `chosen_meshes`.
    """
    num_devices, platform = attached_devices()
    check.note(f"{num_devices} {platform} devices, jax {jax.__version__}")
    mesh = filled_mesh(check.job.mesh, num_devices)
    smaller = reduced(mesh, num_devices)
    if smaller != mesh.shape:
        check.remark(
            f"The experiment's mesh {mesh.shape} is larger than the {num_devices} "
            f"devices; it is checked as {smaller}."
        )
    shapes = meshes or chosen_meshes(smaller, check.plain_one.layout, num_devices)
    try:
        if check.makes("data"):
            check.note("the data, twice")
            check.add(None, data.repeatable(check.job))
        check.prepare(smaller if smaller in shapes else shapes[-1])
        for shape in shapes:
            _check_mesh(check, shape)
        if check.own_shape in check.meshes:
            own_mesh.check(check, check.meshes[check.own_shape])
    except Differs as found:
        check.note(f"{found.failed[0].what} differs; looking for where")
        check.found.first_difference = first_difference(check, found.mesh, found.failed)
    return check.found


def _check_mesh(check: Check, shape: Shape) -> None:
    name = mesh_name(dict(zip(check.job.mesh.axis_names, shape, strict=True)))
    check.note(f"mesh {name}")
    first = []
    try:
        item = check.on_mesh(shape)
        item.partitioner.train_step.trace(data.structs(check.batches[0]))
        if check.makes("initial weights"):
            first += check.compare_initial(item)
        if check.makes("training"):
            first += check.compare_training(item, 1)
            if shape == check.own_shape:
                first += check.compare_whole_batch(item)
    except REFUSALS as error:
        message = str(error.args[0]).splitlines()[0]
        if shape == check.own_shape:
            raise ConfigError(f"The mesh {name} cannot be checked. {message}") from error
        check.remark(f"The mesh {name} is left out. {message}")
        return
    check.found.meshes[name], check.meshes[shape] = dict(item.mesh.shape), item
    check.add(item, first)
    # The other meshes show in a few steps what they have to show.
    longest = check.num_steps if shape == check.own_shape else min(check.num_steps, FEW_STEPS)
    if check.makes("training") and longest > 1:
        check.note(f"mesh {name}: {longest} steps")
        check.add(item, check.compare_training(item, longest))
