"""Checkpoints of `orbax.checkpoint.v1`, and others in Zarr 3: a job begins with their weights."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import pytest
import tensorstore as ts
from flax import nnx

from praxis_lite import CheckpointLoadingRules, ConfigError
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.nnx_checkpoint import NnxCheckpoint
from praxis_lite.checkpoints.init.planning import plan_init
from praxis_lite.checkpoints.nnx import mdl_vars_from_nnx
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import NnxModel
from tests.checkpoints.test_init_from_checkpoint import init
from tests.tools.orbax_v1 import v1, write_sharded
from tests.tools.test_nnx import LOAD, Net, partitioner, wanted_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, and folders of all kinds that v1 and Zarr 3's other writers make of it."""
    with nnx.use_eager_sharding(False):
        model = Net(rngs=nnx.Rngs(3))
    model(np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32))
    model.eval()
    folder, state = tmp_path_factory.mktemp("v1"), nnx.state(model)
    pure = nnx.to_pure_dict(state)
    v1.save(folder / "state", state)
    v1.save(folder / "pure", pure | {"step": np.asarray(3), "name": "x", "rate": 2.5})
    with v1.Training(folder / "steps") as checkpointer:
        for step in (7, 9):
            checkpointer.save(step, jax.tree.map(lambda x, n=step: x + (n - 9), _weights(pure)))
    v1.save_checkpointables(folder / "several", {"model": pure, "meta": {"a": 1}})
    v1.save_checkpointables(folder / "single", {"model": pure})
    for zarr3 in (True, False):
        v1.save(folder / f"files zarr3={zarr3}", pure, use_ocdbt=False, use_zarr3=zarr3)
    handler = v0.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with v0.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder / "zarr3", pure)
    with v0.Checkpointer(v0.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder / "manager_of_files" / "step_2", pure)
    with v0.CheckpointManager(folder / "manager") as manager:
        manager.save(2, args=v0.args.StandardSave(pure))
        manager.wait_until_finished()
    (folder / "state" / "state").rename(folder / "state" / "pytree")
    return model, folder


def _weights(tree):
    """Returns the tree without keys of random streams, to which nothing can be added."""
    return {name: x for name, x in tree.items() if name != "dropout"}


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("state", (1, 4, 2)),
        ("zarr3", (1, 1, 1)),
        pytest.param("steps", (1, 2, 4), marks=pytest.mark.slow),
        pytest.param("files zarr3=True", (1, 4, 2), marks=pytest.mark.slow),
    ],
)
def test_a_job_begins_with_the_weights_on_any_mesh(saved, form, shape, mesh_of):
    model, folder = saved
    rules = {str(folder / form): CheckpointLoadingRules(**LOAD)}
    actual, plan = init(rules, partitioner(mesh_of(*shape)))
    expected = wanted_of(model)
    assert len(expected) == 11
    for path, x in expected.items():
        np.testing.assert_array_equal(actual[path], x, err_msg=path)
    assert ("step 9 in " in plan.summary()[0]) == (form == "steps")


@pytest.mark.parametrize(
    "form",
    [
        "state",
        "pure",
        "single",
        "several/model",
        "zarr3",
        "manager",
        "manager/2/default",
        "files zarr3=True",
        "files zarr3=False",
        "files zarr3=True/state",
        "manager_of_files",
    ],
)
def test_a_model_in_hand_has_the_weights(saved, form):
    model, folder = saved
    ours = NnxModel(Net)
    x = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mdl_vars = mdl_vars_from_nnx(ours, folder / form)
    np.testing.assert_array_equal(ours.module(mdl_vars)(x), model(x))


def test_scalars_and_strings_are_reported_as_left_out(saved, mesh_of):
    with pytest.warns(
        UserWarning, match=r"ignored values.*: rate, step, the strings in _strings.json"
    ):
        mdl_vars_from_nnx(NnxModel(Net), saved[1] / "pure")
    key = str(saved[1] / "pure")
    layout = partitioner(mesh_of(1, 1, 1)).layout
    plan = plan_init(layout, {key: CheckpointLoadingRules(**LOAD)})
    line = next(line for line in plan.summary() if line.startswith("left out"))
    assert line.startswith(f"left out of {key}: ") and "rate, step, the strings" in line


def test_a_step_is_chosen_by_number_and_the_latest_otherwise(saved, mesh_of):
    model, folder = saved
    layout, key = partitioner(mesh_of(1, 1, 1)).layout, str(folder / "steps")
    for step, expected in ((7, 7), (None, 9)):
        rules = CheckpointLoadingRules(**LOAD, step=step, load_step=True)
        plan = plan_init(layout, {key: rules})
        assert plan.step[0] == expected
        weights = mdl_vars_from_nnx(NnxModel(Net), folder / "steps", step=step)
        np.testing.assert_array_equal(
            weights["params"]["scale"], model.scale[...] + np.float32(expected - 9)
        )
    for step in (8, "best"):
        with pytest.raises(ConfigError, match=rf"no step '?{step}'?; it has 7, 9"):
            plan_init(layout, {key: CheckpointLoadingRules(**LOAD, step=step)})


def test_several_trees_are_refused_by_their_names(saved):
    with pytest.raises(ConfigError, match=r"meta, model.*as .*/several/meta"):
        mdl_vars_from_nnx(NnxModel(Net), saved[1] / "several")


def test_folders_without_a_checkpoint_are_refused(saved, tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "orbax.checkpoint").touch()
    for name, words in (("none", "no Orbax arrays"), ("absent", "neither an Orbax checkpoint")):
        with pytest.raises(ConfigError, match=words):
            mdl_vars_from_nnx(NnxModel(Net), tmp_path / name)


def test_the_steps_of_a_job_are_not_taken_for_orbaxs(tmp_path, mesh_of):
    ours = partitioner(mesh_of(1, 1, 1))
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        state = ours.init(jax.random.key(0))
        checkpoints.save(3, state, ours.layout, {})
    for folder in (tmp_path, tmp_path / "3"):
        assert not NnxCheckpoint.is_at(folder)


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int4",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
    ],
)
def test_every_dtype_is_read_as_it_was_saved(dtype, tmp_path):
    with jax.enable_x64(True):
        x = np.arange(6).reshape(3, 2).astype(np.dtype(dtype))
        v1.save(tmp_path / "x", {"a": x})
    actual = NnxCheckpoint(tmp_path / "x").arrays()["a"].read()
    assert actual.dtype == x.dtype
    np.testing.assert_array_equal(actual, x)


def test_shards_with_inner_chunks_are_whole(tmp_path):
    """Orbax's have one each; other writers of the format, TensorStore here, make many."""
    x = np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32)
    write_sharded(tmp_path, x, shard=[4, 12], inner=[2, 3])
    array = NnxCheckpoint(tmp_path).arrays()["a"]
    assert array.array.chunk_layout.read_chunk.shape == (2, 3)
    np.testing.assert_array_equal(array.read(), x)
    np.testing.assert_array_equal(array.read(slice(3, 5)), x[3:5])


def test_a_missing_chunk_is_an_error(tmp_path):
    """TensorStore alone would read zeros."""
    write_sharded(tmp_path, np.ones((8, 24), np.float32), shard=[4, 12], inner=[2, 3])
    kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/"}
    ts.KvStore.open(kvstore).result().write("a/c/1/0", None).result()
    with pytest.raises(ConfigError, match="a has 3 chunks instead of 4"):
        NnxCheckpoint(tmp_path).arrays()


def test_a_model_of_bfloat16_and_scalars_is_read(tmp_path):
    class Scaled(nnx.Module):
        def __init__(self, *, rngs):
            self.scale = nnx.Param(jnp.asarray(3.0, jnp.bfloat16))
            self.layer = nnx.Linear(3, 5, param_dtype=jnp.bfloat16, rngs=rngs)

    model = Scaled(rngs=nnx.Rngs(0))
    v1.save(tmp_path / "x", nnx.state(model))
    actual = mdl_vars_from_nnx(NnxModel(Scaled), tmp_path / "x")["params"]
    jax.tree.map(np.testing.assert_array_equal, actual, nnx.to_pure_dict(nnx.state(model)))
    assert actual["scale"].shape == ()
