"""A hook of the training loop: an action between the steps, every so many of them."""

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from praxis_lite.core.callables import callable_name, check_takes
from praxis_lite.core.errors import ConfigError, did_you_mean, require

if TYPE_CHECKING:
    from pathlib import Path

    import jax

    from praxis_lite.core.partitioner.train_state import TrainState
    from praxis_lite.trainer.hooks.loop import Loop
    from praxis_lite.trainer.job_on_mesh import JobOnMesh


@dataclasses.dataclass(frozen=True)
class StepMade:
    """A step that was begun: its arrays are on the devices, and may still be computed.

    Attributes:
      step: its number, from 1.
      state: after it. The next step donates it: read what you need of it in `after_step`.
      batch: the global batch.
      key: of the run, into which the step folds its number.
      outputs: `{"metrics": name -> (value, weight), "learner": name -> scalar}`.
      is_last: True if training ends with it, as far as the hooks before this know.
    """

    step: int
    state: "TrainState"
    batch: Any
    key: "jax.Array"
    outputs: Mapping[str, Any]
    is_last: bool


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """The numbers of a step, on the host: known while the next step runs.

    Attributes:
      step: its number.
      line: its numbers by name, as metrics.jsonl has them: "loss", "grad_norm", "step_time", ...
      weight: of the loss: how many tokens or examples the step learned from.
      batch: the index of its batch in the training data.
      inputs: this process's rows of the batch, from `first_row` on.
      first_row: see `inputs`.
    """

    step: int
    line: Mapping[str, Any]
    weight: float
    batch: int
    inputs: Any
    first_row: int


class Hook(contextlib.AbstractContextManager):
    """An action while a job trains, every so many steps. Subclass it.

    An experiment names its hooks in `hooks()`, a line each: `[fdl.Config(WeightNorms, every=100)]`;
    they run in this order, after the evaluation of a step and before it is saved.

    Every process of a job makes each call, in the same order. So every process must take part in
    what compiles or reads an array of the state; files and services belong to the first process
    alone (`loop.is_first`). An exception ends training as one in a step does; training resumes
    from the newest checkpoint, and `__exit__` of every hook is called, with the exception.

    A hook is entered as a context when training begins and left when it ends. A roll-back from a
    loss spike leaves it, without an exception, and enters it again: `restore` puts it back.

    Attributes:
      every: `after_step` is called after each step that this divides, and after the last step.
        None: after the last alone.
      waits: True: `after_step` may wait for the devices or take its time, so the metrics of the
        step are read and written before, and its time is not the step's. Say False if it reads
        no array and takes no time: then the devices never wait for the host.
    """

    every: int | None = 1
    waits: bool = True

    def check(self, job: "JobOnMesh") -> None:
        """Raises ConfigError if the hook does not fit the job, before anything compiles."""

    def restore(self, saved: Any) -> None:
        """Takes what `to_save` returned when the state was saved from which training resumes.

        Args:
          saved: None at a new start, or if the hook was not there.
        """

    def to_save(self) -> Any:
        """Returns values for JSON to save with each checkpoint, or None."""

    def before_training(self, loop: "Loop", state: "TrainState") -> None:
        """Called before the first step compiles, with the `state` that it donates."""

    def compiling(self) -> contextlib.AbstractContextManager:
        """Returns a context in which the training step is compiled."""
        return contextlib.nullcontext()

    def is_due(self, step: int, is_last: bool) -> bool:
        """Returns True if `after_step` is to be called after this step."""
        return is_last or (self.every is not None and step % self.every == 0)

    def after_step(self, made: StepMade) -> str | None:
        """Called after a step has begun on the devices.

        Returns:
          Why training ends with this step, as a message, the same on all processes; None: it
          continues.
        """

    def add_metrics(self, metrics: StepMetrics) -> Mapping[str, Any]:
        """Returns more numbers for the line of a step, before it is written; all steps."""
        return {}

    def after_metrics(self, metrics: StepMetrics) -> None:
        """Called with the metrics of each step, a step late."""

    def after_evaluation(
        self, step: int, results: Mapping[str, Mapping[str, float]]
    ) -> str | None:
        """Called with an evaluation's metrics by dataset.

        Returns:
          Why training ends with this step, as of `after_step`.
        """

    def after_profile(self, folder: "Path") -> None:
        """Called in the first process alone, once the files of a profile are in `folder`."""

    def after_training(self, step: int) -> None:
        """Called after the last step, once its metrics were reported; not after an exception."""

    def __exit__(self, *exc_info: object) -> None:
        """Frees the resources of the hook, however training ended."""


METHODS = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Hook).items() if inspect.isfunction(method) and name[0] != "_"
}


def overrides(hook: Hook, method: str) -> bool:
    """Returns True if a hook overrides a method of `Hook`."""
    return getattr(type(hook), method) is not getattr(Hook, method)


def check_hooks(hooks: Any, job: "JobOnMesh") -> None:
    """Raises ConfigError unless all are hooks that can be called, and fit the job."""
    for index, hook in enumerate(hooks):
        path, name = f"hooks[{index}]", type(hook).__name__
        require(
            isinstance(hook, Hook), path, hook, "a Hook",
            "Subclass praxis_lite.Hook, and return fdl.Config(YourHook, ...) from hooks().",
        )
        is_number = type(hook.every) is int and hook.every > 0
        require(
            hook.every is None or is_number, f"{path}.every, of {name},", hook.every,
            "a number of steps, 1 or more, or None",
        )
        for method, arguments in METHODS.items():
            check_takes(f"{path}, {name}.{method},", getattr(hook, method), *arguments)
        for method in dir(hook):
            if method.startswith(("after_", "before_")) and method not in METHODS:
                raise ConfigError(
                    f"{path}: {name} has a method {method}, which nothing calls. A hook's are "
                    f"{', '.join(METHODS)}.{did_you_mean(method, METHODS)}"
                )
        hook.check(job)


def by_name(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """Returns hooks by the names under which checkpoints keep their values."""
    named: dict[str, Hook] = {}
    for hook in hooks:
        name = callable_name(type(hook))
        same = sum(item.partition("#")[0] == name for item in named)
        named[f"{name}#{same + 1}" if same else name] = hook
    return named
