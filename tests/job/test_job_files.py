"""What a run leaves in the job's directory, and what it prints: one real process of 200 steps."""

import os
import struct

import pytest
from matplotlib import image
from tensorboardX.proto import event_pb2

from praxis_lite.config.config_json import load_config_file
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.layout_table import read_layout
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.job_runs import home, start_process, trained
from tests.support.log_lines import terminal_text

pytestmark = pytest.mark.slow

SETTINGS = [
    "run.num_train_steps=200",
    "run.checkpoints.every_steps=50",
    "run.evaluation.every_steps=50",
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The job, and what its process wrote to standard output and to standard error."""
    trained()  # Its compiled programs serve this run too.
    folder = tmp_path_factory.mktemp("ran")
    argv = ("--exp=jobzoo.experiments.Tiny", "--job_log_dir=job", "--set", *SETTINGS)
    process = start_process(*argv, cwd=folder)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return JobDir(folder / "job"), terminal_text(out), terminal_text(err)


def test_200_steps_print_at_most_60_lines(ran):
    _, out, err = ran
    assert err == ""
    lines = out.splitlines()
    assert 20 <= len(lines) <= 60
    assert lines[0].startswith("jobzoo.experiments.Tiny, train, in ")
    # Where there is no accelerator the first lines say so.
    assert lines[1] == (
        "mesh (replica 1, data 4, mdl 2): 8 simulated CPU devices, because there is no accelerator"
    )
    kernels = [line for line in lines if line.startswith("attention by the einsum kernel: ")]
    assert len(kernels) == 1
    assert "\r" not in out and "\x1b" not in out
    progress = [line for line in lines if line.startswith("step ") and "/200" in line]
    assert len(progress) == 20
    assert all("loss" in line and "tokens/s" in line for line in progress)
    assert all("left" in line for line in progress[:-1])
    assert sum("heldout: " in line for line in lines) == 4
    assert lines[-1].startswith("trained to step 200: ")


def test_the_directory_holds_what_the_readme_says(ran):
    job = ran[0]
    # What JobLock locks; a desktop does not show it.
    assert sorted(os.listdir(job.path)) == [
        ".training",
        "checkpoints",
        "config.json",
        "config.txt",
        "eval_metrics.jsonl",
        "examples",
        "layout.json",
        "layout.txt",
        "log.txt",
        "loss_curve.png",
        "metrics.jsonl",
        "tensorboard",
        "timeline.jsonl",
        "trackers",
    ]
    # The newest three.
    assert sorted(os.listdir(job.checkpoints)) == ["100", "150", "200"]


def test_config_json_rebuilds_the_config(ran):
    home()
    from jobzoo.experiments import Tiny

    loaded = load_config_file(ran[0].config_json, packages=["jobzoo"])
    expected = Tiny().config()
    apply_overrides(expected, SETTINGS)
    assert loaded.config == expected
    assert loaded.experiment == "jobzoo.experiments.Tiny"
    assert list(loaded.overrides) == SETTINGS
    assert loaded.config.datasets["train"].corpus is loaded.config.decode_datasets["prompts"].corpus


def test_config_txt_has_a_line_per_field_that_set_takes(ran):
    lines = dict(line.split("=", 1) for line in ran[0].config_txt.read_text().splitlines())
    assert lines["run.num_train_steps"] == "200"
    assert lines["mesh.ici_mesh_shape"] == "1,4,2"
    assert lines["task.model.num_heads"] == "3"
    assert lines["datasets.train.corpus.heldout_percent"] == "20"


def test_metrics_jsonl_has_a_line_per_step_with_all_keys(ran):
    lines = read_json_lines(ran[0].metrics_jsonl)
    assert [line["step"] for line in lines] == list(range(1, 201))
    for line in lines:
        assert {"loss", "learning_rate", "grad_norm", "tokens_per_second"} < line.keys()
        # 13 rows of 11 tokens, each of weight 1.
        assert line["tokens_per_second"] * line["step_time"] == pytest.approx(13 * 11)
        assert line["num_skipped_steps"] == 0 and line["grad_norm"] > 0
    # The schedule of the experiment: from 3e-2 to 1e-3 in 20 steps.
    for step, rate in [(1, 3e-2), (11, (3e-2 + 1e-3) / 2), (21, 1e-3), (200, 1e-3)]:
        assert lines[step - 1]["learning_rate"] == pytest.approx(rate)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    # Seven steps or two hundred: the first seven are the same, in another process too.
    first = read_json_lines(trained()[0].metrics_jsonl)
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [line[name] for line in lines[:7]] == [line[name] for line in first]


def test_evaluations_stand_in_their_file_with_gzips_figure(ran):
    lines = read_json_lines(ran[0].eval_metrics_jsonl)
    assert [(line["step"], line["dataset"]) for line in lines] == [
        (step, "heldout") for step in (50, 100, 150, 200)
    ]
    for line in lines:
        assert {"loss", "bits_per_byte", "accuracy", "gzip_bits_per_byte"} < line.keys()


def test_layout_txt_has_a_line_per_array(ran):
    text = ran[0].layout_txt.read_text()
    weight = "softmax/logits_ffn/linear/w"
    for path in (f"mdl_vars/params/{weight}", f"opt_states/slots/unstacked/0/mu/{weight}"):
        assert f"\n{path} " in text
    assert "weights with 3,186 parameters; the training state takes" in text
    assert "Each device of the mesh (replica 1, data 4, mdl 2) holds" in text
    arrays, totals = read_layout(ran[0].layout_json)
    assert totals in text and all(f"\n{array.path} " in text for array in arrays)


def test_tensorboard_has_the_metrics(ran):
    steps = {}
    for path in ran[0].tensorboard.iterdir():
        data = path.read_bytes()
        while data:  # A record: its length, a checksum, the bytes, another checksum.
            (size,) = struct.unpack_from("<Q", data)
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                steps.setdefault(value.tag, []).append(event.step)
    assert steps["loss"] == list(range(1, 201))
    assert steps["heldout/loss"] == [50, 100, 150, 200]
    assert {"learning_rate", "grad_norm", "tokens_per_second"} < steps.keys()


def test_the_loss_curve_is_a_picture(ran):
    pixels = image.imread(ran[0].loss_curve_png)
    assert pixels.ndim == 3 and min(pixels.shape[:2]) > 100 and pixels.std() > 0
