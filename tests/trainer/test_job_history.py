"""What a job's files say of its steps when it goes on."""

from praxis_lite import EvaluationSettings, RunConfig
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.job_history import lacks_evaluation
from praxis_lite.trainer.metrics.json_lines import append_lines


def test_a_step_that_was_not_evaluated_is_but_not_the_state_before_the_first(tmp_path):
    run, job = (
        RunConfig(num_train_steps=9, evaluation=EvaluationSettings(every_steps=3)),
        JobDir(tmp_path),
    )
    lacking = [step for step in range(10) if lacks_evaluation(run, ["heldout"], job, step)]
    assert lacking == [3, 6, 9]
    append_lines(job.eval_metrics_jsonl, [{"step": 6, "dataset": "heldout", "loss": 1.0}])
    assert [step for step in lacking if lacks_evaluation(run, ["heldout"], job, step)] == [3, 9]
