"""Checkpoints: onto any mesh, compared before a restore, untouched by the training that goes on."""

import itertools
import os
import shutil
import subprocess
import sys
import textwrap
import types

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite import BestCheckpoints, ConfigError, StepLost
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.sharded_reading import read_arrays
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.checkpoints.steps.step_store import DiskSteps
from praxis_lite.checkpoints.tools import manifest_of
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.core import MeshConfig, Partitioner, StateLayout, TrainState, make_mesh
from tests.support.job_runs import CHECKOUT, home


def tiny_config(*settings):
    """Returns the config of `jobzoo.experiments.Tiny`, with settings of --set."""
    home()
    from jobzoo.experiments import Tiny

    config = Tiny().config()
    apply_overrides(config, settings)
    return config


def partitioner_on(mesh, *settings, optimizer=None):
    """Returns `Tiny` on a mesh."""
    config = tiny_config(*settings)
    if optimizer is not None:
        config.task.learner.optimizer = optimizer
    return Partitioner(fdl.build(config.task), mesh)


# Slots of the weights' shapes, and factored ones.
OPTIMIZERS = {
    "adamw": fdl.Partial(optax.adamw),
    "adafactor": fdl.Partial(optax.adafactor, min_dim_size_to_factor=3),
}


def random_true_state(layout):
    """Returns a TrainState of NumPy arrays without padding, no two numbers alike."""
    rng = np.random.default_rng(7)

    def draw(x):
        if np.issubdtype(x.dtype, np.integer):
            return rng.integers(1, 1000, x.shape, x.dtype)
        return rng.standard_normal(x.shape, np.float32).astype(x.dtype)

    return jax.tree.map(draw, layout.shapes)


def placed(true_state, layout, mesh):
    """Returns the state on the mesh, padded by NumPy."""

    def place(x, abstract):
        padded = np.zeros(abstract.shape, abstract.dtype)
        padded[tuple(slice(dim) for dim in x.shape)] = x
        return jax.device_put(padded, abstract.sharding)

    return jax.tree.map(place, true_state, layout.abstract(mesh))


def save(folder, step, state, layout, data=None):
    with Checkpoints(folder, saving=SaveSettings(max_to_keep=3)) as checkpoints:
        checkpoints.save(step, state, layout, data or {})


def assert_same_true_values(state, true_state):
    """Asserts values equal to the bit, and zeros around them."""
    for (path, x), expected in zip(
        jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(true_state), strict=True
    ):
        actual = np.array(x)
        cut = tuple(slice(dim) for dim in expected.shape)
        np.testing.assert_array_equal(actual[cut], expected, err_msg=str(path))
        actual[cut] = 0
        assert not actual.any(), f"padding of {path} is not zero"


@pytest.mark.parametrize(
    ("saved_on", "optimizer", "meshes"),
    [
        ((1, 4, 2), "adafactor", [(1, 3, 2), (1, 1, 1)]),
        pytest.param((1, 1, 1), "adamw", [(1, 3, 2), (1, 4, 2), (2, 2, 2)], marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_restores_onto_any_mesh_to_the_bit(
    tmp_path, mesh_of, saved_on, optimizer, meshes
):
    optimizer = OPTIMIZERS[optimizer]
    first = partitioner_on(mesh_of(*saved_on), optimizer=optimizer)
    true_state = random_true_state(first.layout)
    true_state = TrainState(np.int32(13), true_state.mdl_vars, true_state.opt_states)
    save(tmp_path, 13, placed(true_state, first.layout, first.mesh), first.layout)
    for shape in meshes:
        other = partitioner_on(mesh_of(*shape), optimizer=optimizer)
        with Checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(other.layout, other.mesh)
            weights = checkpoints.restore(other.layout, other.mesh, opt_states_keys=())
        assert restored.step == weights.step == 13
        assert_same_true_values(restored.state, true_state)
        assert_same_true_values(weights.state.mdl_vars, true_state.mdl_vars)
        assert weights.state.opt_states == {} and int(weights.state.step) == 13
        for x, abstract in zip(
            jax.tree.leaves(restored.state),
            jax.tree.leaves(other.layout.abstract(other.mesh)),
            strict=True,
        ):
            assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype)
            assert x.sharding == abstract.sharding


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory):
    """A checkpoint of Tiny of step 13, saved on (1, 4, 2), where 7 model dims are padded to 8."""
    partitioner = partitioner_on(make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2))))
    folder = tmp_path_factory.mktemp("saved")
    state = placed(random_true_state(partitioner.layout), partitioner.layout, partitioner.mesh)
    save(folder, 13, state, partitioner.layout, {"next_batch": 13})
    return folder


SOFTMAX = "mdl_vars/params/softmax/logits_ffn/linear/w"


@pytest.mark.parametrize(
    ("settings", "optimizer", "words"),
    [
        (
            ["task.model.hidden_dims=13"],
            None,
            [r"ffn_layer1/linear/w has shape \[2, 7, 11\] in the checkpoint, but \[2, 7, 13\]"],
        ),
        # 7 and 8 are both stored as 8: the shapes on disk tell nothing.
        (
            ["task.model.model_dims=8"],
            None,
            [rf"{SOFTMAX} has shape \[7, 257\] in the checkpoint, but \[8, 257\] in the model"],
        ),
        (
            ["task.model.num_layers=3"],
            None,
            [r"blocks/\S+ has shape \[2, .*\] in the checkpoint, but \[3, ", r"; and \d+ more"],
        ),
        ([], fdl.Partial(optax.sgd, momentum=0.9), [r"is only in the checkpoint"]),
        (
            [],
            fdl.Partial(optax.adamw, mu_dtype="bfloat16"),
            [r"opt_states/\S+mu\S+ has dtype float32 in the checkpoint, but bfloat16 in the model"],
        ),
        (
            ["task.model.max_seq_length=37"],
            None,
            [r"mdl_vars/params/position_emb/\S+ is only in the model"],
        ),
        (
            ["task.model.transformer_layer_tpl.tr_fflayer_tpl.has_bias=false"],
            None,
            [r"mdl_vars/params/\S+ffn_layer1/bias/b is only in the checkpoint"],
        ),
    ],
    ids=["hidden", "same padded shape", "layers", "optimizer", "dtype", "extra leaf", "missing"],
)
def test_another_model_is_refused_naming_the_leaves(
    saved_folder, mesh_of, settings, optimizer, words
):
    partitioner = partitioner_on(mesh_of(1, 4, 2), *settings, optimizer=optimizer)
    with Checkpoints(saved_folder) as checkpoints:
        with pytest.raises(ConfigError, match="13.*(mdl_vars|opt_states)/") as caught:
            checkpoints.restore(partitioner.layout, partitioner.mesh)
        for word in words:
            assert caught.match(word)
        assert caught.match("Use the settings that the job was trained with .*or start a new job")
        if optimizer is None:
            with pytest.raises(ConfigError, match="mdl_vars/params") as caught:
                checkpoints.restore(partitioner.layout, partitioner.mesh, opt_states_keys=())
            assert "opt_states" not in str(caught.value)
        else:  # To read the weights alone, the optimizer does not matter.
            checkpoints.restore(partitioner.layout, partitioner.mesh, opt_states_keys=())


def test_a_stored_dtype_other_than_the_models_is_refused(saved_folder, mesh_of, tmp_path):
    folder = shutil.copytree(saved_folder, tmp_path / "copy")
    manifest = manifest_of(folder / "13")
    manifest["leaves"][SOFTMAX]["dtype"] = "bfloat16"
    DiskSteps(folder).commit("13", manifest)
    partitioner = partitioner_on(mesh_of(1, 4, 2))
    with Checkpoints(folder) as checkpoints:
        layout, mesh = partitioner.layout, partitioner.mesh
        for keys in (None, ()):
            with pytest.raises(ConfigError, match=f"{SOFTMAX}.*bfloat16"):
                checkpoints.restore(layout, mesh, opt_states_keys=keys)


def bytes_read():
    """Returns how much TensorStore has read from files so far in this process."""
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/")
    by_name = {metric["name"].rsplit("/", 1)[-1]: metric["values"] for metric in metrics}
    return sum(value["value"] for value in by_name["bytes_read"])


@pytest.mark.slow
def test_parts_of_the_opt_states_are_restored_and_the_rest_is_not_read(tmp_path, mesh_of):
    settings = ("task.learner.ema_decay=0.9", "task.model.vocab_size=4001")
    first = partitioner_on(mesh_of(1, 4, 2), *settings)
    true_state = random_true_state(first.layout)
    save(tmp_path, 13, placed(true_state, first.layout, first.mesh), first.layout)
    other = partitioner_on(mesh_of(1, 2, 4), *settings)
    read = {}
    # On the mesh that saved, every stored chunk that is wanted is read once.
    for item, keys in [
        (first, ("num_skipped_steps",)),
        (first, ("ema",)),
        (first, ("slots",)),
        (other, ()),
        (other, ("ema", "slots")),
    ]:
        before = bytes_read()
        with Checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(item.layout, item.mesh, opt_states_keys=keys)
        read.setdefault(keys, bytes_read() - before)
        assert_same_true_values(restored.state.mdl_vars, true_state.mdl_vars)
        expected = {key: true_state.opt_states[key] for key in keys}
        assert_same_true_values(restored.state.opt_states, expected)
    weights = sum(x.nbytes for x in jax.tree.leaves(true_state.mdl_vars))
    rest = read["num_skipped_steps",]  # The weights, and what says where the arrays lie.
    assert 0.8 < (read["ema",] - rest) / weights < 1.1
    assert 1.6 < (read["slots",] - rest) / weights < 2.2  # Adamw has two of a weight's shape.


RESTORES_A_LARGE_STATE = """
    import gc, sys
    from pathlib import Path
    from praxis_lite.core import simulate_devices
    simulate_devices(8)
    from tests.checkpoints.test_checkpoints import *

    def kib(name):
        return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])

    layout, mesh = large_layout((1, 2, 3))
    state = jax.block_until_ready(jax.device_put(np.zeros(8), jax.devices()[0]))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew.
    before = kib("VmRSS")
    with Checkpoints(Path(sys.argv[1])) as checkpoints:
        state = jax.block_until_ready(checkpoints.restore(layout, mesh).state)
    target = sum(x.nbytes for x in jax.tree.leaves(state)) / 1024
    print((kib("VmHWM") - before) / target)
"""


def large_layout(mesh_shape):
    """Returns the layout of 12 x 16 MiB, no dim even, and the mesh."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=mesh_shape))
    weights = {f"w{i}": jax.ShapeDtypeStruct((4201, 997), np.float32) for i in range(12)}
    specs = dict.fromkeys(weights, P("data", "mdl"))
    step = jax.ShapeDtypeStruct((), np.int32)
    layout = StateLayout(
        TrainState(step, {"params": weights}, {"count": step}),
        TrainState(P(), {"params": specs}, {"count": P()}),
        dict(mesh.shape),
    )
    return layout, mesh


@pytest.mark.slow
def test_restoring_on_another_mesh_needs_at_most_twice_the_targets_memory(tmp_path):
    layout, mesh = large_layout((1, 4, 2))
    item = types.SimpleNamespace(layout=layout, mesh=mesh)
    save(tmp_path, 3, placed(random_true_state(layout), layout, item.mesh), layout)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RESTORES_A_LARGE_STATE), tmp_path],
        capture_output=True,
        text=True,
        check=True,
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert 0.9 < float(done.stdout) < 2.2, done.stdout


def test_what_no_opt_states_have_is_refused(saved_folder, mesh_of):
    partitioner = partitioner_on(mesh_of(1, 1, 1))
    wrong = pytest.raises(ConfigError, match=r"opt_states\['slot'\].*slots")
    with Checkpoints(saved_folder) as checkpoints, wrong:
        checkpoints.restore(partitioner.layout, partitioner.mesh, opt_states_keys=["slot"])


def test_an_empty_folder_has_no_checkpoint(tmp_path, mesh_of):
    partitioner = partitioner_on(mesh_of(1, 1, 1))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() is None and checkpoints.all_steps() == []
        layout, mesh = partitioner.layout, partitioner.mesh
        for keys in (None, ()):
            with pytest.raises(ConfigError, match=r"praxis train"):
                checkpoints.restore(layout, mesh, opt_states_keys=keys)


def test_an_unfinished_save_is_not_seen(saved_folder, tmp_path, mesh_of):
    folder = shutil.copytree(saved_folder, tmp_path / "copy")
    # What a process that was killed while it wrote step 17 leaves behind.
    shutil.copytree(folder / "13/mdl_vars", folder / "17.saving.orbax-checkpoint-tmp/mdl_vars")
    shutil.copytree(folder / "13", folder / "19.saving")
    (folder / "19.saving/commit.json").unlink()
    partitioner = partitioner_on(mesh_of(1, 1, 1))
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.all_steps() == [13] and checkpoints.latest_step() == 13
    assert len(list(folder.iterdir())) == 3  # A reader deletes nothing.
    lines = []
    with Checkpoints(folder, saving=SaveSettings(), note=lines.append) as checkpoints:
        assert lines == [
            f"removed {name}, left by an interrupted save"
            for name in ("17.saving.orbax-checkpoint-tmp", "19.saving")
        ]
        assert checkpoints.all_steps() == [13]
        restored = checkpoints.restore(partitioner.layout, partitioner.mesh)
        checkpoints.save(17, restored.state, partitioner.layout, {})
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.all_steps() == [13, 17]


@pytest.mark.parametrize("are_adjacent", [True, False])
def test_adjacent_shards_of_a_process_are_read_at_once(mesh_of, monkeypatch, are_adjacent):
    x, read = np.arange(35, dtype=np.float32).reshape(7, 5), []
    indices_of, mesh = NamedSharding.addressable_devices_indices_map, mesh_of(1, 4, 2)
    calls = itertools.count()

    class Array:
        is_in_store = False

        def read_block(self, index):
            read.append(index)
            return x[index]

    def scattered(self, shape):
        """Returns two opposite corners, in the first call."""
        indices = list(indices_of(self, shape).items())
        return dict(indices if next(calls) else (indices[0], indices[-1]))

    if not are_adjacent:
        monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", scattered)
    [leaf] = (leaf for leaf in SMALL.leaves() if leaf.path == "mdl_vars/params/w")
    [array] = read_arrays({"w": Array()}, {"w": leaf}, mesh).values()
    np.testing.assert_array_equal(array, np.pad(x, ((0, 1), (0, 1))))
    assert len(read) == (1 if are_adjacent else 8)


# A state that is saved fast: one weight that no mesh divides, and a count.
SMALL = StateLayout(
    shapes=TrainState(
        jax.ShapeDtypeStruct((), np.int32),
        {"params": {"w": jax.ShapeDtypeStruct((7, 5), np.float32)}},
        {"count": jax.ShapeDtypeStruct((), np.int32)},
    ),
    specs=TrainState(P(), {"params": {"w": P("data", "mdl")}}, {"count": P()}),
    axis_sizes={"replica": 1, "data": 4, "mdl": 2},
)


def small_state(mesh, number):
    w = np.zeros((8, 6), np.float32)
    w[:7, :5] = number
    state = TrainState(np.int32(number), {"params": {"w": w}}, {"count": np.int32(number)})
    return jax.device_put(state, SMALL.shardings(mesh))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kept", "best_step"),
    [("min", [2, 7, 8], 2), ("max", [1, 5, 7, 8], 5)],
)
def test_the_best_are_kept_besides_the_newest(tmp_path, mesh_of, mode, kept, best_step):
    mesh, best = mesh_of(1, 4, 2), BestCheckpoints(metric="heldout/loss", mode=mode, max_to_keep=2)
    values = {1: 5.0, 2: 2.0, 3: float("nan"), 4: None, 5: 5.5, 6: 4.0, 7: 2.0, 8: None}
    # As two launches of a job: the second learns from the manifests what the first saved.
    for steps in ((1, 2, 3, 4), (5, 6, 7, 8)):
        with Checkpoints(tmp_path, saving=SaveSettings(max_to_keep=2, best=best)) as checkpoints:
            for step in steps:
                metrics = {} if values[step] is None else {"heldout/loss": values[step]}
                checkpoints.save(step, small_state(mesh, step), SMALL, {}, metrics)
                checkpoints.wait()
                assert checkpoints.latest_step() == step
    with Checkpoints(tmp_path) as checkpoints:  # Which does not know what is best.
        assert checkpoints.all_steps() == kept and checkpoints.best_step() == best_step
        for step, expected in ((None, 8), ("best", best_step), (kept[1], kept[1])):
            for keys in (None, ()):
                restored = checkpoints.restore(SMALL, mesh, step=step, opt_states_keys=keys)
                w = np.asarray(restored.state.mdl_vars["params"]["w"])
                assert restored.step == int(restored.state.step) == w[6, 4] == expected
        with pytest.raises(ConfigError, match=" 3 .* [12], "):
            checkpoints.restore(SMALL, mesh, step=3)


def test_a_step_that_is_deleted_while_it_is_read_is_lost_and_its_values_are_not_used(
    tmp_path, mesh_of, monkeypatch
):
    mesh = mesh_of(1, 4, 2)
    with Checkpoints(tmp_path, saving=SaveSettings()) as saved:
        for step in (1, 2):
            saved.save(step, small_state(mesh, step), SMALL)

    def read_and_delete(arrays, leaves, mesh):
        values = read_arrays(arrays, leaves, mesh)
        DiskSteps(tmp_path).remove(2)
        return values

    monkeypatch.setattr("praxis_lite.checkpoints.sharded_reading.read_arrays", read_and_delete)
    with Checkpoints(tmp_path) as reading, pytest.raises(StepLost, match=" 2 .*was deleted"):
        reading.restore(SMALL, mesh)
    with Checkpoints(tmp_path) as reading, pytest.raises(StepLost, match=" 2 "):
        reading.restore(SMALL, mesh, step=2)


@pytest.mark.slow
def test_values_that_came_after_the_save_choose_the_best_too(tmp_path, mesh_of):
    mesh, best = mesh_of(1, 4, 2), BestCheckpoints(metric="heldout/loss", max_to_keep=1)
    saving, later = SaveSettings(max_to_keep=2, best=best), {}
    # Of step 3 the save itself had a value, which counts.
    values = {1: 4.0, 2: 2.0, 3: 1.0, 4: 3.0, 5: 5.0}
    with Checkpoints(tmp_path, saving=saving, evaluated=lambda: later) as saved:
        for step in (1, 2, 3, 4, 5, 6):
            metrics = {"heldout/loss": 9.0} if step == 3 else {}
            saved.save(step, small_state(mesh, step), SMALL, {}, metrics)
            saved.wait()
            later[step] = {"heldout/loss": values.get(step)} if step in values else {}
        assert saved.all_steps() == [2, 5, 6] and saved.best_step() == 2
    with Checkpoints(tmp_path) as reading:
        assert reading.best_step() is None
    with Checkpoints(tmp_path, evaluated=lambda: later) as reading:
        assert reading.best_step() == 2


def test_without_the_metric_there_is_no_best(tmp_path, mesh_of):
    mesh = mesh_of(1, 4, 2)
    best = BestCheckpoints(metric="heldout/loss")
    for step, metrics in [(1, {"heldout/accuracy": 0.5}), (2, {"heldout/loss": float("nan")})]:
        with Checkpoints(tmp_path, saving=SaveSettings(max_to_keep=3, best=best)) as checkpoints:
            checkpoints.save(step, small_state(mesh, step), SMALL, {}, metrics)
            assert checkpoints.best_step() is None
    wrong = pytest.raises(ConfigError, match=r"best.* 1, 2\.")
    with Checkpoints(tmp_path) as checkpoints, wrong:
        checkpoints.restore(SMALL, mesh, step="best")


def test_what_is_best_must_make_sense():
    with pytest.raises(ConfigError, match="best_checkpoints.mode.*'lowest'.*'min'"):
        BestCheckpoints(metric="heldout/loss", mode="lowest")
    with pytest.raises(ConfigError, match="best_checkpoints.metric.*'loss'.*'heldout/loss'"):
        BestCheckpoints(metric="loss")
    with pytest.raises(ConfigError, match="max_to_keep.*0.*1"):
        BestCheckpoints(metric="heldout/loss", max_to_keep=0)


def test_single_arrays_are_restored_onto_any_layout(saved_folder, mesh_of):
    partitioner = partitioner_on(mesh_of(1, 4, 2))
    true_state = random_true_state(partitioner.layout)
    nu = "opt_states/slots/unstacked/0/nu/final_ln/scale"
    mesh = mesh_of(1, 2, 4)
    [expected] = StateLayout(
        jax.ShapeDtypeStruct((7, 257), np.float32), P("mdl", ("data", "replica")), dict(mesh.shape)
    ).leaves()
    [vector] = StateLayout(
        jax.ShapeDtypeStruct((7,), np.float32), P("data"), dict(mesh.shape)
    ).leaves()
    with Checkpoints(saved_folder) as checkpoints:
        leaves = checkpoints.leaves()
        assert {path: (x.shape, x.dtype) for path, x in leaves.items()} == {
            leaf.path: (leaf.shape, leaf.dtype)
            for leaf in partitioner.layout.leaves()
            if leaf.path != "step"
        }
        actual = checkpoints.restore_leaves({nu: vector, SOFTMAX: expected}, mesh)
        with pytest.raises(ConfigError, match=rf"{SOFTMAX}.*\[7, 257\] .*, but \[7\]"):
            checkpoints.restore_leaves({SOFTMAX: vector}, mesh)
        with pytest.raises(ConfigError, match="mdl_vars/params/sofmax"):
            checkpoints.restore_leaves({"mdl_vars/params/sofmax": vector}, mesh)
    assert list(actual) == [nu, SOFTMAX]
    assert actual[SOFTMAX].shape == (8, 258) and actual[SOFTMAX].sharding.spec == expected.spec
    softmax = true_state.mdl_vars["params"]["softmax"]["logits_ffn"]["linear"]["w"]
    scale = true_state.opt_states["slots"]["unstacked"][0].nu["final_ln"]["scale"]
    assert_same_true_values([actual[nu], actual[SOFTMAX]], [scale, softmax])


@pytest.mark.slow
def test_training_that_goes_on_does_not_change_what_is_saved(tmp_path, mesh_of):
    """The next steps donate the very buffers that Orbax is still writing.

    np.asarray of a CPU array is a view of its buffer; XLA knows of the view, and gives a step that
    donates such a buffer another one. What is replicated Orbax slices, and so copies, first.
    """
    mesh = mesh_of(1, 4, 2)
    partitioner = partitioner_on(mesh, "task.model.vocab_size=40_009")
    state = placed(random_true_state(partitioner.layout), partitioner.layout, partitioner.mesh)
    recorded = jax.tree.map(lambda x: np.array(x, copy=True), state)
    # As the train step: all of the state is donated and overwritten.
    overwrite = jax.jit(
        lambda state: jax.tree.map(lambda x: x * 0 + 7, state),
        out_shardings=partitioner.layout.shardings(mesh),
        donate_argnums=0,
    )
    overwrite.lower(state).compile()
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        checkpoints.save(3, state, partitioner.layout, {})
        for _ in range(7):
            state = overwrite(state)
        jax.block_until_ready(state)
    assert float(state.mdl_vars["params"]["softmax"]["logits_ffn"]["linear"]["w"][0, 0]) == 7.0
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(partitioner.layout, mesh).state
    for x, expected in zip(
        jax.tree.leaves((restored.mdl_vars, restored.opt_states)),
        jax.tree.leaves((recorded.mdl_vars, recorded.opt_states)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(x), expected)
