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
    """The objects built from an experiment's config. The fields are the roots of `--set` paths.

    Attributes:
        mesh: Shape and axes of the device mesh.
        task: The model, its loss and its learner.
        datasets: Pipelines keyed by name: `train` and the evaluation datasets.
        decode_datasets: Prompt pipelines, keyed by name.
        run: Settings for the length of the run, and for how it saves, evaluates and reports.
        partitioner: Function that takes the task and the mesh and returns a partitioner, or None
            for `Partitioner`.
        hooks: Hooks, in the order in which they are called.
    """

    mesh: "MeshConfig"
    task: Any
    datasets: "Mapping[str, InputPipeline]"
    decode_datasets: "Mapping[str, InputPipeline]"
    run: RunConfig
    partitioner: "Callable[[Task, jax.sharding.Mesh], Partitioner] | None" = None
    hooks: Sequence[Any] = ()


# Example return values of an experiment's methods, for error messages.
_EXAMPLES = {
    "mesh": "fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))",
    "task": "fdl.Config(LanguageModelTask, model=fdl.Partial(TransformerLm, ...), learner=...)",
    "datasets": '{"train": fdl.Config(InMemory, load_arrays, batch_size=32, shuffle=True)}',
    "run": "fdl.Config(RunConfig, num_train_steps=1_000)",
}


_DATA_HINT = (
    f", such as {_EXAMPLES['datasets']} for arrays. docs/data.md describes the pipelines for "
    "datasets, files and iterators."
)


class Experiment:
    """Base class of experiments. Subclass it, add `@register`, and launch the subclass by name.

    Every method returns configs (`fdl.Config`), never built objects. To create a variant, subclass
    an experiment, override a method, and modify the result of `super()`.

    Methods may read class attributes such as `BATCH_SIZE = 16` as `self.BATCH_SIZE`; `--set
    BATCH_SIZE=32` sets them before the methods are called.

    Attributes:
        SHARDING_PRESET: Name of a preset for `set_sharding_params`, such as "megatron". The preset
            overrides how the task's model and the batch are sharded. Its compiler options are added
            to `mesh().compiler_options`, which take precedence. If None, the sharding in the task
            is used.
    """

    SHARDING_PRESET: str | None = None

    def mesh(self) -> fdl.Config:
        """Returns the config of the `MeshConfig`."""
        raise self._missing("mesh")

    def mesh_for(self, num_devices: int) -> fdl.Config | None:
        """Returns the config of the mesh for an elastic job with `num_devices` remaining devices.

        This is called if `mesh()` has a different number of devices. The mesh axes must be the same
        as in `mesh()`. If the result is None, which is the default, the job uses the fastest valid
        mesh that `praxis plan` expects to fit in memory.
        """
        return None

    def task(self) -> fdl.Config:
        """Returns the config of the task: model, loss, learner."""
        raise self._missing("task")

    def datasets(self) -> dict[str, fdl.Config]:
        """Returns pipeline configs keyed by name: `train` and the evaluation datasets."""
        raise self._missing("datasets")

    def decode_datasets(self) -> dict[str, fdl.Config]:
        """Returns prompt pipeline configs keyed by name. The default is {}."""
        return {}

    def run(self) -> fdl.Config:
        """Returns the config of the `RunConfig`."""
        raise self._missing("run")

    def partitioner(self) -> fdl.Partial | None:
        """Returns the config of a partitioner, or None for `Partitioner`."""
        return None

    def hooks(self) -> list[fdl.Config]:
        """Returns configs of `praxis_lite.Hook` subclasses for training. The default is [].

        An example is `[fdl.Config(WeightNorms, every=100)]`.
        """
        return []

    def config(self) -> "fdl.Config[Job]":
        """Returns the complete config: mesh, task, datasets, decode_datasets, run and hooks.

        Raises:
            ConfigError: A method is missing, or returns a value of the wrong type.
        """
        # A method is missing if it is not overridden.
        if missing := [
            name
            for name in _EXAMPLES
            if getattr(type(self), name) is vars(Experiment)[name]
            or not callable(getattr(type(self), name))
        ]:
            raise self._missing(*missing)
        run = self._checked("run", self.run())
        function = fdl.get_callable(run)
        if not (isinstance(function, type) and issubclass(function, RunConfig)):
            raise ConfigError(
                f"{self._name()}.run() configures {_callable_name(run)}; expected RunConfig. "
                "Return fdl.Config(RunConfig, num_train_steps=...)."
            )
        partitioner = self.partitioner()
        if partitioner is not None and not isinstance(partitioner, fdl.Partial):
            raise ConfigError(
                f"{self._name()}.partitioner() returns {type(partitioner).__name__}; expected an "
                "fdl.Partial, because the task and the mesh are passed later. Return "
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
            isinstance(hooks, list | tuple),
            f"The result of {self._name()}.hooks()",
            hooks,
            "a list of configs, such as [fdl.Config(MyHook, every=100)]",
        )
        if hooks:
            config.hooks = [
                self._checked("hooks", hook, f"[{index}]") for index, hook in enumerate(hooks)
            ]
        # Copy the config, so that --set does not change class attributes for other jobs.
        config = copy.deepcopy(config)
        if self.SHARDING_PRESET is not None:
            _set_preset(config, self.SHARDING_PRESET)
        return config

    def _checked(self, method: str, value: Any, key: str = "") -> fdl.Config:
        """Returns `value`, the result of a method (at `key`), or raises ConfigError if invalid."""
        if isinstance(value, fdl.Config):
            return value
        name = type(value).__name__
        if value is None:
            message = "None; expected an fdl.Config. Check whether a `return` is missing."
        elif isinstance(value, fdl.Partial | type):
            is_class = isinstance(value, type)
            name = value.__name__ if is_class else _callable_name(value)
            kind = "the class" if is_class else "an fdl.Partial of"
            message = f"{kind} {name}; expected a Config. Write fdl.Config({name}, ...)."
        elif method.endswith("datasets") and not hasattr(value, "fingerprint"):
            message = f"a {name}; expected the config of a pipeline{_DATA_HINT}"
        elif type(value).__module__ == "builtins":
            message = f"a {name}; expected an fdl.Config, such as {_EXAMPLES.get(method, '')}."
        else:
            message = (
                f"a built {name}; expected its config, so that --set can change its fields. Write "
                f"fdl.Config({name}, ...) instead of {name}(...)."
            )
        raise ConfigError(f"{self._name()}.{method}(){key} returns {message}")

    def _checked_datasets(self, method: str, datasets: Any) -> dict[str, fdl.Config]:
        if not isinstance(datasets, Mapping):
            raise ConfigError(
                f"{self._name()}.{method}() returns {type(datasets).__name__}; expected pipeline "
                f"configs keyed by name{_DATA_HINT}"
            )
        for name in datasets:
            check_dataset_name(name, f"{self._name()}.{method}()")
        return {
            name: self._checked(method, config, f"[{name!r}]") for name, config in datasets.items()
        }

    def _missing(self, *methods: str) -> ConfigError:
        examples = "; ".join(f"def {name}(self): return {_EXAMPLES[name]}" for name in methods)
        names = ", ".join(f"{name}()" for name in methods)
        message = f"no methods {names}. Add them" if methods[1:] else f"no method {names}. Add it"
        return ConfigError(f"{self._name()} has {message} to the class, for instance: {examples}")

    def _name(self) -> str:
        return callable_name(type(self))


def _set_preset(config: fdl.Config, preset: str) -> None:
    # Import the layers here, because importing them imports jax.
    from praxis_lite.layers.whole_model.sharding_presets import (
        COMPILER_OPTIONS,
        SHARDING_PRESETS,
    )
    from praxis_lite.layers.whole_model.transformer_sharding import set_sharding_params

    task = config.task
    set_sharding_params(task.model, preset)
    batch = SHARDING_PRESETS[preset]["batch"]
    mapping = getattr(task, "inputs_split_mapping", None) or {}
    # The preset only changes how rows are split. None leaves arrays of a rank as they are.
    if mapping:
        task.inputs_split_mapping = {
            rank: dims and (batch, *dims[1:]) for rank, dims in mapping.items()
        }
    if preset in COMPILER_OPTIONS:
        config.mesh.compiler_options = merged_options(
            getattr(config.mesh, "compiler_options", None), COMPILER_OPTIONS[preset]
        )


def check_dataset_name(name: Any, where: str) -> None:
    """Checks the name of a dataset, which becomes part of --set paths and folder names."""
    require(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,99}", name) is not None,
        f"The name of a dataset in {where}",
        name,
        "letters, digits, '_' and '-', starting with a letter or '_'",
    )


def _callable_name(config: fdl.Buildable) -> str:
    function = fdl.get_callable(config)
    return getattr(function, "__name__", repr(function))
