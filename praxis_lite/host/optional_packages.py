"""Imports optional packages on first use, with an error that explains how to install them."""

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

from praxis_lite.core.errors import ConfigError

__all__ = ("optional_module", "require_package")

# The pip name for each import name, and the extra in pyproject.toml that installs it. The extra is
# None if the package is part of the plain install.
PACKAGES: dict[str, tuple[str, str | None]] = {
    "tensorflow": ("tensorflow", "tensorflow"),
    "grain": ("grain", "grain"),
    "array_record": ("array-record", "grain"),
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
    "mnist1d": ("mnist1d", "digits"),
    "lm_eval": ("lm_eval", "lm_eval"),
    "optuna": ("optuna", "sweep"),
    "flatbuffers": ("flatbuffers", "export"),
    "starlette": ("starlette", "serve"),
    "uvicorn": ("uvicorn", "serve"),
    "shtab": ("shtab", "completion"),
    "obstore": ("obstore", "gcs"),
    "boto3": ("boto3", "s3"),
}


class MissingPackage(ConfigError):
    """Raised if a feature needs an optional package that is not installed.

    Attributes:
      package: The package's import name.
    """

    package: str


class NeedsPackage:
    """Base class of configurable classes that need an optional package.

    Before a job starts, it can thus report all missing packages that its config requires.

    Attributes:
      needed_package: The package's import name, or None if no package is needed.
    """

    needed_package: str | None = None

    def check(self) -> None:
        """Raises ConfigError if the package is not installed."""
        if self.needed_package is not None:
            require_package(self.needed_package, type(self).__name__)


def optional_module(name: str, needed_by: str) -> ModuleType:
    """Imports and returns a module from one of the PACKAGES.

    Args:
      name: Full name of the module, such as "matplotlib.figure".
      needed_by: Subject of the error message: a setting or feature, such as "TfRecords".

    Raises:
      ConfigError: The package is not installed, or its import fails.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise _missing(package, needed_by) from None
        raise ConfigError(
            f"{needed_by} needs {package}, which is installed but cannot be imported: "
            f"{type(error).__name__}: {error}. Reinstall it: pip install "
            f"--force-reinstall {PACKAGES[package][0]}."
        ) from error


def require_package(package: str, needed_by: str) -> None:
    """Checks that a package is installed, without importing it.

    Args:
      package: The package's import name.
      needed_by: Subject of the error message: a setting or feature, such as "vision.digits".

    Raises:
      ConfigError: The package is not installed. The message explains how to install it.
    """
    if not is_installed(package):
        raise _missing(package, needed_by)


def is_installed(package: str) -> bool:
    """Returns whether a package can be found, although importing it may still fail."""
    return importlib.util.find_spec(package) is not None


def install_line(packages: Sequence[str]) -> str:
    """Returns the pip command that installs packages, using extras of praxis_lite if possible."""
    known = [PACKAGES.get(package, (package, None)) for package in packages]
    extras = ",".join(dict.fromkeys(extra for _, extra in known if extra is not None))
    targets = [f"'praxis_lite[{extras}]'"] if extras else []
    targets += [name for name, extra in known if extra is None]
    return " ".join(["pip install", *targets])


def _missing(package: str, needed_by: str) -> MissingPackage:
    pip_name, extra = PACKAGES.get(package, (package, None))
    line = install_line([package]) + (f" (or: pip install {pip_name})" if extra else "")
    error = MissingPackage(
        f"{needed_by} needs {package}, which is not installed. Install it: {line}."
    )
    error.package = package
    return error
