"""Experiments: configs of the mesh, the task, the data and the run."""

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fiddle as fdl

from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.mesh_config import merged_options
from praxis_lite.experiment.run_config import RunConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax

    from praxis_lite.core.partitioner.partitioner import Partitioner
    from praxis_lite.core.sharding.mesh_config import MeshConfig
    from praxis_lite.core.task import Task
    from praxis_lite.inputs.base import InputPipeline


@dataclasses.dataclass(frozen=True)
class Job:
    """The result of `fdl.build` of an experiment's config; its fields are the roots of every path.

    Attributes:
        mesh: The devices and their axes.
        task: The model, its loss and its learner.
        datasets: Pipelines by name; `train` is trained on, the others are evaluated on.
        decode_datasets: Pipelines of prompts by name.
        run: How long the job runs, and how often it saves, evaluates and reports.
        partitioner: Compiles the steps; called with the task and the mesh. None: `Partitioner`.
        hooks: `Hook`s, called in this order while the job trains.
    """

    mesh: "MeshConfig"
    task: Any
    datasets: "Mapping[str, InputPipeline]"
    decode_datasets: "Mapping[str, InputPipeline]"
    run: RunConfig
    partitioner: "Callable[[Task, jax.sharding.Mesh], Partitioner] | None" = None
    hooks: Sequence[Any] = ()


# Examples of what the methods of an experiment return, for the errors.
_EXAMPLES = {
    "mesh": "fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))",
    "task": "fdl.Config(LanguageModelTask, model=fdl.Partial(TransformerLm, ...), learner=...)",
    "datasets": '{"train": fdl.Config(InMemory, load_arrays, batch_size=32, shuffle=True)}',
    "run": "fdl.Config(RunConfig, num_train_steps=1_000)",
}


_OF_DATA = (
    f", such as {_EXAMPLES['datasets']}, for arrays. docs/data.md has the pipelines for datasets, "
    "files and iterators."
)


class Experiment:
    """Base class of experiments: subclass it, decorate it with `@register`, launch it by name.

    Every method returns configs (`fdl.Config`), never built objects. A variant subclasses an
    experiment, overrides a method and edits the result of `super()`.

    Attributes of the class, such as `BATCH_SIZE = 16`, which methods read as `self.BATCH_SIZE`, are
    set by `--set BATCH_SIZE=32` before the methods run.

    Attributes:
        SHARDING_PRESET: A name for `set_sharding_params`, such as "megatron", which overrides the
            splits of the task's model and of the batches' rows, and adds the preset's options to
            `mesh().compiler_options`, which take precedence. None: the task's splits are used.
    """

    SHARDING_PRESET: str | None = None

    def mesh(self) -> fdl.Config:
        """Returns the config of the `MeshConfig`."""
        raise self._missing("mesh")

    def mesh_for(self, num_devices: int) -> fdl.Config | None:
        """Returns the config of the `MeshConfig` of an elastic job with `num_devices` devices left.

        It is called where `mesh()` has another number of devices, and must have the same axes.
        None, the default: the plan's formulas choose the fastest legal mesh that fits in memory.
        """
        return None

    def task(self) -> fdl.Config:
        """Returns the config of the task: model, loss, learner."""
        raise self._missing("task")

    def datasets(self) -> dict[str, fdl.Config]:
        """Returns configs of pipelines by name: `train`, and those to evaluate on."""
        raise self._missing("datasets")

    def decode_datasets(self) -> dict[str, fdl.Config]:
        """Returns configs of pipelines of prompts by name; {} unless overridden."""
        return {}

    def run(self) -> fdl.Config:
        """Returns the config of the `RunConfig`."""
        raise self._missing("run")

    def partitioner(self) -> fdl.Partial | None:
        """Returns the config of a partitioner, or None for `Partitioner`."""
        return None

    def hooks(self) -> list[fdl.Config]:
        """Returns configs of hooks to run while the job trains; [] unless overridden.

        Each is of a subclass of `praxis_lite.Hook`: `[fdl.Config(WeightNorms, every=100)]`.
        """
        return []

    def config(self) -> "fdl.Config[Job]":
        """Returns the whole config: mesh, task, datasets, decode_datasets, run, hooks and the rest.

        Raises:
            ConfigError: A method is missing, or returns a value of the wrong kind.
        """
        if missing := [
            name for name in _EXAMPLES
            if getattr(type(self), name) is vars(Experiment)[name]
            or not callable(getattr(type(self), name))
        ]:
            raise self._missing(*missing)
        run = self._checked("run", self.run())
        function = fdl.get_callable(run)
        if not (isinstance(function, type) and issubclass(function, RunConfig)):
            raise ConfigError(
                f"{self._name()}.run() configures {_callable_name(run)}, expected RunConfig: "
                "return fdl.Config(RunConfig, num_train_steps=...)."
            )
        partitioner = self.partitioner()
        if partitioner is not None and not isinstance(partitioner, fdl.Partial):
            raise ConfigError(
                f"{self._name()}.partitioner() returns {type(partitioner).__name__}, expected an "
                "fdl.Partial, because the task and the mesh are given later: return "
                "fdl.Partial(Partitioner, gradients=...)."
            )
        config = fdl.Config(
            Job,
            mesh=self._checked("mesh", self.mesh()),
            task=self._checked("task", self.task()),
            datasets=self._checked_datasets("datasets", self.datasets()),
            decode_datasets=self._checked_datasets("decode_datasets", self.decode_datasets()),
            run=run,
            partitioner=partitioner,
        )
        hooks = self.hooks()
        require(
            isinstance(hooks, list | tuple), f"The result of {self._name()}.hooks()", hooks,
            "a list of configs: return [fdl.Config(MyHook, every=100)]",
        )
        if hooks:
            config.hooks = [
                self._checked("hooks", hook, f"[{index}]") for index, hook in enumerate(hooks)
            ]
        # A copy, so that the --set of one job does not change a class attribute for another job.
        config = copy.deepcopy(config)
        if self.SHARDING_PRESET is not None:
            _set_preset(config, self.SHARDING_PRESET)
        return config

    def _checked(self, method: str, result: Any, what: str = "") -> fdl.Config:
        if isinstance(result, fdl.Config):
            return result
        name = type(result).__name__
        if result is None:
            message = "None, expected an fdl.Config: is a `return` missing?"
        elif isinstance(result, fdl.Partial | type):
            is_class = isinstance(result, type)
            name = result.__name__ if is_class else _callable_name(result)
            kind = "the class" if is_class else "an fdl.Partial of"
            message = f"{kind} {name}, expected a Config: write fdl.Config({name}, ...)."
        elif method.endswith("datasets") and not hasattr(result, "fingerprint"):
            message = f"a {name}, expected the config of a pipeline{_OF_DATA}"
        elif type(result).__module__ == "builtins":
            message = f"a {name}, expected an fdl.Config, such as {_EXAMPLES.get(method, '')}."
        else:
            message = (
                f"a built {name}, expected its config, so that --set can reach its fields: write "
                f"fdl.Config({name}, ...) in place of {name}(...)."
            )
        raise ConfigError(f"{self._name()}.{method}(){what} returns {message}")

    def _checked_datasets(self, method: str, result: Any) -> dict[str, fdl.Config]:
        if not isinstance(result, Mapping):
            raise ConfigError(
                f"{self._name()}.{method}() returns {type(result).__name__}, expected configs of "
                f"pipelines by name{_OF_DATA}"
            )
        for name in result:
            check_dataset_name(name, f"{self._name()}.{method}()")
        return {name: self._checked(method, item, f"[{name!r}]") for name, item in result.items()}

    def _missing(self, *methods: str) -> ConfigError:
        examples = "; ".join(f"def {item}(self): return {_EXAMPLES[item]}" for item in methods)
        named = ", ".join(f"{method}()" for method in methods)
        message = f"no methods {named}. Add them" if methods[1:] else f"no method {named}. Add it"
        return ConfigError(f"{self._name()} has {message} to the class, for instance: {examples}")

    def _name(self) -> str:
        return callable_name(type(self))


def _set_preset(config: fdl.Config, preset: str) -> None:
    # Imported here, because the layers import jax, which most experiments do not need here.
    from praxis_lite.layers.whole_model.sharding_presets import (
        COMPILER_OPTIONS,
        SHARDING_PRESETS,
    )
    from praxis_lite.layers.whole_model.transformer_sharding import set_sharding_params

    task = config.task
    set_sharding_params(task.model, preset)
    batch = SHARDING_PRESETS[preset]["batch"]
    mapping = getattr(task, "inputs_split_mapping", None) or {}
    if mapping:
        task.inputs_split_mapping = {
            rank: (batch, *dims[1:]) for rank, dims in mapping.items()
        }
    if preset in COMPILER_OPTIONS:
        config.mesh.compiler_options = merged_options(
            getattr(config.mesh, "compiler_options", None), COMPILER_OPTIONS[preset]
        )


def check_dataset_name(name: Any, where: str) -> None:
    """Checks a dataset's name, which is part of a --set path and of a folder's name."""
    require(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,99}", name) is not None,
        f"The name of a dataset in {where}", name, "letters, digits, '_' and '-', a letter first",
    )


def _callable_name(config: fdl.Buildable) -> str:
    function = fdl.get_callable(config)
    return getattr(function, "__name__", repr(function))
