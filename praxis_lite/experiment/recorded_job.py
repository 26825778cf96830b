"""The config of a trained job, with the job's own tokenizers and the data that a mode reads.

A job is self-contained. When training begins, each tokenizer directory that its config names is
normalized and copied into the job's directory, and eval, decode and load() read the copy.
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
from praxis_lite.host.whole_files import not_written, write_whole
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.tokenizers.files import CONFIG, has_tokenizer, names_of_tokenizer
from praxis_lite.inputs.tokenizers.json_tokenizer import JsonTokenizer
from praxis_lite.job.job_dir import JobDir

__all__ = ("tokenizers_of",)

# The source directory of a copy, as the config names it.
CAME_FROM = "came_from.txt"
# A field that names a directory, or the argument of a tokenizer's class in that field.
_TOKENIZER = re.compile(r"(.*[.\]])?tokenizer(\.path)?")


def recorded_config(job_dir: JobDir, packages: Collection[str]) -> LoadedConfig:
    """Returns the config in a job's config.json, with the job's copies of its tokenizers.

    Raises:
      ConfigError: as `load_config_file`.
    """
    loaded = load_config_file(job_dir.config_json, packages=packages)
    local = _kept_tokenizers(job_dir)
    copies = [
        f"{path}={local[directory]}" for path, directory in _tokenizers(loaded.config)
        if directory in local
    ]
    apply_overrides(loaded.config, copies, packages)
    return loaded


def keep_tokenizers(config: fdl.Buildable, job_dir: JobDir) -> None:
    """Copies the tokenizers that a config names into its job's directory.

    A copy is in the normalized form, which does not need transformers.

    Raises:
      ConfigError: A file cannot be read or written.
    """
    directories = dict.fromkeys(directory for _, directory in _tokenizers(config))
    local = _kept_tokenizers(job_dir)
    for directory in directories:
        source = Path(directory).expanduser()
        if not has_tokenizer(source):
            continue
        source = JsonTokenizer(source).directory
        target = local.setdefault(directory, job_dir.tokenizers / str(len(local)))
        try:
            target.mkdir(parents=True, exist_ok=True)
            # Also config.json, which may have eos_token_id.
            for name in {CONFIG, *names_of_tokenizer(source), *names_of_tokenizer(target)}:
                if (source / name).is_file():
                    (target / name).parent.mkdir(exist_ok=True)
                    write_whole(target / name, (source / name).read_bytes())
                else:
                    (target / name).unlink(missing_ok=True)
        except OSError as error:
            raise not_written(target, error) from error
        # Last: it makes the copy complete.
        write_whole(target / CAME_FROM, os.fsencode(directory))


def tokenizers_of(config: fdl.Buildable, job_dir: JobDir) -> dict[str, Path | None]:
    """Returns the job's copy, or None, of each directory of a tokenizer that a config names."""
    local = _kept_tokenizers(job_dir)
    return {directory: local.get(directory) for _, directory in _tokenizers(config)}


def check_tokenizers(config: fdl.Buildable) -> None:
    """Checks that the directories of tokenizers are there.

    Raises:
      ConfigError: one is not; names the settings by which another can be given.
    """
    missing: dict[str, list[str]] = {}
    for path, directory in _tokenizers(config):
        if not Path(directory).expanduser().is_dir():
            missing.setdefault(directory, []).append(path)
    for directory, paths in missing.items():
        settings = " ".join(f"{path}=DIR" for path in paths)
        raise ConfigError(
            f"There is no directory {printable(directory)} with a tokenizer, which "
            f"{' and '.join(paths)} {'names' if len(paths) == 1 else 'name'}. Give its new path: "
            f"--set {settings}."
        )


def keep_only(config: fdl.Buildable, mode: str, *, has_prompts: bool = False) -> None:
    """Removes from the config of a trained job its hooks, and the data that a mode does not read.

    Args:
      mode: "eval", "decode", or another mode, which reads all data.
      has_prompts: True: the command line gives the prompts to decode.
    """
    if "hooks" in config.__arguments__:
        del config.hooks  # They may use objects that exist only in training.
    if mode == "eval" and isinstance(config.datasets, Mapping):
        config.datasets = {name: item for name, item in config.datasets.items() if name != TRAIN}
        config.decode_datasets = {}
    if mode == "decode":
        config.datasets = {}
        if has_prompts:
            config.decode_datasets = {}


def _tokenizers(config: fdl.Buildable) -> Iterator[tuple[str, str]]:
    """Yields (path of the field, directory), for each field that names a tokenizer's directory."""
    for field in iterate_fields(config):
        if isinstance(field.value, str) and field.value and _TOKENIZER.fullmatch(field.path):
            yield field.path, field.value


def _kept_tokenizers(job_dir: JobDir) -> dict[str, Path]:
    """Returns the copies that a job has, by the source directory of each."""
    return {
        os.fsdecode(path.read_bytes()): path.parent
        for path in sorted(job_dir.tokenizers.glob(f"*/{CAME_FROM}")) if path.is_file()
    }
