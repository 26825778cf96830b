"""Jobs that average, stop by themselves and keep the best: what is evaluated, kept and said."""

import functools
import math

import fiddle as fdl
import jax
import numpy as np
import pytest

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.config.config_json import load_config_file
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.evaluation import WeightedMean
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.job_runs import home, launch, lines_of, loaded, succeed
from tests.support.line_jobs import LINE
from tests.support.marks import slow_but

AVERAGED, TINY = "--exp=jobzoo.experiments.Averaged", "--exp=jobzoo.experiments.Tiny"


@functools.cache
def averaged():
    """Returns a job that averages its weights and stopped early, and what it printed."""
    folder = home() / "averaged"
    return JobDir(folder), succeed(AVERAGED, f"--job_log_dir={folder}")


def heldout_losses(job) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_json_lines(job.eval_metrics_jsonl)]


@pytest.mark.slow
def test_training_stops_when_the_metric_gets_no_better_and_saves_that_step():
    job, done = averaged()
    losses = dict(heldout_losses(job))
    # patience is 2: the last two are no better than the best before them.
    best = min(losses, key=losses.get)
    assert list(losses) == list(range(1, best + 3)) and best + 2 < 9
    assert f"stopped early at step {best + 2}: heldout/loss was best at step {best}" in done.out
    assert f"trained to step {best + 2}: {job.path}" in done.out
    assert [line["step"] for line in read_json_lines(job.metrics_jsonl)] == list(losses)
    assert job.loss_curve_png.is_file()
    with Checkpoints(job.checkpoints) as saved:
        # The two newest, and the best of the even steps, which are saved.
        saved_steps = [step for step in losses if step % 2 == 0 or step == best + 2]
        best_saved = min((step for step in saved_steps if step % 2 == 0), key=losses.get)
        assert saved.all_steps() == sorted({best_saved, *saved_steps[-2:]})
        assert saved.best_step() == best_saved


@pytest.mark.slow
def test_a_job_that_stopped_says_so_and_how_to_go_on():
    job, _ = averaged()
    before = heldout_losses(job)
    done = succeed(AVERAGED, f"--job_log_dir={job.path}")
    assert "The job stopped early at step" in done.out
    assert "set run.stopping.early=None" in done.out
    assert heldout_losses(job) == before


@pytest.mark.slow
def test_evaluation_takes_the_averages_of_the_checkpoint_that_is_named():
    job, _ = averaged()
    trained_losses = dict(heldout_losses(job))
    argv = ("--mode=eval", f"--job_log_dir={job.path}")
    done = succeed(*argv, "--step=best")
    step, loss = heldout_losses(job)[-1]
    assert loss == trained_losses[step]
    assert f"restored the weights of step {step}, averaged" in done.out
    done = succeed(*argv, "--set", "run.evaluation.use_ema_states=False")
    assert ", averaged" not in done.out
    step, loss = heldout_losses(job)[-1]
    assert step == max(trained_losses) and loss != trained_losses[step]


@pytest.mark.slow
def test_a_loaded_model_has_the_averages_where_the_run_says_so():
    job, _ = averaged()
    trained_losses = dict(heldout_losses(job))
    model = loaded(job, "best")
    assert model.evaluate("heldout")["loss"] == pytest.approx(trained_losses[model.step], abs=1e-5)
    raw = loaded(job, "best", settings=["run.evaluation.use_ema_states=False"])
    path = next(path for path in raw.weights if path.endswith("ffn_layer1/linear/w"))
    assert np.abs(raw.weights[path] - model.weights[path]).max() > 1e-3
    # To decode is another setting, which says averages for both.
    assert raw.generate("1 plus", max_decode_steps=1) == model.generate(
        "1 plus", max_decode_steps=1
    )


@pytest.mark.slow
def test_the_averages_evaluated_are_those_of_the_checkpoint():
    job, _ = averaged()
    built = fdl.build(load_config_file(job.config_json, packages=["jobzoo"]).config)
    partitioner = Partitioner(built.task, make_mesh(built.mesh))
    with Checkpoints(job.checkpoints) as saved:
        restored = saved.restore(partitioner.layout, partitioner.mesh)
    step, state = restored.step, restored.state
    ema, params = state.opt_states["ema"], state.mdl_vars["params"]
    assert "final_ln" not in ema  # Frozen: not averaged.
    mdl_vars = {**state.mdl_vars, "params": {**ema, "final_ln": params["final_ln"]}}
    mean = WeightedMean()
    for inputs in built.datasets["heldout"].batches():
        batch = partitioner.global_batch(inputs)
        mean.add(jax.device_get(partitioner.eval_step(mdl_vars, batch)))
    assert math.isclose(mean.result()["loss"], dict(heldout_losses(job)[:step])[step], rel_tol=1e-6)
    some = np.asarray(ema["softmax"]["logits_ffn"]["linear"]["w"])
    assert not np.allclose(some, params["softmax"]["logits_ffn"]["linear"]["w"])


@pytest.mark.slow
def test_steps_skipped_in_a_row_end_the_job_and_name_the_last_good_checkpoint(tmp_path):
    job = JobDir(tmp_path / "job")
    succeed(LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=7")
    limits = (
        "task.learner.skip_step_gradient_norm_value=1e-9",
        "run.stopping.max_skipped_steps_in_a_row=3",
    )
    done = launch(
        LINE,
        f"--job_log_dir={job.path}",
        "--set",
        *limits,
        "run.num_train_steps=30",
        "run.checkpoints.every_steps=1",
        "run.checkpoints.max_to_keep=9",
    )
    assert done.code == 2
    words = " ".join(done.err.split())
    assert " 3 steps, up to step 10," in words
    assert "The last good step is 7;" in words
    assert "the newest checkpoint at or before that step is step 7, in" in words
    assert "run.stopping.max_skipped_steps_in_a_row" in words
    assert [line["num_skipped_in_a_row"] for line in read_json_lines(job.metrics_jsonl)][6:] == [
        0,
        1,
        2,
        3,
    ]
    # Nothing was lost, and the weights are those of step 7: it goes on once the limit is gone.
    again = succeed(LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=11")
    assert "trained to step 11" in again.out


@pytest.mark.slow
def test_an_evaluation_in_which_nothing_weighs_ends_no_training(tmp_path):
    done = succeed("--exp=jobzoo.lines.Weightless", f"--job_log_dir={tmp_path}")
    assert f"trained to step 7: {tmp_path}" in done.out and "stopped" not in done.out
    assert "step 3  heldout: no metrics, because every row has weight 0" in done.out
    assert [line["step"] for line in lines_of(JobDir(tmp_path).metrics_jsonl)] == [*range(1, 8)]
    assert [line["step"] for line in lines_of(JobDir(tmp_path).eval_metrics_jsonl)] == [3, 6, 7]


def test_a_watched_metric_that_an_evaluation_lacks_is_named(tmp_path):
    done = launch("--exp=jobzoo.lines.Watched", f"--job_log_dir={tmp_path}")
    text = " ".join(done.err.split())
    assert done.code == 2 and "Traceback" not in text
    assert "run.stopping.early watches heldout/loss, but the evaluation at step 3 did not" in text
    assert "datasets.heldout have weight" in text


# How a run ends whose last step taught it nothing: by its own end, by a limit, by nothing to do.
UNSOUND = {
    "a skipped step": (("datasets.train.nan_at=29,",), "The last step, 29, was skipped", 29),
    "two skipped steps": (
        ("datasets.train.nan_at=5,6", "run.num_train_steps=7", "run.loss_spikes.action=report"),
        "The last 2 steps, up to step 7, were skipped",
        7,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but({"a skipped step"}, UNSOUND))
def test_a_run_whose_last_step_was_skipped_is_kept_and_ends_with_status_3(case, tmp_path):
    settings, words, step = UNSOUND[case]
    argv = (LINE, f"--job_log_dir={tmp_path}", "--set", *settings)
    done = launch(*argv)
    message = " ".join(done.err.split())
    assert done.code == 3 and words in message and "Traceback" not in message, done
    assert f"trained to step {step}" in done.out
    assert "run.debug_nans=true" in message and "run.num_train_steps" in message
    job = JobDir(tmp_path)
    assert job.loss_curve_png.is_file() and str(tmp_path) in message
    with Checkpoints(job.checkpoints) as saved:
        assert saved.latest_step() == step
    # A launch that has nothing to do says it again.
    again = launch(*argv)
    assert (
        again.code == 3
        and "has already completed" in again.out
        and words in " ".join(again.err.split())
    )


def test_a_run_whose_last_evaluation_is_not_finite_ends_with_status_3(tmp_path):
    done = launch(
        "--exp=jobzoo.lines.Weightless",
        f"--job_log_dir={tmp_path}",
        "--set",
        "datasets.heldout.weight=1.0",
        "datasets.heldout.nan_at=1,",
    )
    message = " ".join(done.err.split())
    assert done.code == 3, done
    assert "heldout/loss is nan in the evaluation of step 7" in message


@pytest.mark.slow
def test_an_id_without_a_row_ends_training_before_its_step(tmp_path, monkeypatch):
    monkeypatch.setenv("JOBZOO_FOREIGN_ID_AT", "4")
    done = launch(TINY, f"--job_log_dir={tmp_path}")
    assert done.code == 2
    assert "datasets.train, batch 4: row 5 of labels contains 300" in " ".join(done.err.split())
    job = JobDir(tmp_path)
    assert [line["num_skipped_steps"] for line in lines_of(job.metrics_jsonl)] == [0] * 3
    with Checkpoints(job.checkpoints) as saved:
        assert saved.latest_step() == 3


def test_a_schedule_that_leaves_all_measure_ends_training_at_that_step(tmp_path):
    schedule = "task.learner.learning_rate"
    done = launch(
        "--exp=jobzoo.lines.Scheduled",
        f"--job_log_dir={tmp_path}",
        "--set",
        f"{schedule}.value=1e30",
    )
    message = " ".join(done.err.split())
    assert done.code == 2 and "learning_rate of step 1 is 1e+30" in message, done


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("run.stopping.early.metric=heldout/los",), " heldout/loss"),
        pytest.param(
            ("run.evaluation.every_steps=None",),
            "Set run.evaluation.every_steps",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("run.checkpoints.every_steps=3", "run.evaluation.every_steps=2"),
            "run.evaluation.every_steps",
            marks=pytest.mark.slow,
        ),
        (("task.learner.ema_decay=0.0",), "ema_decay"),
    ],
)
def test_wrong_settings_are_refused_before_anything_compiles(argv, message, tmp_path):
    done = launch(AVERAGED, f"--job_log_dir={tmp_path}", "--set", *argv)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert done.num_compiled == 0


@pytest.mark.slow
def test_step_is_for_eval_and_decode_only(tmp_path):
    done = launch(TINY, f"--job_log_dir={tmp_path}", "--step=3")
    assert done.code == 2 and "--step is an option of eval" in done.err
    done = launch("--mode=eval", f"--job_log_dir={averaged()[0].path}", "--step=99")
    assert done.code == 2 and " 99 " in done.err
    assert "None" not in done.err
