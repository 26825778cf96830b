"""Optional packages: imported late, with an error that says how to install a missing one."""

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

from praxis_lite.core.errors import ConfigError

__all__ = ("optional_module", "require_package")

# By import name: the name for pip, and the extra of setup.py that installs it; None: the plain
# installation does, if the package exists for this Python version.
PACKAGES: dict[str, tuple[str, str | None]] = {
    "tensorflow": ("tensorflow", None),
    "grain": ("grain", None),
    "datasets": ("datasets", None),
    "pyarrow": ("pyarrow", None),
    "tokenizers": ("tokenizers", "text"),
    "sentencepiece": ("sentencepiece", "text"),
    "transformers": ("transformers", "text"),
    "jinja2": ("jinja2", "text"),
    "safetensors": ("safetensors", "hf"),
    "google_crc32c": ("google-crc32c", "sources"),
    "PIL": ("pillow", "sources"),
    "tensorflow_datasets": ("tensorflow-datasets", "sources"),
    "matplotlib": ("matplotlib", "plots"),
    "tensorboardX": ("tensorboardX", "plots"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "libtpu": ("'jax[tpu]'", "plan"),
    "qwix": ("qwix", "quantization"),
    "tokamax": ("tokamax", "tokamax"),
    "sklearn": ("scikit-learn", "digits"),
    "lm_eval": ("lm_eval", "lm_eval"),
    "optuna": ("optuna", "sweep"),
    "flatbuffers": ("flatbuffers", "export"),
    "starlette": ("starlette", "serve"),
    "uvicorn": ("uvicorn", "serve"),
}


class MissingPackage(ConfigError):
    """An optional package that a feature needs is not installed.

    Attributes:
      package: the name under which it is imported.
    """

    package: str


class NeedsPackage:
    """A class whose instances may need an optional package; errors name all that a config needs.

    Attributes:
      needed_package: the name under which it is imported; None: the class needs none.
    """

    needed_package: str | None = None

    def check(self) -> None:
        """Raises ConfigError if the package is not installed."""
        if self.needed_package is not None:
            require_package(self.needed_package, type(self).__name__)


def optional_module(name: str, needed_by: str) -> ModuleType:
    """Imports and returns a module of the PACKAGES.

    Args:
      name: in full, such as "matplotlib.figure".
      needed_by: the subject of the error: a setting or a feature, such as "TfRecords".

    Raises:
      ConfigError: the package is not installed, and what installs it; or it is, and its import
        fails: with the error of the import.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise _missing(package, needed_by) from None
        raise ConfigError(
            f"{needed_by} needs {package}, which is installed, but its import fails: "
            f"{type(error).__name__}: {error}. Repair the installation: pip install "
            f"--force-reinstall {PACKAGES[package][0]}."
        ) from error


def require_package(package: str, needed_by: str) -> None:
    """Checks that a package is installed; imports nothing.

    Args:
      package: the name under which it is imported.
      needed_by: the subject of the error: a setting or a feature, such as "vision.digits".

    Raises:
      ConfigError: it is missing; says what installs it.
    """
    if not is_installed(package):
        raise _missing(package, needed_by)


def is_installed(package: str) -> bool:
    """Returns True if a package can be found; it may be broken."""
    return importlib.util.find_spec(package) is not None


def install_line(packages: Sequence[str]) -> str:
    """Returns the command that installs packages, by their extras where they have any."""
    known = [PACKAGES.get(package, (package, None)) for package in packages]
    extras = ",".join(dict.fromkeys(extra for _, extra in known if extra is not None))
    of_extras = [f"'praxis_lite[{extras}]'"] if extras else []
    return " ".join(["pip install", *of_extras, *(name for name, extra in known if extra is None)])


def _missing(package: str, needed_by: str) -> MissingPackage:
    pip_name, extra = PACKAGES.get(package, (package, None))
    line = install_line([package]) + (f" (or: pip install {pip_name})" if extra else "")
    error = MissingPackage(
        f"{needed_by} needs {package}, which is not installed here. Install it: {line}."
    )
    error.package = package
    return error
