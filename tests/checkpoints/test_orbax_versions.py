"""Our checkpoints that two minor versions of Orbax wrote: read, and saved to."""

import json
import zipfile

import jax
import numpy as np
import pytest

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.manifest import MANIFEST_JSON
from praxis_lite.core import StateLayout
from tests.checkpoints.saved_steps import SPECS, save_steps, true_state
from tests.checkpoints.test_checkpoints import assert_same_true_values
from tests.support.goldens import GOLDENS

WRITTEN = sorted((GOLDENS / "own_checkpoints").glob("orbax-*.zip"))


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
@pytest.mark.parametrize("shape", [(1, 2, 4), (1, 3, 2), (1, 1, 1)])
def test_a_step_written_with_it_is_restored_to_the_bit(path, shape, mesh_of, tmp_path):
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path)
    versions = json.loads((tmp_path / "3" / MANIFEST_JSON).read_text())["versions"]
    assert versions["orbax-checkpoint"] == path.stem.removeprefix("orbax-")
    save_steps(tmp_path, {4: true_state()})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), true_state())
    mesh = mesh_of(*shape)
    layout = StateLayout(shapes, SPECS, dict(mesh.shape))
    with Checkpoints(tmp_path) as checkpoints:
        for step in (3, 4):
            restored = checkpoints.restore(layout, mesh, step=step)
            assert restored.step == step
            expected = true_state()
            assert_same_true_values(restored.state.mdl_vars, expected.mdl_vars)
            assert_same_true_values(restored.state.opt_states, expected.opt_states)
            assert restored.data == ({"next_batch": np.int64(5)} if step == 3 else {})
