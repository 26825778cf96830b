"""An exported program, loaded with jax alone, gives the numbers of the job that it came from."""

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys

import fiddle as fdl
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.decode import BeamSearch, Greedy, Sample
from praxis_lite.layers import rotary_lm, set_sharding_params
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.loss import LossTask
from praxis_lite.trainer.forward_pass import forward_pass
from praxis_tools.export import load as loader
from praxis_tools.export.artifact import write_artifact
from praxis_tools.export.inputs import inputs_of
from praxis_tools.export.program import exported_program

V, B, P = 257, 3, 5
STEPS = {"max_decode_steps": 4}
BATCH = {
    "ids": np.random.default_rng(0).integers(1, V, (B, P)).astype(np.int32),
    "prefix_lengths": np.array([5, 2, 1], np.int32),
    "weights": np.ones(B, np.float32),
}
# A program of somebody else: with the artifacts and jax, and nothing of this library.
USER = """
import importlib.util, sys
import numpy as np
for folder in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("load", f"{folder}/load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    outputs = module.load()(dict(np.load(f"{folder}.inputs.npz")))
    np.savez(f"{folder}.outputs.npz", **(outputs if type(outputs) is dict else {"0": outputs[0]}))
assert not {"praxis_lite", "flax", "tensorflow", "optax", "orbax"} & sys.modules.keys()
"""


def language_model(shape, decoder):
    """Returns a language model on a mesh that none of its dims divides, and its weights."""
    model = fdl.build(
        set_sharding_params(
            rotary_lm(
                vocab_size=V,
                model_dims=35,
                hidden_dims=55,
                num_heads=3,
                dim_per_head=6,
                num_layers=2,
            )
        )
    )
    task = LanguageModelTask(model, Learner(optax.sgd, 0.1), decoder=decoder)
    return with_weights(task, shape)


def with_weights(task, shape):
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))
    return partitioner, partitioner.init(partitioner.key(0)).mdl_vars


def write(folder, partitioner, mdl_vars, what, **given):
    inputs = inputs_of(partitioner.task, what, {}, **given)
    weights = partitioner.for_decoding(mdl_vars) if what == "decode" else mdl_vars
    folder.mkdir()
    write_artifact(folder, exported_program(partitioner, what, inputs), partitioner, weights, {})


def arrays_in(path):
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(scope="module")
def model():
    return language_model((1, 2, 2), Sample(temperature=1.5, num_samples=2, k=0, **STEPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """A folder with the model's `decode` and `predict`."""
    folder = tmp_path_factory.mktemp("exported")
    for what in ("decode", "predict"):
        write(folder / what, *model, what, batch=str(B), length=P)
    return folder


@pytest.mark.slow
def test_with_jax_alone_the_numbers_are_bit_for_bit_those_of_the_mesh(folder, model):
    partitioner, mdl_vars = model
    key = partitioner.batch_key(3, 7, 0)
    ids = BATCH["ids"]
    inputs = {"decode": {**BATCH, "key": jax.random.key_data(key)}, "predict": {"ids": ids}}
    for what, arrays in inputs.items():
        np.savez(folder / f"{what}.inputs.npz", **arrays)
    user = folder / "user.py"
    user.write_text(USER)
    subprocess.run(
        [sys.executable, "-P", user, folder / "decode", folder / "predict"],
        check=True,
        env={**os.environ, "PYTHONPATH": "", "JAX_NUM_CPU_DEVICES": "4"},
    )
    batch = partitioner.global_batch(BATCH)
    expected = jax.device_get(partitioner.decode_step(mdl_vars, batch, key))
    actual = arrays_in(folder / "decode.outputs.npz")
    assert expected["output_ids"].shape == (B, 2, 4) and actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=name, strict=True)
    logits, _ = forward_pass(partitioner)(mdl_vars, ids)
    actual = arrays_in(folder / "predict.outputs.npz")
    np.testing.assert_array_equal(actual["0"], logits, strict=True)


def test_the_manifest_says_what_is_there(folder, model):
    about = json.loads((folder / "decode/manifest.json").read_text())
    assert about["mesh"] == {"replica": 1, "data": 2, "mdl": 2}
    assert about["jax"] == jax.__version__ and about["platforms"] == ["cpu"]
    assert about["inputs"]["ids"] == {"shape": [B, P], "dtype": "int32", "spec": [None, None]}
    assert about["inputs"]["key"] == {"shape": [2], "dtype": "uint32", "spec": [None]}
    assert about["outputs"]["output_ids"] == {"shape": [B, 2, 4], "dtype": "int32"}
    for name, digest in about["sha256"].items():
        assert digest == hashlib.sha256((folder / "decode" / name).read_bytes()).hexdigest()
    leaves = model[0].decode_step.layout.leaves()
    weights = arrays_in(folder / "decode/weights.npz")
    assert list(weights) == list(about["weights"]) == [leaf.path for leaf in leaves]
    assert {name: list(x.shape) for name, x in weights.items()} == {
        name: x["padded_shape"] for name, x in about["weights"].items()
    }
    assert any(x["shape"] != x["padded_shape"] for x in about["weights"].values())


def test_the_program_has_no_weights_in_it(folder):
    sizes = {path.name: path.stat().st_size for path in (folder / "predict").iterdir()}
    assert sizes["program.bin"] < 60_000 < sizes["weights.npz"]


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of the model's `predict`, to change."""
    for path in (folder / "predict").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("name", ["program.bin", "weights.npz"])
def test_a_changed_file_is_not_loaded(copied, name):
    content = bytearray((copied / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        loader.load(copied)


def written_again(folder, name, content):
    """Writes a file of an export, and its digest into the manifest."""
    (folder / name).write_bytes(content)
    about = json.loads((folder / "manifest.json").read_text())
    about["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(about))


def with_weights_changed(folder, change):
    arrays = arrays_in(folder / "weights.npz")
    change(arrays)
    content = io.BytesIO()
    np.savez(content, **arrays)
    written_again(folder, "weights.npz", content.getvalue())


def with_manifest(folder, **changes):
    about = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps(about))


def as_folder(path):
    path.unlink()
    path.mkdir()


def first_weight_as(change):
    def harm(folder):
        def changed(arrays):
            name = next(name for name, x in arrays.items() if x.ndim == 2)
            arrays[name] = change(arrays[name])

        with_weights_changed(folder, changed)

    return harm


NAMES = ("manifest.json", "program.bin", "weights.npz")
HARMS = {
    **{f"no {name}": lambda f, name=name: (f / name).unlink() for name in NAMES},
    **{f"folder {name}": lambda f, name=name: as_folder(f / name) for name in NAMES},
    **{f"empty {name}": lambda f, name=name: (f / name).write_bytes(b"") for name in NAMES},
    **{
        f"half of {name}": lambda f, name=name: os.truncate(
            f / name, (f / name).stat().st_size // 2
        )
        for name in NAMES
    },
    **{
        f"manifest {text[:9]}": lambda f, text=text: (f / "manifest.json").write_text(text)
        for text in ("[]", "{}", "7", "\0", "[" * 100_000, '{"format": "praxis_lite program 1"}')
    },
    "another version": lambda f: with_manifest(f, format="praxis_lite program 2"),
    "no digests": lambda f: with_manifest(f, sha256={}),
    "another mesh": lambda f: with_manifest(f, mesh={"data": 3}),
    "a mesh of texts": lambda f: with_manifest(f, mesh={"data": "x"}),
    "weights as a list": lambda f: with_manifest(f, weights=[]),
    "empty weights": lambda f: written_again(f, "weights.npz", b""),
    "weights as a pickle": lambda f: written_again(f, "weights.npz", pickle.dumps([1])),
    "weights as text": lambda f: written_again(f, "weights.npz", b"no zip"),
    "half of the zip": lambda f: written_again(
        f, "weights.npz", (f / "weights.npz").read_bytes()[:20_000]
    ),
    "an empty program": lambda f: written_again(f, "program.bin", b""),
    "a weight less": lambda f: with_weights_changed(f, lambda arrays: arrays.popitem()),
    "a weight more": lambda f: with_weights_changed(f, lambda arrays: arrays.update(x=np.ones(3))),
    "another dtype": first_weight_as(lambda x: x.astype(np.int32)),
    "a wider dtype": first_weight_as(lambda x: x.astype(np.float64)),
    "another shape": first_weight_as(lambda x: x.reshape(-1)),
    "transposed": first_weight_as(lambda x: np.concatenate([x, x])),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_broken_archive_is_one_line_that_names_the_file(copied, harm):
    HARMS[harm](copied)
    with pytest.raises(ValueError) as error:
        loader.load(copied)
    assert str(copied) in str(error.value) or "jax" in str(error.value)
    # Uncaught, Python prints the message alone, and ends with status 1.
    assert isinstance(error.value, SystemExit) and error.value.code == str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_the_loader_says_how_many_devices_are_needed(copied, monkeypatch):
    devices = jax.devices()[:3]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match="needs 4 devices; jax has 3.*JAX_NUM_CPU_DEVICES=4"):
        loader.load(copied)


RECORDED = {
    "cpu": {
        "xla_gpu_graph_level": 0,
        "xla_cpu_enable_fast_min_max": False,
        "xla_cpu_enable_fast_math": "perhaps",
    },
    "tpu": {"xla_bogus": 1},
}


def test_a_program_runs_without_the_recorded_options_that_the_compiler_lacks(copied):
    ids = BATCH["ids"]
    expected, _ = loader.load(copied)({"ids": ids})
    about = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(about | {"compiler_options": RECORDED}))
    with pytest.warns() as warned:
        run = loader.load(copied)
    gone, wrong = [str(item.message) for item in warned]
    assert "xla_gpu_graph_level=0" in gone
    assert "No such compile option: 'xla_gpu_graph_level'." in gone
    assert "xla_cpu_enable_fast_math=perhaps" in wrong and "'perhaps'" in wrong
    np.testing.assert_allclose(run({"ids": ids})[0], expected, atol=1e-6)


@pytest.mark.slow
def test_an_export_records_the_options_of_what_it_computes(tmp_path):
    partitioner, mdl_vars = language_model((1, 2, 2), Greedy(**STEPS))
    # On a TPU decoding has options of its own; on a CPU it has those of all steps.
    expected = {
        "predict": {"xla_cpu_enable_fast_math": False},
        "decode": {"xla_cpu_use_acl": False},
    }
    partitioner.compiler_options, partitioner.decode_options = expected.values()
    for what, options in expected.items():
        write(tmp_path / what, partitioner, mdl_vars, what, batch="3", length=5)
        manifest = json.loads((tmp_path / what / "manifest.json").read_text())
        assert manifest["compiler_options"] == {"cpu": options}


def test_another_jax_that_cannot_read_it_is_told_apart_from_damage(copied):
    (copied / "program.bin").write_bytes(b"of a later version")
    about = json.loads((copied / "manifest.json").read_text())
    about["sha256"]["program.bin"] = hashlib.sha256(b"of a later version").hexdigest()
    (copied / "manifest.json").write_text(json.dumps(about | {"jax": "0.99.0"}))
    with pytest.raises(ValueError, match=f"jax {jax.__version__} cannot read.* 0.99.0"):
        loader.load(copied)


def scaled(params, inputs, key):
    return {"y": inputs["x"] @ params["w"].astype(jnp.float32) + params["b"]}


def narrow_weights(key):
    return {"w": jax.random.normal(key, (3, 5)).astype(jnp.bfloat16), "b": jnp.float32(0.25)}


@pytest.mark.slow
def test_bfloat16_and_scalars_are_weights_too(tmp_path):
    loss = lambda params, inputs, key: scaled(params, inputs, key)["y"][:, 0]  # noqa: E731
    task = LossTask(FunctionModel(narrow_weights), loss, Learner(optax.sgd, 0.1), predict=scaled)
    partitioner, mdl_vars = with_weights(task, (1, 1, 1))
    write(tmp_path / "out", partitioner, mdl_vars, "predict", given=["x=float32[b,3]"])
    run = loader.load(tmp_path / "out")
    assert mdl_vars["params"]["w"].dtype == ml_dtypes.bfloat16
    for rows in (2, 7):  # Of any number.
        x = np.random.default_rng(rows).normal(size=(rows, 3)).astype(np.float32)
        expected = forward_pass(partitioner)(mdl_vars, {"x": x})
        np.testing.assert_array_equal(run({"x": x})["y"], expected["y"], strict=True)


@pytest.mark.parametrize("what, given, message", [
    ("decode", {"given": ["ids=int32"]}, "--inputs is 'ids=int32'; expected NAME=DTYPE"),
    ("decode", {"given": ["ids=int65[2,3]"]}, "int65.*expected a dtype"),
    ("decode", {"given": ["ids=int64[2,3]"]}, "int64.*expected a dtype"),
    ("decode", {"given": ["ids=int32[2,0]"]}, "dims of 1 or more"),
    ("decode", {"given": ["ids=int32[2,3]", "weights=float32[b]"]}, "ids 2, weights b"),
    ("decode", {"given": ["ids=int32[2,3]"], "batch": "2"}, "--batch and --length cannot be"),
    ("decode", {"batch": "0", "length": 3}, "--batch is '0'; expected 1 or more, or b"),
    ("decode", {"batch": "2", "length": 0}, "--length is 0"),
    ("decode", {"batch": "2"}, "no decode_datasets.*--length=TOKENS"),
    ("predict", {"length": 2}, "no datasets.*--inputs"),
])  # fmt: skip
def test_shapes_that_cannot_be_are_refused(model, what, given, message):
    with pytest.raises(ConfigError, match=message):
        inputs_of(model[0].task, what, {}, **given)


def loss_of(params, inputs, key):
    return inputs["x"][:, 0] * params["b"]


def exported(predict, given):
    """Exports `predict`, a function of the narrow weights and an input."""
    task = LossTask(
        FunctionModel(narrow_weights), loss_of, Learner(optax.sgd, 0.1), predict=predict
    )
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1))))
    exported_program(partitioner, "predict", inputs_of(task, "predict", {}, given=[given]))


def test_a_program_that_counts_its_rows_asks_for_a_number():
    counts = lambda params, inputs, key: {"n": params["b"] * len(inputs["x"])}  # noqa: E731
    exported(counts, "x=float32[4,3]")
    with pytest.raises(ConfigError, match="any number of rows.*--batch=ROWS"):
        exported(counts, "x=float32[b,3]")


def test_an_input_must_not_have_the_name_of_the_random_key():
    predict = lambda params, inputs, key: inputs["key"] * params["b"]  # noqa: E731
    with pytest.raises(ConfigError, match="'key' is reserved"):
        exported(predict, "key=float32[2,3]")


def test_a_callback_to_the_host_is_refused():
    def predict(params, inputs, key):
        shape = jax.ShapeDtypeStruct((2, 3), np.float32)
        return jax.pure_callback(lambda x: x, shape, inputs["x"] + params["b"])

    with pytest.raises(ConfigError, match="cannot export.*host_callbacks"):
        exported(predict, "x=float32[2,3]")


def test_what_decodes_nothing_is_refused_and_so_are_foreign_platforms(model):
    class Silent(LossTask):
        decode = LossTask.__mro__[1].decode

    task = Silent(FunctionModel(narrow_weights), loss_of, Learner(optax.sgd, 0.1))
    with pytest.raises(ConfigError, match="Silent cannot decode.*--what=predict"):
        inputs_of(task, "decode", {})
    inputs = inputs_of(model[0].task, "predict", {}, batch="2", length=3)
    with pytest.raises(ConfigError, match="--platforms is 'gpu'; expected one of cpu, cuda"):
        exported_program(model[0], "predict", inputs, ["gpu"])


@pytest.mark.slow
@pytest.mark.parametrize("shape, batch, decoder", [
    pytest.param(
        (1, 1, 1), "b", Sample(temperature=0.8, num_samples=3, p=0.9, **STEPS),
        marks=pytest.mark.nightly,
    ),
    ((1, 2, 2), "5", BeamSearch(beam_size=3, **STEPS)),
    pytest.param(
        (1, 2, 2), "8", Greedy(num_speculative_tokens=2, **STEPS), marks=pytest.mark.nightly
    ),
    ((1, 2, 2), "b", Sample(weights_dtype="int8", repetition_penalty=1.3, **STEPS)),
], ids=lambda x: str(x).partition("(max")[0])  # fmt: skip
def test_each_mesh_batch_and_decoder_is_bit_for_bit_the_same(tmp_path, shape, batch, decoder):
    partitioner, mdl_vars = language_model(shape, decoder)
    num_rows = 8 if batch == "b" else int(batch)
    rng = np.random.default_rng(1)
    rows = {
        "ids": rng.integers(1, V, (num_rows, P)).astype(np.int32),
        "prefix_lengths": rng.integers(1, P + 1, num_rows).astype(np.int32),
        "weights": np.ones(num_rows, np.float32),
    }
    write(tmp_path / "decode", partitioner, mdl_vars, "decode", batch=batch, length=P)
    key = partitioner.batch_key(0, 1, 0)
    expected = jax.device_get(
        partitioner.decode_step(mdl_vars, partitioner.global_batch(rows), key)
    )
    actual = loader.load(tmp_path / "decode")({**rows, "key": jax.random.key_data(key)})
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    if batch == "b":  # A decoder is no part of the logits.
        write(tmp_path / "predict", partitioner, mdl_vars, "predict", batch=batch, length=P)
        expected, _ = forward_pass(partitioner)(mdl_vars, rows["ids"])
        logits, _ = loader.load(tmp_path / "predict")({"ids": rows["ids"]})
        np.testing.assert_array_equal(logits, expected)
