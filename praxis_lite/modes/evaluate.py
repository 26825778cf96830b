"""`praxis eval`: evaluates one of a job's checkpoints, or each new checkpoint."""

import argparse
from typing import TYPE_CHECKING, Literal

from praxis_lite.modes.following import add_follow, each_checkpoint
from praxis_lite.modes.job_from_command import job_on_mesh, recorded_job_of
from praxis_lite.modes.mode import CommandLine, Mode

if TYPE_CHECKING:
    from praxis_lite.checkpoints.steps.verified_steps import Step

__all__ = ("add_step",)


class Evaluate(Mode):
    """Evaluates a checkpoint on all datasets except `train`."""

    name = "eval"
    summary = "evaluates a checkpoint of a job on all datasets except train"
    argument = "job_log_dir"
    continues_without_output = True
    is_of_many_processes = True

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds --step and --follow."""
        add_step(options)
        add_follow(options)

    def run(
        self,
        command: CommandLine,
        *,
        step: "Step",
        follow: bool,
        follow_seconds: int,
    ) -> None:
        """Evaluates the checkpoint. Raises ConfigError like `evaluation.evaluate`."""
        checkpoints = each_checkpoint(command, step, follow_seconds if follow else None)
        launched = recorded_job_of(command, "eval")
        with job_on_mesh(command, launched, "eval", same={"--step": step}) as job:
            from praxis_lite.trainer.evaluation import evaluate

            checkpoints(lambda step: evaluate(job, step))


def add_step(options: argparse._ArgumentGroup) -> None:
    """Adds the option --step, which selects a checkpoint."""
    options.add_argument(
        "--step", metavar="N|best", type=_step, help="the checkpoint to read; default: the latest"
    )


def _step(text: str) -> int | Literal["best"]:
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a checkpoint; expected a step number or 'best'. Omit --step for the "
            "latest checkpoint"
        )
    return int(text)
