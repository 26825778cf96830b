"""The recorded settings of a sweep: its search space, search algorithm and metric."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, did_you_mean, require, require_choice
from praxis_lite.host.optional_packages import optional_module
from praxis_tools.sweep.space import Space, describe

SEARCHES, PRUNERS, BETTER = ("grid", "random", "tpe"), ("median", "halving", "none"), ("min", "max")
NUM_TRIALS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The settings of a sweep.

    Attributes:
      experiment: Full name of the experiment class.
      packages: Packages in --packages.
      space: The search space.
      search: "grid" for all combinations in order, "random", or "tpe" for a search guided by
        previous results.
      num_trials: Number of trials.
      metric: Metric that ranks the trials, such as "heldout/loss", or "loss" for the training loss.
      better: "min" if lower values of the metric are better, or "max".
      pruner: Rule for ending bad trials early: "median", "halving" or "none".
      seed: Random seed of the search.
      num_steps: run.num_train_steps of the first trial.
    """

    experiment: str
    packages: Sequence[str]
    space: Space
    search: str
    num_trials: int
    metric: str
    better: str
    pruner: str
    seed: int
    num_steps: int

    def __post_init__(self) -> None:
        require_choice("--search", self.search, SEARCHES)
        require_choice("--prune", self.pruner, PRUNERS)
        require_choice("--better", self.better, BETTER)
        require(self.num_trials >= 1, "--trials", self.num_trials, "a number of trials, 1 or more")

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as JSON values for the sweep's journal."""
        to_json = optional_module("optuna.distributions", "praxis sweep").distribution_to_json
        searched = {
            path: to_json(distribution) for path, distribution in self.space.searched.items()
        }
        space = {"fixed": [*self.space.fixed], "searched": searched}
        return {**vars(self), "packages": [*self.packages], "space": space}

    @classmethod
    def from_json(cls, recorded: Mapping[str, Any]) -> "SweepSettings":
        """Reads settings from the result of `as_json`."""
        from_json = optional_module("optuna.distributions", "praxis sweep").json_to_distribution
        space = recorded["space"]
        searched = {path: from_json(text) for path, text in space["searched"].items()}
        return cls(**{**recorded, "space": Space(tuple(space["fixed"]), searched)})

    def check_continues(self, before: "SweepSettings") -> None:
        """Raises ConfigError if these settings do not match a recorded sweep.

        Only the number of trials and the pruner may differ.
        """
        now = self._fixed()
        for name, old in before._fixed().items():
            if old != (new := now[name]):
                raise ConfigError(
                    f"--job_log_dir contains a sweep with {name} {old}, but {name} is {new}. Use "
                    "the same value to resume that sweep, or choose a different directory."
                )

    def _fixed(self) -> dict[str, object]:
        """Returns {option: value} for the options that must not change when a sweep is resumed."""
        searched = itertools.starmap(describe, self.space.searched.items())
        return {
            "--exp": self.experiment,
            "--set": "; ".join([*self.space.fixed, *searched]),
            "--search": self.search,
            "--metric": self.metric,
            "--better": self.better,
            "--seed": self.seed,
        }


def metric_of(metric: str | None, eval_sets: Sequence[str]) -> str:
    """Returns the metric that ranks the trials.

    The default is the loss on the evaluation dataset, or the training loss if there is none.

    Args:
      metric: The value of --metric, or None.
      eval_sets: Names of the experiment's datasets, excluding `train`.

    Raises:
      ConfigError: The dataset does not exist, or there are several datasets and no --metric.
    """
    if metric is None:
        if len(eval_sets) > 1:
            raise ConfigError(
                "--metric is required, because the experiment has several evaluation datasets. Set "
                f"the metric that ranks the trials, such as {eval_sets[0]}/loss."
            )
        return f"{eval_sets[0]}/loss" if eval_sets else "loss"
    dataset, slash, _ = metric.rpartition("/")
    choices = [f"{name}/loss" for name in eval_sets]
    require(
        dataset in eval_sets if slash else metric == "loss",
        "--metric",
        metric,
        "a metric on an evaluation dataset or loss for the training loss, such as "
        f"{', '.join([*choices, 'loss'])}",
        did_you_mean(metric, choices).strip(),
    )
    return metric
