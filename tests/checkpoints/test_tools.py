"""`praxis checkpoints`: its reports on steps, on every mesh, without a model."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import xxhash

from praxis_lite.checkpoints import stored_arrays
from praxis_lite.checkpoints.digest import digest_of, leaf_digests
from praxis_lite.checkpoints.steps.manifest import COMMIT_JSON, MANIFEST_JSON
from praxis_lite.checkpoints.tools import manifest_of
from tests.checkpoints.saved_steps import MESHES, SPECS, save_steps, true_state
from tests.support.commands import praxis

EMB = "mdl_vars/params/emb"


def changed(state, **leaves):
    """Returns the state with other weights: `emb`, or `layer` as a whole."""
    params = {**state.mdl_vars["params"], **leaves}
    return dataclasses.replace(state, mdl_vars={**state.mdl_vars, "params": params})


def by_path(state):
    tree = {"mdl_vars": state.mdl_vars, "opt_states": state.opt_states}
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


@pytest.fixture(scope="module")
def on_meshes(tmp_path_factory):
    """The folders of step 3 as six meshes saved it, by the mesh's shape."""
    folder = tmp_path_factory.mktemp("meshes")
    return {
        shape: save_steps(folder / str(number), {3: true_state()}, mesh_shape=shape) / "3"
        for number, shape in enumerate(MESHES)
    }


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job with the steps 3, 6 and 9; in 6 some values differ."""
    folder = tmp_path_factory.mktemp("job")
    emb = true_state().mdl_vars["params"]["emb"].copy()
    emb[36, 6] += 0.5
    emb[0, 0] = np.nan
    emb[5, 3] = -emb[5, 3]
    other = changed(true_state(), emb=emb)
    save_steps(folder / "checkpoints", {3: true_state(), 6: other, 9: true_state()})
    return folder, emb


def run(capsys, *argv):
    """Returns exit status, standard output, and standard error as one line."""
    code = praxis("checkpoints", *argv)
    out, err = capsys.readouterr()
    return code, out, " ".join(err.split())


def copied(folder, to):
    """Returns the steps of a job, copied into another."""
    return Path(shutil.copytree(folder / "checkpoints", to / "checkpoints"))


def flip_a_bit(step_dir):
    path = max((step_dir / "mdl_vars").rglob("d/*"), key=os.path.getsize)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.slow
def test_values_are_the_true_ones_and_padding_is_zero_on_every_mesh(on_meshes):
    expected = by_path(true_state())
    for shape, step_dir in on_meshes.items():
        manifest = manifest_of(step_dir)
        arrays = stored_arrays.stored_arrays(step_dir, manifest)
        actual = {path: array.read() for path, array in arrays.items()}
        assert actual.keys() == expected.keys()
        for path, x in expected.items():
            assert (actual[path].dtype, actual[path].shape) == (x.dtype, x.shape), path
            np.testing.assert_array_equal(actual[path], x, err_msg=f"{path} on {shape}")
        arrays = arrays.values()
        num_padded = sum(x.padded_shape != x.shape for x in arrays)
        assert num_padded >= 2 or shape in {(1, 1, 1), (8, 1, 1)}, shape
        assert all(array.padding_is_zero() for array in arrays), shape


def test_the_digest_is_the_same_on_every_mesh_and_as_numpy_makes_it(on_meshes, monkeypatch):
    lines = []
    for path, x in sorted(by_path(true_state()).items()):
        head = f"{x.dtype.name} {list(x.shape)}\n".encode()
        lines.append(f"{path} {xxhash.xxh3_128_hexdigest(head + x.tobytes())}\n")
    expected = xxhash.xxh3_128_hexdigest("".join(lines).encode())
    assert {digest_of(step_dir) for step_dir in on_meshes.values()} == {expected}
    # Rows of one chunk at a time.
    monkeypatch.setattr(stored_arrays, "_BLOCK_BYTES", 1)
    assert {digest_of(step_dir) for step_dir in on_meshes.values()} == {expected}


def test_the_digest_sees_a_sign_a_dtype_and_a_shape(tmp_path):
    state, zeros = true_state(), np.zeros((37, 7), np.float32)
    variants = [zeros, -zeros, zeros.astype(np.int32), zeros[:36], np.zeros((37, 8), np.float32)]
    save_steps(tmp_path, {n: changed(state, emb=x) for n, x in enumerate(variants)})
    digests = [leaf_digests(tmp_path / str(n)) for n in range(len(variants))]
    assert len({digest[EMB] for digest in digests}) == len(variants)
    assert len({tuple(x for path, x in item.items() if path != EMB) for item in digests}) == 1


def test_padding_that_is_not_zero_is_found(tmp_path, capsys):
    step_dir = save_steps(tmp_path, {3: true_state()}) / "3"
    save_steps(tmp_path, {4: true_state()}, padding=1)
    assert digest_of(tmp_path / "4") == digest_of(step_dir)
    code, out, err = run(capsys, "verify", tmp_path)
    padded = [
        path
        for path, leaf in manifest_of(step_dir)["leaves"].items()
        if leaf["shape"] != leaf["padded_shape"]
    ]
    assert code == 1 and err == "" and len(padded) >= 3
    assert out.splitlines() == ["step 3: good"] + [
        f"step 4: the padding of {path} is not zero" for path in sorted(padded)
    ]


def test_diff_counts_what_differs_to_the_bit(job, capsys):
    folder, emb = job
    saved = true_state().mdl_vars["params"]["emb"]
    finite = np.nanmax(np.abs(emb.astype(np.float64) - saved))
    code, out, err = run(capsys, "diff", folder, "--step=3", "--other_step=6")
    assert (code, err) == (1, "")
    assert out.splitlines()[2:] == [
        f"{EMB}: 3 of 259 values differ, by {finite:.6g} at most, 1 of them not finite"
    ]
    # The newest and the one before; and to itself by way of another step.
    assert run(capsys, "diff", folder)[1].splitlines()[:2] == [
        f"first:  {folder}/checkpoints/6",
        f"second: {folder}/checkpoints/9",
    ]
    assert run(capsys, "diff", folder, "--step=3") == (0, "", "")


def test_diff_of_jobs_on_two_meshes_sees_their_values_only(on_meshes, capsys):
    first, second = on_meshes[1, 3, 2].parent, on_meshes[2, 2, 2].parent
    assert run(capsys, "diff", first, second) == (0, "", "")


def test_diff_tells_leaves_shapes_dtypes_data_and_whole_numbers(job, tmp_path, capsys):
    folder, _ = job
    params = true_state().mdl_vars["params"]
    layer = {**params["layer"], "w": params["layer"]["w"].astype(np.float32)}
    layer["c"] = layer.pop("b")
    other = changed(true_state(), emb=params["emb"][:36], layer=layer)
    flags = ~true_state().opt_states["flags"]
    opt_states = {**true_state().opt_states, "num_updates": np.uint32(2), "flags": flags}
    other = dataclasses.replace(other, opt_states=opt_states)
    specs = dict(SPECS.mdl_vars["params"]["layer"])
    specs["c"] = specs.pop("b")
    save_steps(tmp_path, {4: other}, specs=changed(SPECS, layer=specs), data={"batch": 7})
    code, out, _ = run(capsys, "diff", folder, tmp_path)
    assert code == 1
    assert out.splitlines()[2:] == [
        "the position in the training data: batch: not known and 7",
        f"{EMB}: shape [37, 7] and [36, 7]",
        "mdl_vars/params/layer/b: only in the first, float32[13]",
        "mdl_vars/params/layer/c: only in the second, float32[13]",
        "mdl_vars/params/layer/w: dtype bfloat16 and float32",
        "opt_states/flags: 5 of 5 values differ, by 1 at most",
        f"opt_states/num_updates: 1 of 1 values differ, by {2**32 - 7} at most",
    ]


def test_ls_tells_the_state_of_every_folder(job, tmp_path, capsys):
    folder, _ = job
    copy = copied(folder, tmp_path)
    flip_a_bit(copy / "6")
    (copy / "3").rename(copy / "3.damaged")
    (copy / "12.saving" / "mdl_vars").mkdir(parents=True)
    (copy / "1.deleting").mkdir()
    (copy / "15").mkdir()
    (copy / "notes").mkdir()
    code, out, err = run(capsys, "ls", tmp_path)
    assert (code, err) == (0, "")
    states = {line.split()[0]: line for line in out.splitlines()[1:]}
    for name, words in {
        "1.deleting": "deleting, or left by an interrupted deletion",
        "3.damaged": "quarantined",
        "6": "damaged: mdl_vars/",
        "9": "good",
        "12.saving": "saving, or left by an interrupted save",
        "15": "damaged: commit.json is missing",
    }.items():
        assert words in states.pop(name)
    assert states == {}
    assert "heldout/loss=4.5" in out and "has changed: its digest differs" in out
    code, out, _ = run(capsys, "ls", tmp_path, "--step=3")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:]] == ["3.damaged"]


def test_verify_exits_with_1_where_a_step_is_damaged(job, tmp_path, capsys):
    folder, _ = job
    assert run(capsys, "verify", folder) == (0, "step 3: good\nstep 6: good\nstep 9: good\n", "")
    copy = copied(folder, tmp_path)
    flip_a_bit(copy / "6")
    assert run(capsys, "verify", tmp_path, "--step=9") == (0, "step 9: good\n", "")
    code, out, _ = run(capsys, "verify", copy)
    assert code == 1 and "step 6: damaged: mdl_vars/" in out and "step 9: good" in out
    (copy / "9" / COMMIT_JSON).unlink()
    assert run(capsys, "verify", copy, "--step=9") == (
        1,
        "step 9: damaged: commit.json is missing\n",
        "",
    )


def test_show_tells_the_tree_and_where_it_comes_from(job, capsys):
    folder, _ = job
    code, out, err = run(capsys, "show", folder, "--step=6")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{folder}/checkpoints/6" and lines[1].startswith("step:     6, saved 20")
    assert "mesh:     replica=1, data=4, mdl=2" in lines
    assert "metrics:  heldout/loss=3" in lines
    assert f", jax={jax.__version__}, " in out
    num_values = sum(x.size for x in by_path(true_state()).values())
    assert f"arrays:   8, {num_values:,} values" in lines
    rows = [line.split("  ") for line in lines]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell] for row in rows}
    assert cells[EMB] == ["[37, 7]", "[40, 8]", "float32", "(replica+data, mdl)", "1,280"]
    assert cells["mdl_vars/params/layer/even"] == ["[24, 8]", "float32", "(data, mdl)", "768"]


def test_digest_prints_as_checksum_tools_do(job, capsys):
    folder, _ = job
    step_dir = folder / "checkpoints" / "9"
    code, out, _ = run(capsys, "digest", folder, "--leaves")
    expected = [f"{digest}  {path}" for path, digest in leaf_digests(step_dir).items()]
    assert code == 0 and out.splitlines() == [*expected, f"{digest_of(step_dir)}  {step_dir}"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("ls", "JOB/absent"), "absent is not a directory. Pass a job_log_dir"),
        (("show", "JOB/empty"), "empty contains no checkpoints"),
        (("digest", "JOB", "--step=7"), "has no committed step 7; it has the steps 3, 6, 9"),
        (("verify", "JOB", "--step=7"), "has no committed step 7; it has the steps 3, 6, 9"),
        (("diff", "JOB", "--step=9"), "/9 would be compared with itself. Specify a second"),
        (("diff", "JOB", "JOB", "--step=9"), "/9 would be compared with itself"),
        (("show", "JOB/checkpoints/6"), "is a single step. Pass .*/checkpoints and --step=6"),
    ],
    ids=["absent", "empty", "step", "verified", "same", "job", "one"],
)
def test_questions_without_an_answer_exit_with_2(job, tmp_path, capsys, argv, words):
    folder, _ = job
    (folder / "empty").mkdir(exist_ok=True)
    code, out, err = run(capsys, *(word.replace("JOB", str(folder)) for word in argv))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and re.search(words, err), err


def test_a_job_that_lost_everything_exits_with_2(job, tmp_path, capsys):
    copy = copied(job[0], tmp_path)
    for step in (3, 6, 9):
        (copy / str(step)).rename(copy / f"{step}.damaged")
    assert run(capsys, "ls", tmp_path)[0] == 0
    for command in ("verify", "show", "digest", "diff"):
        code, out, err = run(capsys, command, tmp_path)
        assert (code, out) == (2, "") and err.startswith("error: "), command


def test_a_damaged_manifest_is_no_answer(job, tmp_path, capsys):
    copy = copied(job[0], tmp_path)
    text = (copy / "9" / MANIFEST_JSON).read_text()
    (copy / "9" / MANIFEST_JSON).write_text(text.replace("float32", "float16"))
    for command in ("show", "digest", "diff"):
        code, out, err = run(capsys, command, tmp_path)
        assert (code, out) == (2, "") and "manifest.json differs from commit.json" in err, command


def test_nothing_of_jax_is_imported(job):
    """Nor of flax: the start takes as long as NumPy and TensorStore take."""
    code = (
        "import sys; from tests.support.commands import praxis;"
        "code = praxis('checkpoints', *sys.argv[1:]);"
        "loaded = {'jax', 'flax', 'orbax', 'tensorflow', 'optax'} & sys.modules.keys();"
        "sys.exit(f'imported: {loaded}' if loaded else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "diff", str(job[0]), "--step=3"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_reader_that_has_seen_enough_is_no_error(job):
    with subprocess.Popen(
        [sys.executable, "-m", "praxis_lite", "checkpoints", "show", str(job[0])],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 128 + signal.SIGPIPE
