"""Reads a model's weights from a Hugging Face directory, and writes them to one."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.checkpoints.init.initial_state import drawn
from praxis_lite.checkpoints.init.kept_arrays import in_kept_form, kept_paths, whole_layout
from praxis_lite.core.errors import ConfigError, few, require_choice
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.task import Task
from praxis_lite.host.optional_packages import require_package
from praxis_lite.host.whole_files import new_directory
from praxis_lite.huggingface.adapters import Layers, write_peft
from praxis_lite.huggingface.exported_text import copy_files, write_text_files
from praxis_lite.huggingface.family import family_of, read_config
from praxis_lite.huggingface.tensors.reading import parts_in_files, read_weights
from praxis_lite.huggingface.tensors.tensor_files import DESCRIBED, FLOATS, TensorFiles
from praxis_lite.huggingface.tensors.writing import MAX_FILE_BYTES, write_tensors
from praxis_lite.huggingface.weights import map_tensors, weights_of
from praxis_lite.inputs.tokenizers.files import names_of_tokenizer
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.local_directory import local_directory
from praxis_lite.layers.whole_model.adapters import ADAPTER_WEIGHTS, REFERENCE

# The file of `write_description` with the path of the directory that a job began with.
CAME_FROM = "came_from.txt"
_REFERENCE = f"params/{REFERENCE}/"


class Pretrained:
    """The model in a directory, mapped to the weights of a layout.

    Args:
      directory: with config.json and safetensors files.
      layout: of mdl_vars. Weights of adapters are left out: they have no tensors. A frozen copy of
        the model is read like the model, and not written.

    Attributes:
      config: the fields of config.json.
      files: the tensors.
      parts: of all weights, with the names of these files.
      reference_parts: of the weights of the frozen copy.

    Raises:
      ConfigError: the architecture, a field or a tensor is unknown; files are missing, damaged or
        pickled; the weights are not those of the model in the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], layout: StateLayout):
        path = local_directory(directory)
        require_package("safetensors", f"The model {path}")
        self.config = read_config(path)
        family = family_of(self.config)
        self.layout, self._kept, self.files = whole_layout(layout), layout, TensorFiles(path)
        self._ignored_fields = family.ignored_fields(self.config)
        shapes = {leaf.path: leaf.shape for leaf in self._leaves()}
        settings = family.decoder_settings(self.config)
        num_layers = settings.num_layers
        left_out = range(num_layers, num_layers + settings.num_prediction_layers)
        # config.json decides the names and matrices of dims, whichever class is trained.
        weights = weights_of(settings)
        self._check_shapes(
            {path: weight.shape for path, weight in weights.items()},
            {path: x for path, x in shapes.items() if not path.startswith(_REFERENCE)},
        )
        parts = map_tensors(family, settings, weights)
        self.parts = parts_in_files(family, parts, self.files, left_out)
        self.reference_parts = [
            dataclasses.replace(part, path=path) for part in self.parts
            if (path := part.path.replace("params/", _REFERENCE, 1)) in shapes
        ]

    def _check_shapes(
        self, expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Checks that the trained weights have the shapes of the model in the directory."""
        differing = [
            f"{path} is {actual.get(path, 'missing')} instead of {expected.get(path, 'missing')}"
            for path in sorted({*actual, *expected}) if actual.get(path) != expected.get(path)
        ]
        if differing:
            raise ConfigError(
                f"The trained model is not the model of {self.files.directory}/config.json: "
                f"{few(differing, 2)}. If HF_DIR and run.init_from_huggingface name two "
                "directories, name the same in both; otherwise undo the settings of task.model "
                "that change its weights."
            )

    @property
    def paths(self) -> set[str]:
        """The paths of the arrays that are read, as the layout stores them."""
        paths = {part.path for part in (*self.parts, *self.reference_parts)}
        return kept_paths(self._kept, paths)

    def read(
        self, mesh: Mesh, note: Callable[[str], None] = lambda line: None
    ) -> dict[str, jax.Array]:
        """Returns the weights by path, padded and sharded; `note` is called with the progress.

        A weight that the layout stores in another form is converted before the next is read.
        """
        for line in self._ignored_fields:
            note(line)
        parts = [*self.parts, *self.reference_parts]
        return read_weights(
            self._leaves(), mesh, parts, self.files, note,
            lambda path, weight: in_kept_form(self._kept, path, weight, mesh),
        )

    def write(
        self, directory: str | os.PathLike[str], arrays: Mapping[str, jax.Array], mesh: Mesh,
        task: Task, dtype: str | None = None, *, max_file_bytes: int = MAX_FILE_BYTES,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Writes weights as Hugging Face stores them: config.json, safetensors, the tokenizer.

        Args:
          directory: new or empty.
          arrays: as `read` returns them.
          task: its tokenizer, chat template and end tokens are written.
          dtype: "float32", "bfloat16" or "float16"; None: for each tensor that of the files read.
          max_file_bytes: of each file.
          note: called with the progress.

        Raises:
          ConfigError: the directory has files, or the dtype is not one of these.
        """
        _check_dtype(dtype)
        config, names = dict(self.config), dict.fromkeys(part.tensor for part in self.parts)
        dtypes = {name: self.files.dtype(name) for name in names}
        if dtype is not None:
            # The field's names in transformers 4 and 5.
            written = {"torch_dtype", "dtype"} & config.keys() or {"torch_dtype"}
            config |= dict.fromkeys(written, dtype)
            dtypes = dict.fromkeys(names, FLOATS[dtype])
        with _new_directory(directory, "config.json") as target:
            write_tensors(
                target, self.parts, arrays, mesh, dtypes, max_file_bytes=max_file_bytes, note=note
            )
            if jax.process_index() == 0:
                config = write_text_files(target, self.files.directory, task, config, note)
                (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def write_adapters(
        self, directory: str | os.PathLike[str], arrays: Mapping[str, jax.Array], layers: Layers,
        mesh: Mesh, task: Task, dtype: str | None = None, *, base_model: str = "",
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Writes the adapters alone, as PEFT stores them, and the tokenizer.

        Args:
          directory, arrays, task, dtype, note: as in `write`; a dtype of None is float32.
          layers: the layers with adapters.
          base_model: the name or directory of the model that they belong to.

        Raises:
          ConfigError: as `write` and `write_peft`.
        """
        _check_dtype(dtype)
        kind = FLOATS[dtype or "float32"]
        with _new_directory(directory, "adapter_config.json") as target:
            write_peft(target, self.parts, arrays, layers, mesh, kind, base_model)
            if jax.process_index() == 0:
                write_text_files(target, self.files.directory, task, self.config, note)

    def _leaves(self) -> list[Any]:
        leaves = self.layout.leaves()
        return [leaf for leaf in leaves if leaf.path.rpartition("/")[2] not in ADAPTER_WEIGHTS]


class FromHuggingFace:
    """The initial state of `run.init_from_huggingface`: all weights except adapters.

    Args:
      directory: of the model.
      layout: of the TrainState.

    Raises:
      ConfigError: as `Pretrained`.
    """

    step = 0

    def __init__(self, directory: str | os.PathLike[str], layout: StateLayout):
        self.directory, self.layout = directory, layout
        self._pretrained = Pretrained(directory, layout.select("mdl_vars"))
        self.paths = {f"mdl_vars/{path}" for path in self._pretrained.paths}

    def keep(self, files: JobDir) -> None:
        """Writes the model's config.json and tokenizer, which exports of the job need."""
        if jax.process_index() == 0:
            write_description(self.directory, files.huggingface)

    def read(self, mesh: Mesh, note: Callable[[str], None]) -> dict[str, jax.Array]:
        """Returns the weights."""
        arrays = self._pretrained.read(mesh, note)
        arrays = {f"mdl_vars/{path}": x for path, x in arrays.items()}
        new = drawn(self.layout, arrays)
        note(f"{len(arrays)} weights from {self.directory}" + (f"; new: {few(new)}" if new else ""))
        return arrays


def write_description(directory: str | os.PathLike[str], target: Path) -> None:
    """Writes what a job needs of a model besides weights: config.json, tokenizer, shapes.

    Raises:
      ConfigError: see `TensorFiles`.
    """
    files = TensorFiles(local_directory(directory))
    target.mkdir(parents=True, exist_ok=True)
    description = json.dumps(files.description(), indent=1)
    (target / DESCRIBED).write_text(f"{description}\n", "utf-8")
    (target / CAME_FROM).write_text(f"{files.directory.absolute()}\n", "utf-8")
    copy_files(files.directory, target, ("config.json", *names_of_tokenizer(files.directory)))


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None:
        require_choice("export: dtype", dtype, tuple(FLOATS))


def _new_directory(
    directory: str | os.PathLike[str], last: str
) -> contextlib.AbstractContextManager[Path]:
    path = local_directory(directory)
    # Of several processes the first one writes.
    return new_directory(path, last) if jax.process_index() == 0 else contextlib.nullcontext(path)
