"""The base class of hooks, which act between training steps."""

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
    from praxis_lite.trainer.hooks.loop_state import LoopState
    from praxis_lite.trainer.job_on_mesh import JobOnMesh


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
    """A dispatched training step, whose arrays the devices may still be computing.

    Attributes:
      step: The step's number, from 1.
      state: The state after the step. It is donated to the next step, so read it in `after_step`.
      batch: The global batch.
      key: The run's random key, into which the step's number is folded.
      outputs: `{"metrics": {name: (value, weight)}, "learner": {name: scalar}}`.
      is_last: Whether training is expected to end with this step.
    """

    step: int
    state: "TrainState"
    batch: Any
    key: "jax.Array"
    outputs: Mapping[str, Any]
    is_last: bool


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """A step's metrics on the host, available while the next step runs.

    Attributes:
      step: The step's number.
      line: The step's line of metrics.jsonl: values keyed by name, such as "loss" and "step_time".
      weight: Weight of the loss: the number of tokens or examples in the batch.
      batch_index: Index of the batch in the training data.
      inputs: This process's rows in the batch, as NumPy arrays.
      first_row: Index of this process's first row in the batch.
    """

    step: int
    line: Mapping[str, Any]
    weight: float
    batch_index: int
    inputs: Any
    first_row: int


class Hook(contextlib.AbstractContextManager):
    """Base class of hooks: actions between training steps. Subclass it.

    An experiment returns configs of its hooks from `hooks()`, such as
    `[fdl.Config(WeightNorms, every=100)]`. The hooks run in this order, after a step is evaluated
    and before the step's checkpoint is saved.

    Every process calls every hook in the same order. Code that compiles, or that reads an array in
    the state, must therefore run in all processes. Write files and call services only in the first
    process (`loop.is_first`). An exception in a hook ends training like an exception in a step: the
    next launch resumes from the newest checkpoint. The exception is passed to every hook's
    `__exit__`.

    A hook is a context manager, which is entered when training starts and exited when it ends. In a
    roll-back from a loss spike, the hook is exited without an exception and entered again, and
    `restore` is called.

    Attributes:
      every: `after_step` is called after every multiple of this number of steps, and after the last
        step. If None, it is only called after the last step.
      waits: Whether `after_step` may wait for the devices or take time. If True, the metrics of the
        step are read and written first, and the hook's time is not included in the step time. Set
        `waits` to False for a hook that reads no array, so that the devices never wait for the
        host.
    """

    every: int | None = 1
    waits: bool = True

    def check(self, job: "JobOnMesh", /) -> None:
        """Raises ConfigError if the hook does not fit the job, before anything is compiled."""

    def restore(self, saved: Any, /) -> None:
        """Restores the hook's state from the checkpoint from which training resumes.

        Args:
          saved: The value that `to_save` returned for that checkpoint, or None if the job is new or
            the hook was added later.
        """

    def to_save(self) -> Any:
        """Returns a JSON-serializable value to save with each checkpoint, or None."""

    def before_training(self, loop: "LoopState", state: "TrainState", /) -> None:
        """Called before the first step is compiled, with the state that is donated to that step."""

    def compiling(self) -> contextlib.AbstractContextManager:
        """Returns a context manager in which the training step is compiled."""
        return contextlib.nullcontext()

    def is_due(self, step: int, is_last: bool, /) -> bool:
        """Returns whether to call `after_step` after this step."""
        return is_last or (self.every is not None and step % self.every == 0)

    def after_step(self, dispatched: DispatchedStep, /) -> str | None:
        """Called after a step has been dispatched to the devices.

        Args:
          dispatched: The dispatched step.

        Returns:
          The reason why training must end with this step, the same in all processes; None to
          continue.
        """

    def add_metrics(self, metrics: StepMetrics, /) -> Mapping[str, Any]:
        """Returns additional numbers for a step's line in metrics.jsonl; called for every step."""
        return {}

    def after_metrics(self, metrics: StepMetrics, /) -> None:
        """Called with every step's metrics, one step late."""

    def after_evaluation(
        self, step: int, results: Mapping[str, Mapping[str, float]], /
    ) -> str | None:
        """Called after an evaluation.

        Args:
          step: The evaluated step.
          results: Metrics, keyed by dataset and then by name.

        Returns:
          A message with the reason why training must end with this step, or None to continue.
        """

    def after_profile(self, folder: "Path", /) -> None:
        """Called in the first process only, after a profile's files have been written."""

    def after_training(self, step: int, /) -> None:
        """Called after the last step's metrics have been reported, except after an exception."""

    def __exit__(self, *exc_info: object) -> None:
        """Frees the hook's resources, however training ended."""


# The arguments to each method that a subclass may override.
METHODS = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Hook).items()
    if inspect.isfunction(method) and name[0] != "_"
}


def check_hooks(hooks: Any, job: "JobOnMesh") -> None:
    """Raises ConfigError unless all hooks are valid `Hook` objects that fit the job."""
    for index, hook in enumerate(hooks):
        path, name = f"hooks[{index}]", type(hook).__name__
        require(
            isinstance(hook, Hook),
            path,
            hook,
            "a Hook",
            "Subclass praxis_lite.Hook, and return fdl.Config(YourHook, ...) from hooks().",
        )
        is_number = type(hook.every) is int and hook.every > 0
        require(
            hook.every is None or is_number,
            f"{path}.every ({name})",
            hook.every,
            "a positive number of steps or None",
        )
        for method, arguments in METHODS.items():
            check_takes(f"{path}, {name}.{method},", getattr(hook, method), *arguments)
        for method in dir(hook):
            if method.startswith(("after_", "before_")) and method not in METHODS:
                raise ConfigError(
                    f"{path}: {name} has a method {method}, which is never called. The methods of "
                    f"a hook are {', '.join(METHODS)}.{did_you_mean(method, METHODS)}"
                )
        hook.check(job)


def by_name(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """Returns hooks, keyed by the names under which checkpoints store their values.

    The name is the class name. If a class has several hooks, "#2", "#3" and so on are appended to
    the names of its second and later hooks.
    """
    named: dict[str, Hook] = {}
    for hook in hooks:
        name = callable_name(type(hook))
        num_same = sum(key.partition("#")[0] == name for key in named)
        named[f"{name}#{num_same + 1}" if num_same else name] = hook
    return named
