"""Loss spikes: which they are, over resumes too, and going back to before one without its batch."""

import dataclasses
import math
import shutil
import statistics

import fiddle as fdl
import jax
import numpy as np
import pytest

from praxis_lite import ConfigError, LossSpikeSettings, RunConfig
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.config.config_json import load_config_file
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.job.examples.lines import read_record
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.checks import job_checks
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_lite.trainer.spike_detector import (
    MAX_ROLL_BACKS,
    LossSpike,
    RollBacks,
    SpikeDetector,
    recent_losses,
)
from tests.job.examples.test_examples import proven
from tests.support import process_pairs
from tests.support.job_runs import home, launch, lines_of, succeed
from tests.support.line_jobs import LINE


def losses_with_spikes(num=400):
    rng = np.random.default_rng(3)
    losses = [float(x) for x in np.exp(-np.arange(num) / 100 + 0.1 * rng.normal(size=num))]
    for at in (3, 57, 58, 201, 399):
        losses[at] *= 7
    losses[100], losses[333] = math.nan, math.inf
    return losses


def test_a_spike_is_above_so_many_times_the_median_of_the_last_hundred_that_were_none():
    losses, kept, spikes = losses_with_spikes(), [], []
    detector = SpikeDetector(3.0)
    for step, loss in enumerate(losses):
        window = kept[-100:]
        expected = None
        if math.isfinite(loss) and len(window) >= 10 and loss > 3 * statistics.median(window):
            expected = statistics.median(window)
            spikes.append(step)
        elif math.isfinite(loss):
            kept.append(loss)
        assert detector.median_below(loss) == expected
    assert spikes == [57, 58, 201, 399]  # At step 3 there were too few to compare with.


@pytest.mark.parametrize("stop", [0, 5, 58, 101, 150, 334])
def test_a_resumed_run_finds_the_same_spikes(stop):
    losses = losses_with_spikes()
    whole = SpikeDetector(3.0)
    lines = [{"loss": x, "is_loss_spike": int(whole.median_below(x) is not None)} for x in losses]
    finite = [x for x in lines[:stop] if math.isfinite(x["loss"])]
    window = [x["loss"] for x in finite if not x["is_loss_spike"]][-100:]
    assert recent_losses(reversed(lines[:stop])) == window
    resumed = SpikeDetector(3.0, window)
    actual = [int(resumed.median_below(x) is not None) for x in losses[stop:]]
    assert actual == [line["is_loss_spike"] for line in lines[stop:]]


def test_above_no_positive_median_nothing_is_a_spike():
    detector = SpikeDetector(2.0)
    assert [detector.median_below(loss) for loss in [-1.0] * 20 + [5.0]] == [None] * 21


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"factor": 1}, r"run\.loss_spikes\.factor.* 1;"),
        ({"factor": math.nan}, r"run\.loss_spikes\.factor.*nan"),
        ({"factor": "3"}, r"run\.loss_spikes\.factor.*'3'"),
        ({"action": "roll_back"}, "run.loss_spikes.factor.*None.*'roll_back'"),
        ({"action": "rollback"}, r"run\.loss_spikes\.action.*'rollback'.*roll_back"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        LossSpikeSettings(**settings)


def test_going_back_ends_where_leaving_out_batches_does_not_help():
    rolled = RollBacks()
    for batch in range(MAX_ROLL_BACKS):
        rolled.add(LossSpike(40 - (batch == 1), batch))  # Once earlier: that is not beyond.
    with pytest.raises(ConfigError, match=r"40.*run\.loss_spikes\.action=report"):
        rolled.add(LossSpike(40, 99))
    rolled.add(LossSpike(41, 100))


def state_of(job):
    """Returns the last state, true and padded shapes being the same, and its data."""
    built = fdl.build(load_config_file(job.config_json, packages=("jobzoo",)).config)
    partitioner = Partitioner(built.task, make_mesh(built.mesh))
    with Checkpoints(job.checkpoints) as saved:
        return jax.device_get(saved.restore(partitioner.layout, partitioner.mesh).state), saved


@pytest.fixture(scope="module")
def jobs():
    """Returns jobs: one that rolls back, one whose data never had the batch, and what they said."""
    rolled, without = home() / "spikes_rolled", home() / "spikes_without"
    told = succeed(LINE, f"--job_log_dir={rolled}")
    quiet = succeed(LINE, f"--job_log_dir={without}", "--set", "datasets.train.without=15,")
    return JobDir(rolled), JobDir(without), told, quiet


@pytest.mark.slow
def test_a_rolled_back_run_is_one_that_never_saw_the_batch(jobs):
    rolled, without, told, quiet = jobs
    assert "step 16: loss spike: " in told.out and "run.loss_spikes.factor is 20.0" in told.out
    assert (
        "rolled back from the loss spike of step 16 to step 14; batch 15 will be skipped (batches "
        "skipped so far: 1)" in told.out
    )
    assert "loss spike" not in quiet.out
    steps, expected = lines_of(rolled.metrics_jsonl), lines_of(without.metrics_jsonl)
    assert [line["step"] for line in steps] == list(range(1, 30))
    assert [line.pop("num_skipped_batches") for line in steps] == [0] * 14 + [1] * 15
    assert {line.pop("num_skipped_batches") for line in expected} == {0}
    assert steps == expected
    (item, saved), (other, _) = state_of(rolled), state_of(without)
    jax.tree.map(np.testing.assert_array_equal, item, other)
    assert saved.latest_data()["skipped"] == [15] and saved.latest_data()["next_batch"] == 30


@pytest.mark.slow
def test_a_run_that_is_stopped_after_a_roll_back_leaves_the_batch_out_still(
    jobs, tmp_path, monkeypatch
):
    argv = (LINE, f"--job_log_dir={tmp_path}")
    monkeypatch.setenv("LINES_RAISE_AT", "24")  # Step 24: after the checkpoint of step 21.
    pulled = launch(*argv)
    assert pulled.code == 1 and "RuntimeError: the plug was pulled" in pulled.err
    monkeypatch.delenv("LINES_RAISE_AT")
    done = succeed(*argv, "--set", "mesh.ici_mesh_shape=1,1,1")
    assert "restored the checkpoint of step 21" in done.out and "loss spike" not in done.out
    steps, expected = lines_of(JobDir(tmp_path).metrics_jsonl), lines_of(jobs[0].metrics_jsonl)
    assert steps[:21] == expected[:21]
    for line, other in zip(steps, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.slow
def test_without_a_checkpoint_from_before_training_starts_anew(jobs, tmp_path, monkeypatch):
    held, key_of = [], Partitioner.key

    def counting(*args):  # Called before a state is made, and when its steps begin.
        held.append(sum(not x.is_deleted() for x in jax.live_arrays() if x.shape == (5,)))
        return key_of(*args)

    monkeypatch.setattr(Partitioner, "key", counting)
    done = succeed(LINE, f"--job_log_dir={tmp_path}", "--set", "run.checkpoints.every_steps=None")
    assert done.out.count("initializing the state") == 2
    assert held[2] == held[0]  # The state is let go of before there is another one.
    assert "rolled back from the loss spike of step 16 to step 0" in done.out
    steps, expected = lines_of(JobDir(tmp_path).metrics_jsonl), lines_of(jobs[1].metrics_jsonl)
    for line in (*steps, *expected):
        line.pop("num_skipped_batches", None)
    assert steps == expected


@pytest.mark.slow
def test_a_spike_that_is_only_reported_stands_in_its_line(tmp_path):
    argv = (LINE, f"--job_log_dir={tmp_path}", "--set", "run.loss_spikes.action=report")
    done = succeed(*argv)
    assert "step 16: loss spike: " in done.out and "rolled back" not in done.out
    lines = read_json_lines(JobDir(tmp_path).metrics_jsonl)
    assert [line["step"] for line in lines if line["is_loss_spike"]] == [16]


def test_batches_that_all_spike_end_the_run_with_a_reason(tmp_path):
    poisoned = ",".join(map(str, range(15, 40)))
    done = launch(LINE, f"--job_log_dir={tmp_path}", "--set", f"datasets.train.poisoned={poisoned}")
    assert done.code == 2
    assert done.out.count("rolled back from the loss spike of step 16") == MAX_ROLL_BACKS
    assert "still spikes at or before step 16" in " ".join(done.err.split())


def test_a_pass_that_ends_too_soon_without_the_batch_is_refused():
    @dataclasses.dataclass
    class Pass:
        num_batches: int | None

    run = RunConfig(num_train_steps=29)
    job_checks.check_batches_left(Pass(30), run, (15,))
    job_checks.check_batches_left(Pass(None), run, (15, 16))
    with pytest.raises(ConfigError, match=r"datasets\.train.*30 batches.*: 15, 16\. "):
        job_checks.check_batches_left(Pass(30), run, (15, 16))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Returns jobs that go on from a step: one alone, and one of two processes, and their ends."""
    tmp_path = tmp_path_factory.mktemp("pair")
    alone, pair = JobDir(tmp_path / "alone"), JobDir(tmp_path / "pair")
    argv = (LINE, "--set", "run.debug_nans=true", "datasets.train.nan_at=17,")
    # From a checkpoint on, so that the losses before are those of the first's disk.
    succeed(*argv, "run.num_train_steps=12", f"--job_log_dir={alone.path}")
    shutil.copytree(alone.path, pair.path)
    succeed(*argv, f"--job_log_dir={alone.path}")
    ended = process_pairs.run(
        *argv,
        f"--job_log_dir={pair.path}",
        cwd=tmp_path,
        env=({"JAX_NUM_CPU_DEVICES": "1"},) * 2,
    )
    assert [item.code for item in ended] == [0, 0], [element.err for element in ended]
    return alone, pair, ended


@pytest.mark.nightly
def test_two_processes_find_the_same_spike_and_go_back_together(pair):
    alone, pair, ended = pair
    assert "rolled back from the loss spike of step 16 to step 14; batch 15" in ended[0].out
    steps, expected = lines_of(pair.metrics_jsonl), lines_of(alone.metrics_jsonl)
    assert [line["num_skipped_batches"] for line in steps] == [0] * 14 + [1] * 15
    assert steps == expected
    assert pair.non_finite_txt.read_text() == alone.non_finite_txt.read_text()
    assert "the batch's labels was NaN" in pair.non_finite_txt.read_text()


@pytest.mark.nightly
def test_one_process_and_then_two_used_every_row_once(pair):
    _, pair, _ = pair
    record = read_record(pair.examples)
    assert [item.rows for item in record.starts[1:3]] == [((0, 7),), ((7, 13),)]
    status, out, _ = proven(f"--job={pair.path}")
    assert status == 0 and "roll-backs: 1" in out
    assert "every example exactly once, in order: the record is complete, and it matches" in out
    file = pair.examples / "1.jsonl"
    file.rename(file.with_suffix(".gone"))
    status, out, _ = proven(f"--job={pair.path}")
    assert status == 1 and "had 2" in out and "rows 7 to 12 of each batch were not fed" in out
