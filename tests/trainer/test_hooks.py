"""Hooks of a user, and metrics of an experiment, in jobs that are launched, stopped and resumed."""

import json
import shutil

import numpy as np
import pytest

from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.job_runs import home, launch, lines_of, succeed
from tests.support.line_jobs import LINE  # noqa: F401 (It makes jobzoo.lines.)

EXPERIMENTS = '''
import os
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite import EvaluationSettings, Hook, LossSpikeSettings, register
from jobzoo.lines import Line, Lines

CALLS, KEPT = [], []


def absolute(outputs, inputs):
    return jnp.sqrt(outputs["loss"])


def mean(outputs, inputs):
    return jnp.mean(outputs["loss"])


class Recorder(Hook):
    """Keeps what it is told; adds the norm of the weights that it saw last to each line."""

    def __init__(self, every=3, waits=True, ends_at=None, raises_at=None):
        self.every, self.waits = every, waits
        self.ends_at, self.raises_at = ends_at, raises_at

    def restore(self, saved):
        CALLS.append(("restore", saved))
        self.steps = list(saved or ())

    def to_save(self):
        return self.steps

    def before_training(self, loop, state):
        CALLS.append(("before", loop.first_step, norm(state)))
        self.loop = loop

    def compiling(self):
        CALLS.append(("compiling",))
        return super().compiling()

    def after_step(self, made):
        if made.step == self.raises_at:
            raise ArithmeticError("the hook's own")
        self.steps.append(made.step)
        CALLS.append(("step", made.step, norm(made.state) if self.waits else None, made.is_last))
        KEPT.append(made.state)
        return "enough was seen" if made.step == self.ends_at else None

    def add_metrics(self, metrics):
        return {"num_seen": len(self.steps)}

    def after_metrics(self, metrics):
        CALLS.append(("metrics", metrics.step, dict(metrics.line), metrics.weight))

    def after_evaluation(self, step, results):
        CALLS.append(("evaluation", step, results))

    def after_training(self, step):
        CALLS.append(("after", step))

    def __exit__(self, kind, *rest):
        CALLS.append(("exit", kind and kind.__name__))


def norm(state):
    return float(np.linalg.norm(jax.device_get(state.mdl_vars["params"]["w"])))


class Typo(Hook):
    def after_steps(self, made):
        pass


class Arguments(Hook):
    def after_step(self, step, state):
        pass


class NotJson(Hook):
    def to_save(self):
        return {1, 2}


@register
class Hooked(Line):
    """A line with a hook and a metric, seven steps."""

    def task(self):
        task = super().task()
        task.metrics = {"absolute": fdl.Partial(absolute)}
        return task

    def datasets(self):
        heldout = fdl.Config(Lines, batch_size=13)
        return {"train": fdl.Config(Lines, batch_size=13), "heldout": heldout}

    def run(self):
        run = super().run()
        run.num_train_steps, run.checkpoints.every_steps = 7, 2
        run.evaluation = fdl.Config(EvaluationSettings, every_steps=4, max_batches=2)
        run.loss_spikes = fdl.Config(LossSpikeSettings)
        return run

    def hooks(self):
        return [fdl.Config(Recorder, every=3)]


class WithMetric(Hooked):
    METRIC, NAME = absolute, ""

    def task(self):
        task = super().task()
        task.metrics = {self.NAME: fdl.Partial(type(self).METRIC)}
        return task


@register
class MetricLoss(WithMetric):
    """A metric with the name of the loss."""

    NAME = "loss"


@register
class MetricNorm(WithMetric):
    """A metric with the name of a number of the learner."""

    NAME = "grad_norm"


@register
class MetricMine(WithMetric):
    """A metric of one argument."""

    METRIC, NAME = norm, "mine"


@register
class MetricMean(WithMetric):
    """A metric that takes the mean itself."""

    METRIC, NAME = mean, "mine"


@register
class WithTypo(Hooked):
    """A method that nothing calls."""

    def hooks(self):
        return [fdl.Config(Typo)]


@register
class WithArguments(Hooked):
    """A method of other arguments."""

    def hooks(self):
        return [fdl.Config(Arguments)]


@register
class WithNoHook(Hooked):
    """A config of something else."""

    def hooks(self):
        return [fdl.Config(dict, every=3)]


@register
class WithInstance(Hooked):
    """An instance."""

    def hooks(self):
        return [Recorder()]


@register
class WithoutJson(Hooked):
    """A hook that saves what JSON cannot hold."""

    def hooks(self):
        return [fdl.Config(NotJson)]


@register
class Plain(Hooked):
    """The same line without a hook."""

    def hooks(self):
        return []


@register
class Poisoned(Hooked):
    """A line that rolls back from a spike, after step 14."""

    def datasets(self):
        return {"train": fdl.Config(Lines, batch_size=13, poisoned=(15,))}

    def run(self):
        return Line.run(self)
'''
(home() / "jobzoo/hooked.py").write_text(EXPERIMENTS)
HOOKED = "--exp=jobzoo.hooked.Hooked"


def calls_of(*argv, runs=succeed):
    """Returns the calls that the hook noted in a launch, and the launch."""
    import jobzoo.hooked as hooked

    hooked.CALLS.clear()
    hooked.KEPT.clear()
    done = runs(*argv)
    return list(hooked.CALLS), done


def of_kind(calls, kind):
    return [call[1:] for call in calls if call[0] == kind]


def steps_of(job):
    return lines_of(job.metrics_jsonl)


@pytest.fixture(scope="module")
def whole():
    """The job in one go, and the calls of its hook."""
    job = JobDir(home() / "hooked_whole")
    calls, done = calls_of(HOOKED, f"--job_log_dir={job.path}")
    return job, calls, done


def test_a_hook_is_called_every_so_many_steps_with_what_the_files_have(whole):
    job, calls, _ = whole
    assert [(step, is_last) for step, _, is_last in of_kind(calls, "step")] == [
        (3, False),
        (6, False),
        (7, True),
    ]
    lines = read_json_lines(job.metrics_jsonl)
    assert [line for _, line, _ in of_kind(calls, "metrics")] == lines
    assert [weight for *_, weight in of_kind(calls, "metrics")] == [13.0] * 7
    # After a step come its own numbers, for the hook waits: num_seen is of the steps before.
    assert [line["num_seen"] for line in lines] == [0, 0, 0, 1, 1, 1, 2]
    evaluated = read_json_lines(job.eval_metrics_jsonl)
    assert [
        {"step": step, "dataset": "heldout", **results["heldout"]}
        for step, results in of_kind(calls, "evaluation")
    ] == evaluated
    assert [line["step"] for line in evaluated] == [4, 7]
    kinds = [call[0] for call in calls]
    assert kinds[:3] == ["restore", "before", "compiling"] and kinds[-2:] == ["after", "exit"]
    assert of_kind(calls, "exit") == [(None,)]


@pytest.mark.slow
def test_the_hook_is_in_the_config_and_is_set_by_its_place(whole, tmp_path):
    config = json.loads(whole[0].config_json.read_text())
    assert "jobzoo.hooked:Recorder" in json.dumps(config)
    assert "hooks[0].every=3" in whole[0].config_txt.read_text()
    calls, _ = calls_of(
        HOOKED,
        f"--job_log_dir={tmp_path}",
        "--set",
        "hooks[0].every=2",
        "hooks[0].waits=false",
        "run.evaluation.every_steps=None",
        "run.checkpoints.every_steps=100",
    )
    assert [step for step, *_ in of_kind(calls, "step")] == [2, 4, 6, 7]
    # It did not wait, so its own steps were seen before their numbers were read; but the last,
    # which the evaluation waited for.
    assert [line["num_seen"] for line in steps_of(JobDir(tmp_path))] == [0, 1, 1, 2, 2, 3, 3]


def test_what_a_hook_and_a_metric_say_is_the_same_after_a_stop(whole, tmp_path):
    argv = (HOOKED, f"--job_log_dir={tmp_path}", "--set")
    first, _ = calls_of(*argv, "run.num_train_steps=4", "hooks[0].every=5")
    second, _ = calls_of(*argv, "run.num_train_steps=7", "hooks[0].every=3")
    assert of_kind(first, "restore") == [(None,)]
    # Step 4 was the last one then, so it was seen; the checkpoint of step 4 has that.
    assert of_kind(second, "restore") == [([4],)]
    whole_steps, resumed = steps_of(whole[0]), steps_of(JobDir(tmp_path))
    without = [{n: v for n, v in line.items() if n != "num_seen"} for line in whole_steps]
    assert [{n: v for n, v in line.items() if n != "num_seen"} for line in resumed] == without
    assert [line["num_seen"] for line in resumed] == [0, 0, 0, 0, 1, 1, 2]
    # The hook saw the weights of step 4 before training, and of 6 and 7 after.
    norms = {step: norm for step, norm, _ in of_kind(whole[1], "step")}
    ((first_step, _),) = of_kind(second, "before")
    assert first_step == 4
    assert {step: norm for step, norm, _ in of_kind(second, "step")} == {
        step: norms[step] for step in (6, 7)
    }


def test_a_metric_of_the_experiment_is_numpys_in_training_and_evaluation(whole, tmp_path):
    import jobzoo.lines as lines

    losses, roots = [], []
    for index in range(2):
        batch = lines.Lines(13).rows(index, slice(0, 13))
        losses.append((batch["inputs"], batch["labels"]))
    for line in read_json_lines(whole[0].metrics_jsonl):
        roots.append(line["absolute"])
        assert 0 < line["absolute"] <= np.sqrt(line["loss"]) * (1 + 1e-6)  # Jensen.
    assert len(set(roots)) == 7
    from tests.support.job_runs import loaded

    weights = np.asarray(loaded(whole[0]).mdl_vars["params"]["w"], np.float64)
    expected = np.mean([np.abs(x @ weights - y) for x, y in losses])
    actual = read_json_lines(whole[0].eval_metrics_jsonl)[-1]["absolute"]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    # The evaluation adds lines, so it gets a copy.
    shutil.copytree(whole[0].path, tmp_path / "job")
    done = succeed("--mode=eval", f"--job_log_dir={tmp_path / 'job'}")
    assert f"absolute {expected:.4f}" in done.out


@pytest.mark.slow
def test_a_hook_ends_training_and_its_step_is_saved(tmp_path):
    argv = (HOOKED, f"--job_log_dir={tmp_path}", "--set")
    calls, done = calls_of(*argv, "hooks[0].ends_at=3")
    assert "stopped early at step 3: enough was seen" in done.out
    assert f"trained to step 3: {tmp_path}" in done.out
    assert of_kind(calls, "after") == [(3,)]
    calls, done = calls_of(*argv, "hooks[0].ends_at=None")
    assert of_kind(calls, "restore") == [([3],)] and of_kind(calls, "after") == [(7,)]


@pytest.mark.slow
def test_an_exception_of_a_hook_ends_the_job_with_its_line(tmp_path):
    argv = (HOOKED, f"--job_log_dir={tmp_path}")
    calls, done = calls_of(*argv, "--set", "hooks[0].raises_at=6", runs=launch)
    assert done.code == 1
    assert "the hook's own" in done.err and "hooked.py" in done.err
    assert of_kind(calls, "exit") == [("ArithmeticError",)] and not of_kind(calls, "after")
    # Step 5 was made, and reported; the checkpoint of step 4 is what is gone on from.
    assert [line["step"] for line in steps_of(JobDir(tmp_path))] == [1, 2, 3, 4, 5, 6]
    calls, _ = calls_of(*argv)
    assert of_kind(calls, "restore") == [([3],)] and of_kind(calls, "before")[0][0] == 4


@pytest.mark.slow
def test_a_state_that_a_hook_keeps_is_gone_when_the_next_step_begins(whole):
    import jobzoo.hooked as hooked

    calls_of(HOOKED, f"--job_log_dir={home() / 'hooked_kept'}")
    kept = hooked.KEPT[0].mdl_vars["params"]["w"]
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(kept)


@pytest.mark.slow
def test_a_roll_back_restores_the_hook(tmp_path):
    argv = ("--exp=jobzoo.hooked.Poisoned", f"--job_log_dir={tmp_path}")
    calls, done = calls_of(*argv, "--set", "hooks[0].every=7", "run.num_train_steps=19")
    assert "rolled back from the loss spike of step 16 to step 14" in done.out
    assert of_kind(calls, "restore") == [(None,), ([7, 14],)]
    assert of_kind(calls, "exit") == [(None,), (None,)]
    assert [step for step, *_ in of_kind(calls, "step")] == [7, 14, 19]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("WithTypo", (), ("hooks[0]", "after_steps", "Did you mean after_step")),
        ("WithArguments", (), ("hooks[0], Arguments.after_step,", "(dispatched)")),
        ("WithNoHook", (), ("hooks[0]", "a Hook")),
        ("WithInstance", (), ("hooks()[0]", "a built Recorder")),
        ("Hooked", ("hooks[0].every=0",), ("hooks[0].every", "0", "a positive number of steps")),
        ("Hooked", ("hooks[0].evry=2",), ("evry", "every")),
        ("MetricLoss", (), ("['loss']", "Rename the user-defined metric")),
        ("MetricNorm", (), ("'grad_norm'", "Rename the metric")),
        ("MetricMine", (), ("['mine']", "(outputs, inputs)")),
        ("MetricMean", (), ("['mine']", "float32[]", "padding rows")),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_hook_or_a_metric_is_said_before_anything_compiles(
    tmp_path, name, settings, words
):
    more = ("--set", *settings) if settings else ()
    done = launch(f"--exp=jobzoo.hooked.{name}", f"--job_log_dir={tmp_path}", *more)
    message = " ".join(done.err.split())
    assert (done.code, done.num_compiled) == (2, 0), message
    for word in words:
        assert word in message


def test_what_json_cannot_hold_is_refused_when_it_is_saved(tmp_path):
    done = launch("--exp=jobzoo.hooked.WithoutJson", f"--job_log_dir={tmp_path}")
    assert done.code == 2 and "NotJson.to_save" in " ".join(done.err.split())


@pytest.mark.slow
def test_hooks_change_no_number_and_compile_nothing(whole, tmp_path):
    job, _, _ = whole
    done = succeed("--exp=jobzoo.hooked.Plain", f"--job_log_dir={tmp_path}")
    plain, hooked = (lines_of(item.metrics_jsonl) for item in (JobDir(tmp_path), job))
    assert [line["loss"] for line in plain] == [line["loss"] for line in hooked]
    again = tmp_path / "hooked"
    assert succeed(HOOKED, f"--job_log_dir={again}").num_compiled == done.num_compiled
