"""Reads the recorded config of a job, and manages the job's copies of its tokenizers.

When training starts, each tokenizer in the config is normalized and copied to the job directory, so
that the job is self-contained. Eval, decode and load() use the copies.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import fiddle as fdl

from praxis_lite.config.config_json import LoadedConfig, load_config_file
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.config.paths import iterate_fields
from praxis_lite.core.errors import ConfigError, printable
from praxis_lite.host.atomic_files import not_written, write_atomically
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.tokenizers.files import (
    CONFIG,
    has_tokenizer,
    names_of_tokenizer,
    tokenizer_folder,
)
from praxis_lite.inputs.tokenizers.json_tokenizer import JsonTokenizer
from praxis_lite.job.job_dir import JobDir

__all__ = ("tokenizers_of",)

# Name of the file that contains the source directory of a copy, as written in the config.
CAME_FROM = "came_from.txt"
# Path of a field that contains a tokenizer's directory or the argument of a tokenizer class.
_TOKENIZER = re.compile(r"(.*[.\]])?tokenizer(\.path)?")


def recorded_config(job_dir: JobDir, packages: Collection[str]) -> LoadedConfig:
    """Loads a job's config.json, and replaces tokenizer directories with the job's copies.

    Raises:
      ConfigError: The file is missing or damaged, or refers to a name that is not allowed.
    """
    loaded = load_config_file(job_dir.config_json, packages=packages)
    copies = _copied_tokenizers(job_dir)
    overrides = [
        f"{path}={copies[directory]}"
        for path, directory in _tokenizers(loaded.config)
        if directory in copies
    ]
    apply_overrides(loaded.config, overrides, packages)
    return loaded


def copy_tokenizers(config: fdl.Buildable, job_dir: JobDir) -> None:
    """Copies the tokenizers in a config to the job directory.

    The copies are normalized, so that transformers is not needed to read them.

    Raises:
      ConfigError: A file cannot be read or written.
    """
    directories = dict.fromkeys(directory for _, directory in _tokenizers(config))
    copies = _copied_tokenizers(job_dir)
    for directory in directories:
        if not has_tokenizer(directory):
            continue
        source = JsonTokenizer(directory).directory
        target = copies.setdefault(directory, job_dir.tokenizers / str(len(copies)))
        try:
            target.mkdir(parents=True, exist_ok=True)
            # Also copy config.json, which may contain eos_token_id.
            for name in {CONFIG, *names_of_tokenizer(source), *names_of_tokenizer(target)}:
                if (source / name).is_file():
                    (target / name).parent.mkdir(exist_ok=True)
                    write_atomically(target / name, (source / name).read_bytes())
                else:
                    (target / name).unlink(missing_ok=True)
        except OSError as error:
            raise not_written(target, error) from error
        # Write this file last, because it marks the copy as complete.
        write_atomically(target / CAME_FROM, os.fsencode(directory))


def tokenizers_of(config: fdl.Buildable, job_dir: JobDir) -> dict[str, Path | None]:
    """Returns the job's copy (None if missing) of each tokenizer directory in a config."""
    copies = _copied_tokenizers(job_dir)
    return {directory: copies.get(directory) for _, directory in _tokenizers(config)}


def check_tokenizers(config: fdl.Buildable) -> None:
    """Checks that the tokenizer directories exist.

    Raises:
      ConfigError: A directory is missing, or an hf:// repository cannot be downloaded.
    """
    missing: dict[str, list[str]] = {}
    for path, directory in _tokenizers(config):
        if not tokenizer_folder(directory).is_dir():
            missing.setdefault(directory, []).append(path)
    for directory, paths in missing.items():
        settings = " ".join(f"{path}=DIR" for path in paths)
        raise ConfigError(
            f"There is no directory {printable(directory)} with a tokenizer (set by "
            f"{' and '.join(paths)}). Set its new path: --set {settings}."
        )


def remove_unused(config: fdl.Buildable, mode: str, *, has_prompts: bool = False) -> None:
    """Removes hooks, and the datasets that a mode does not read, from a job's config.

    Args:
      config: The config, which is modified in place.
      mode: "eval" or "decode". For all other modes, all datasets are kept.
      has_prompts: Whether the command line specifies the prompts to decode.
    """
    if "hooks" in config.__arguments__:
        del config.hooks  # Hooks may use objects that only exist in training.
    if mode == "eval" and isinstance(config.datasets, Mapping):
        config.datasets = {
            name: dataset for name, dataset in config.datasets.items() if name != TRAIN
        }
        config.decode_datasets = {}
    if mode == "decode":
        config.datasets = {}
        if has_prompts:
            config.decode_datasets = {}


def _tokenizers(config: fdl.Buildable) -> Iterator[tuple[str, str]]:
    """Yields (path, directory) for each field that contains a tokenizer directory."""
    for field in iterate_fields(config):
        if isinstance(field.value, str) and field.value and _TOKENIZER.fullmatch(field.path):
            yield field.path, field.value


def _copied_tokenizers(job_dir: JobDir) -> dict[str, Path]:
    """Returns the tokenizer copies in a job directory, by source directory."""
    return {
        os.fsdecode(path.read_bytes()): path.parent
        for path in sorted(job_dir.tokenizers.glob(f"*/{CAME_FROM}"))
        if path.is_file()
    }
