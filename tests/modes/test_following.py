"""--follow: programs beside a training, which take its checkpoints and may end it early."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import pytest

from praxis_lite import EarlyStopping, EvaluationSettings, RunConfig, StopSettings
from praxis_lite.checkpoints.sharded_reading import read_arrays
from praxis_lite.checkpoints.steps.step_store import DiskSteps
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.hooks import evaluations as evaluation_hooks
from praxis_lite.trainer.hooks.tracking import Trackers
from praxis_lite.trainer.job_history import metrics_by_step
from praxis_lite.trainer.metrics.json_lines import append_lines, json_line, read_json_lines
from tests.support.job_runs import copy_of_trained, home, launch, start_process, succeed
from tests.support.process_pairs import ended, start_processes, wait_until

EXPERIMENTS = '''
import time

import fiddle as fdl

from jobzoo.experiments import Tiny, Windows
from praxis_lite import (
    BestCheckpoints, EarlyStopping, EvaluationSettings, MeshConfig, RunConfig, SaveSettings,
    StopSettings, register,
)


class SlowWindows(Windows):
    """Text that comes slowly, so that other programs keep up."""

    def rows(self, index, rows):
        time.sleep(0.1)
        return super().rows(index, rows)


@register
class Followed(Tiny):
    """Stops at the third evaluation, none of which is its own."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 2, 1))

    def datasets(self):
        train = fdl.Config(
            SlowWindows, self.corpus, "train", batch_size=13, seq_len=11, shuffle=True
        )
        return {**super().datasets(), "train": train}

    def run(self):
        early = fdl.Config(EarlyStopping, metric="heldout/loss", patience=2, min_delta=100.0)
        best = fdl.Config(BestCheckpoints, metric="heldout/loss", max_to_keep=1)
        return fdl.Config(
            RunConfig, num_train_steps=2000,
            checkpoints=fdl.Config(SaveSettings, every_steps=10, keep_every_steps=10, best=best),
            evaluation=fdl.Config(EvaluationSettings, by_follower=True),
            stopping=fdl.Config(StopSettings, early=early),
        )
'''
(home() / "jobzoo/followed.py").write_text(EXPERIMENTS)
FOLLOWED = "--exp=jobzoo.followed.Followed"


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A job that trained beside two followers, and how the three ended."""
    folder = tmp_path_factory.mktemp("followed")
    job = JobDir(folder / "job")
    reading = [f"--job_log_dir={job.path}", "--follow", "--follow_seconds=120"]
    started = [
        # The followers wait for the job.
        start_process("--mode=eval", *reading, cwd=folder, env={"JAX_LOG_COMPILES": "1"}),
        start_process("--mode=decode", *reading, cwd=folder, env={"JAX_LOG_COMPILES": "1"}),
        start_process(FOLLOWED, f"--job_log_dir={job.path}", cwd=folder),
    ]
    return job, dict(zip(("eval", "decode", "train"), ended(started), strict=True))


@pytest.mark.slow
def test_all_end_by_themselves_and_the_training_early_by_the_followers_values(followed):
    job, processes = followed
    assert {name: done.code for name, done in processes.items()} == dict.fromkeys(processes, 0)
    steps = [line["step"] for line in read_json_lines(job.eval_metrics_jsonl)]
    last = DiskSteps(job.checkpoints).committed()[-1]
    # patience is 2, and no evaluation is better than the first by min_delta.
    assert steps[:3] == sorted(steps[:3]) and steps[2] <= last < 2000
    early = f"stopped early at step {last}: heldout/loss was best at step {steps[0]} "
    assert early in processes["train"].out
    for step in steps[:3]:
        assert f"follower: step {step}  heldout: loss" in processes["train"].out
    for name in ("eval", "decode"):
        assert processes[name].out.startswith("waiting for the first checkpoint of ")
        assert processes[name].out.endswith(f"the job has ended with step {last}\n")


@pytest.mark.slow
def test_a_followers_results_are_those_of_the_same_mode_for_each_step(followed, tmp_path):
    job, processes = followed
    again = JobDir(shutil.copytree(job.path, tmp_path / "job"))
    again.eval_metrics_jsonl.unlink()
    shutil.rmtree(again.path / "decode")
    lines = read_json_lines(job.eval_metrics_jsonl)
    for line in (lines[0], lines[-1]):
        succeed("--mode=eval", f"--job_log_dir={again.path}", f"--step={line['step']}")
        assert read_json_lines(again.eval_metrics_jsonl)[-1] == line
    steps = re.findall(r"^decoded .* of step (\d+): ", processes["decode"].out, re.M)
    for step in {steps[0], steps[-1]}:
        succeed("--mode=decode", f"--job_log_dir={again.path}", f"--step={step}")
        theirs, ours = (x.decode_jsonl("prompts", int(step)) for x in (job, again))
        assert theirs.read_bytes() == ours.read_bytes()


@pytest.mark.slow
def test_a_follower_compiles_once(followed):
    _, processes = followed
    for name, program in (("eval", "_eval_examples"), ("decode", "_decode_step")):
        assert processes[name].out.count("restored the weights of step") >= 2
        compiled = re.findall(rf"Finished XLA compilation of jit\({program}\)", processes[name].err)
        assert len(compiled) == 1


@pytest.mark.slow
def test_the_best_checkpoint_is_chosen_by_the_followers_values(followed):
    job, _ = followed
    losses = {step: values["heldout/loss"] for step, values in metrics_by_step(job).items()}
    best = min(losses, key=losses.get)
    assert job.path.joinpath("checkpoints", str(best)).is_dir()
    done = launch("--mode=eval", f"--job_log_dir={job.path}", "--step=best")
    assert f"restored the weights of step {best}\n" in done.out
    manifests = [
        json.loads((job.checkpoints / str(step) / "manifest.json").read_text()) for step in losses
    ]
    assert all(manifest["metrics"] == {} for manifest in manifests)


@pytest.mark.nightly
def test_two_processes_end_after_the_same_step_when_a_follower_has_said_it(tmp_path):
    job = JobDir(tmp_path / "job")
    started = start_processes(FOLLOWED, f"--job_log_dir={job.path}", cwd=tmp_path)
    wait_until(lambda: len(DiskSteps(job.checkpoints).committed()) >= 1, started)
    for step in (1, 2, 3):
        append_lines(job.eval_metrics_jsonl, [{"step": step, "dataset": "heldout", "loss": 5.0}])
    at = time.monotonic()
    done = ended(started)
    assert [process.code for process in done] == [0, 0], done
    assert max(process.at for process in done) - at < 30
    last = DiskSteps(job.checkpoints).committed()[-1]
    assert f"stopped early at step {last}: heldout/loss was best at step 1 " in done[0].out
    assert [line["step"] for line in read_json_lines(job.metrics_jsonl)] == [*range(1, last + 1)]


@pytest.mark.slow
def test_a_step_that_is_deleted_or_damaged_is_skipped_and_said(tmp_path, monkeypatch):
    job = copy_of_trained(tmp_path / "job")
    (job.checkpoints / "7" / "commit.json").write_text("{}")
    before = read_json_lines(job.eval_metrics_jsonl)
    done = launch("--mode=eval", f"--job_log_dir={job.path}", "--follow", "--follow_seconds=1")
    assert done.code == 0, done.err
    assert "skipped the checkpoints of steps 3, 6: 7 is newer" in done.out
    assert "step 7 is skipped: The checkpoint of step 7 in" in done.out
    assert read_json_lines(job.eval_metrics_jsonl) == before
    shutil.rmtree(job.checkpoints / "7")

    def read_and_delete(*args):
        arrays = read_arrays(*args)
        DiskSteps(job.checkpoints).remove(6)
        return arrays

    monkeypatch.setattr("praxis_lite.checkpoints.sharded_reading.read_arrays", read_and_delete)
    done = launch("--mode=eval", f"--job_log_dir={job.path}", "--follow", "--follow_seconds=1")
    assert done.code == 0, done.err
    assert re.search("step 6 is skipped: The checkpoint of step 6 was deleted", done.out)
    assert read_json_lines(job.eval_metrics_jsonl) == before


def test_what_does_not_go_with_follow_is_refused(tmp_path):
    for argv, words in [
        (["--mode=eval", "--follow", "--step=3"], "--step"),
        (["--mode=decode", "--follow", "--chat"], "--chat"),
        (["--mode=eval", "--follow", "--follow_seconds=0"], "--follow_seconds"),
        (["--mode=eval", "--follow", "--follow_seconds=1"], "no checkpoint was saved within 1 s"),
    ]:
        done = launch(*argv, f"--job_log_dir={tmp_path}/none")
        assert done.code == 2 and words in " ".join(done.err.split()), argv


def test_a_damaged_line_of_a_guest_is_said_once_and_ends_nothing(tmp_path, monkeypatch):
    early = EarlyStopping(metric="heldout/loss", patience=1)
    run = RunConfig(
        num_train_steps=9,
        evaluation=EvaluationSettings(by_follower=True),
        stopping=StopSettings(early=early),
    )
    files, notes = JobDir(tmp_path), []
    monkeypatch.setattr(evaluation_hooks, "_POLL_SECONDS", 0.0)
    job, trackers = SimpleNamespace(run=run, files=files), Trackers([], files)
    hook = evaluation_hooks.FollowedEvaluations(job, trackers)
    loop = SimpleNamespace(
        is_first=True,
        note=notes.append,
        proposed_end=None,
        consensus=SimpleNamespace(end_is_due=False),
    )
    hook.before_training(loop, None)
    good = [{"step": step, "dataset": "heldout", "loss": loss} for step, loss in ((5, 1), (7, 2))]
    bad = '{"step": 6, "loss": 1}\n'
    for text in (bad, bad * 2, "".join(map(json_line, [good[0], {"step": 6, "dataset": "x"}]))):
        files.eval_metrics_jsonl.write_text(text)
        hook.after_step(None)
    assert [note.partition(":")[0] for note in notes[1:]] == ["note", *["follower"] * 2]
    assert loop.proposed_end is None
    append_lines(files.eval_metrics_jsonl, good[1:])
    hook.after_step(None)
    assert "was best at step 5" in loop.proposed_end


def test_a_job_that_leaves_evaluations_to_a_follower_has_none_of_its_own():
    done = launch(
        FOLLOWED,
        "--job_log_dir=unused",
        "--set",
        "run.evaluation.every_steps=5",
    )
    assert done.code == 2 and "run.evaluation.by_follower" in done.err
