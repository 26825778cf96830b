"""Names that the library's modules had in an earlier version: imported still, with a warning.

A public name that moves is added here, and taken out after the next minor version. So are names in
the config.json of a job, which commit d8700de or a later one wrote, and there without a warning.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

# Where a module and all below it are today; of two that fit, the longer counts.
MODULES = {
    "praxis_lite.checkpoints": "praxis_lite.run.checkpoints",
    "praxis_lite.checkpoints.huggingface": "praxis_lite.tools.huggingface",
    "praxis_lite.checkpoints.huggingface.decoder_settings":
        "praxis_lite.tools.huggingface.fields.decoder_settings",
    "praxis_lite.command": "praxis_lite.run.command",
    "praxis_lite.config": "praxis_lite.run.config",
    "praxis_lite.errors": "praxis_lite.core.errors",
    "praxis_lite.experiment": "praxis_lite.run.experiment",
    "praxis_lite.explain": "praxis_lite.tools.explain",
    "praxis_lite.interop.huggingface": "praxis_lite.tools.huggingface",
    "praxis_lite.interop.nnx": "praxis_lite.tools.nnx",
    "praxis_lite.interop.pax": "praxis_lite.tools.pax.weights",
    "praxis_lite.interop.pax_checkpoints": "praxis_lite.tools.pax.checkpoints",
    "praxis_lite.interop.pax_job": "praxis_lite.tools.pax.job",
    "praxis_lite.interop.trained_model": "praxis_lite.run.trained_model",
    "praxis_lite.job": "praxis_lite.run.job",
    "praxis_lite.learner": "praxis_lite.core.learner",
    "praxis_lite.learner.optimizers": "praxis_lite.optimizers",
    "praxis_lite.learner.schedules": "praxis_lite.schedules",
    "praxis_lite.models.model": "praxis_lite.core.models.model",
    "praxis_lite.models.nnx_model": "praxis_lite.core.models.nnx_model",
    "praxis_lite.partitioner": "praxis_lite.core.partitioner",
    "praxis_lite.plan": "praxis_lite.tools.plan",
    "praxis_lite.sharding": "praxis_lite.core.sharding",
    "praxis_lite.task": "praxis_lite.core.task",
    "praxis_lite.testing": "praxis_lite.tools.testing",
    "praxis_lite.trainer": "praxis_lite.run.trainer",
}

# Single names that are not where their module went: the module of then, the name, its module today.
_METRICS = "praxis_lite.run.trainer.metrics"
NAMES = {
    ("praxis_lite.core", "DynamicLossScale"): "praxis_lite.optimizers",
    ("praxis_lite.core", "ShardMapPartitioner"): "praxis_lite.collectives",
    ("praxis_lite.core", "VariationalNoise"): "praxis_lite.optimizers",
    ("praxis_lite.core", "require_package"): "praxis_lite",
    ("praxis_lite.interop.trained_model", "load"): "praxis_lite.run.loading",
    ("praxis_lite.models", "Model"): "praxis_lite.core",
    ("praxis_lite.models", "NnxModel"): "praxis_lite.core",
    ("praxis_lite.trainer.metrics", "JsonLinesWriter"): f"{_METRICS}.json_lines",
    ("praxis_lite.trainer.metrics", "ProgressLine"): f"{_METRICS}.progress",
    ("praxis_lite.trainer.metrics", "TensorBoardWriter"): "praxis_lite.run.trackers.event_files",
    ("praxis_lite.trainer.metrics", "WeightedMean"): f"{_METRICS}.weighted",
    ("praxis_lite.trainer.metrics", "WeightedScalars"): f"{_METRICS}.weighted",
    ("praxis_lite.trainer.metrics", "plot_loss_curve"): f"{_METRICS}.loss_curve",
    ("praxis_lite.trainer.metrics", "read_json_lines"): f"{_METRICS}.json_lines",
    ("praxis_lite.trainer.metrics.records", "records_of"): "praxis_lite.core",
}


# Of these the name changed, and not the module.
RENAMED = {
    ("praxis_lite.experiments.huggingface", "write_questions"): "questions",
    ("praxis_lite.experiments.python_texts", "write_json_lines"): "examples_of",
    ("praxis_lite.experiments.python_texts", "write_parquet"): "examples_of",
}


def name_today(module: str, name: str) -> tuple[str, str]:
    """Returns the (module, name) of today of a public name: its own, if it did not change.

    Args:
      name: in the module: `Learner`, `WeightInit.Xavier`.
    """
    top, dot, below = name.partition(".")
    if (module, top) in NAMES:
        return name_today(NAMES[module, top], name)
    if (module, top) in RENAMED:
        return module, f"{RENAMED[module, top]}{dot}{below}"
    if (today := module_today(module)) is not None:
        # Packages of the core show their names in the core alone.
        return name_today("praxis_lite.core" if ".core." in today else today, name)
    return module, name


def module_today(name: str) -> str | None:
    """Returns today's name of a module of an earlier version, or None if it has no other."""
    below = f"{name}."
    former = max((key for key in MODULES if below.startswith(f"{key}.")), key=len, default=None)
    return None if former is None else MODULES[former] + name[len(former):]


def install() -> None:
    """Lets former modules be imported, and run with `python -m`."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def warn(former: str, today: str) -> None:
    """Says that a name has moved: a DeprecationWarning, at the line that uses it."""
    warnings.warn(
        f"{former} is {today} now, and the former name goes with the next minor version. Change "
        "the import.", DeprecationWarning, stacklevel=3,
    )


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("praxis_lite."):
            return None
        today = module_today(fullname)
        spec = importlib.util.find_spec(today) if today is not None else None
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return importlib.util.spec_from_loader(fullname, _Former(today), is_package=is_package)


class _Former(importlib.abc.InspectLoader):
    """A module under its former name, which hands on what today's has."""

    def __init__(self, today: str) -> None:
        self._today = today

    def get_source(self, fullname: str) -> None:
        return None

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Returns the code of today's module: what `python -m` runs."""
        warn(fullname.removesuffix(".__main__"), self._today.removesuffix(".__main__"))
        return importlib.util.find_spec(self._today).loader.get_code(self._today)

    def exec_module(self, module: types.ModuleType) -> None:
        today = self._today

        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            homes = [today]
            if (module.__name__, name) in NAMES:
                homes = [NAMES[module.__name__, name]]
            elif ".core." in today:  # A package of the core shows its names in the core alone.
                homes += ["praxis_lite.core"]
            for home in homes:
                loaded = importlib.import_module(home)
                home = NAMES.get((home, name), home)
                loaded = importlib.import_module(home)
                if name in getattr(loaded, "__all__", vars(loaded)):
                    warn(f"{module.__name__}.{name}", f"{home}.{name}")
                    vars(module)[name] = getattr(loaded, name)  # Warned of once.
                    return vars(module)[name]
            raise AttributeError(f"module {today!r} has no attribute {name!r}")

        module.__getattr__ = __getattr__
