"""Reads a model's weights from a Hugging Face directory onto a mesh, and writes them back."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.checkpoints.init.initial_state import random_weights
from praxis_lite.checkpoints.init.packed_layouts import pack_weight, packed_paths, unpacked_layout
from praxis_lite.core.errors import ConfigError, first_few, require_choice
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.task import Task
from praxis_lite.host.hub import is_hub_url, repo_name
from praxis_lite.host.optional_packages import require_package
from praxis_lite.huggingface.adapters import Layers, write_peft
from praxis_lite.huggingface.exported_text import copy_files, write_text_files
from praxis_lite.huggingface.family import family_of, read_config
from praxis_lite.huggingface.tensors.reading import parts_in_files, read_weights
from praxis_lite.huggingface.tensors.tensor_files import (
    DESCRIBED,
    FLOATS,
    TensorFiles,
    model_folder,
)
from praxis_lite.huggingface.tensors.writing import MAX_FILE_BYTES, write_tensors
from praxis_lite.huggingface.weights import map_tensors, weights_of
from praxis_lite.inputs.tokenizers.files import names_of_tokenizer
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.local_directory import output_directory
from praxis_lite.layers.whole_model.adapters import ADAPTER_WEIGHTS, REFERENCE

# File in the job directory that contains the path of the model that the job started from, or its
# name on the Hub, such as org/name.
CAME_FROM = "came_from.txt"
_REFERENCE = f"params/{REFERENCE}/"


class Pretrained:
    """A Hugging Face model on disk, with the mapping from its tensors to the weights in a layout.

    Args:
      directory: Directory with config.json and safetensors files, or hf://org/name[@revision].
      layout: Layout of mdl_vars. Adapter weights in the layout are ignored, because the files
        contain no adapters. A frozen reference copy of the model is read from the same tensors, but
        never written.

    Attributes:
      config: Fields of config.json.
      files: Tensors in the directory.
      parts: Tensors, or slices of tensors, that store the weights.
      reference_parts: Tensors, or slices of tensors, for the weights of the frozen reference copy.

    Raises:
      ConfigError: The architecture, a field or a tensor is unknown; files are missing, damaged or
        pickled; or the layout's weights do not match the model in the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], layout: StateLayout):
        path = model_folder(directory)
        require_package("safetensors", f"The model {path}")
        self.config = read_config(path)
        family = family_of(self.config)
        # `layout` may store some weights in a different format (for example, quantized);
        # `self.layout` contains the logical weights, which the tensors map to.
        self.layout, self._stored_layout = unpacked_layout(layout), layout
        self.files = TensorFiles(path)
        self._ignored_fields = family.ignored_fields(self.config)
        shapes = {leaf.path: leaf.shape for leaf in self._leaves()}
        settings = family.decoder_settings(self.config)
        num_layers = settings.num_layers
        skipped_layers = range(num_layers, num_layers + settings.num_prediction_layers)
        # Take the dims of weights from the model that config.json describes, because the trained
        # task may use a different class with the same weights.
        weights = weights_of(settings)
        self._check_shapes(
            {path: weight.shape for path, weight in weights.items()},
            {path: x for path, x in shapes.items() if not path.startswith(_REFERENCE)},
        )
        parts = map_tensors(family, settings, weights)
        self.parts = parts_in_files(family, parts, self.files, skipped_layers)
        self.reference_parts = [
            dataclasses.replace(part, path=reference_path)
            for part in self.parts
            if (reference_path := part.path.replace("params/", _REFERENCE, 1)) in shapes
        ]

    def _check_shapes(
        self, expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Checks that the trained model has the same weights as the model in the directory."""
        differing = [
            f"{path} is {actual.get(path, 'missing')}, expected {expected.get(path, 'missing')}"
            for path in sorted({*actual, *expected})
            if actual.get(path) != expected.get(path)
        ]
        if differing:
            raise ConfigError(
                "The trained model does not match the model described by "
                f"{self.files.directory}/config.json: {first_few(differing, 2, '; ')}. Use the "
                "same directory for HF_DIR and run.init_from_huggingface, and undo settings of "
                "task.model that change its weights."
            )

    @property
    def paths(self) -> set[str]:
        """Paths of the arrays that `read` returns, as the layout stores them."""
        paths = {part.path for part in (*self.parts, *self.reference_parts)}
        return packed_paths(self._stored_layout, paths)

    def read(
        self, mesh: Mesh, note: Callable[[str], None] = lambda line: None
    ) -> dict[str, jax.Array]:
        """Reads the weights. Returns padded and sharded arrays, keyed by path.

        If the layout stores a weight in a different format, the weight is converted before the next
        weight is read, to limit the peak memory.

        Args:
          mesh: Mesh on which the weights are placed.
          note: Called with progress messages.
        """
        for line in self._ignored_fields:
            note(line)
        parts = [*self.parts, *self.reference_parts]
        return read_weights(
            self._leaves(),
            mesh,
            parts,
            self.files,
            note,
            lambda path, weight: pack_weight(self._stored_layout, path, weight, mesh),
        )

    def write(
        self,
        directory: str | os.PathLike[str],
        arrays: Mapping[str, jax.Array],
        mesh: Mesh,
        task: Task,
        dtype: str | None = None,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Writes a Hugging Face directory: config.json, safetensors files and the tokenizer.

        Args:
          directory: New or empty directory, or hf://org/name[@branch] to upload the files to the
            Hugging Face Hub.
          arrays: Weights in their declared layout, keyed by path, padded and sharded as in
            `self.layout`.
          mesh: Mesh of the arrays.
          task: Task whose tokenizer, chat template and end-of-sequence ids are written.
          dtype: "float32", "bfloat16" or "float16". If None, each tensor keeps its original dtype.
          max_file_bytes: Maximum size of a file.
          note: Called with progress messages.

        Raises:
          ConfigError: The directory is not empty, the repository cannot be written, or the dtype
            is not supported.
        """
        _check_dtype(dtype)
        config, names = dict(self.config), dict.fromkeys(part.tensor for part in self.parts)
        dtypes = {name: self.files.dtype(name) for name in names}
        if dtype is not None:
            # transformers 4 names the field torch_dtype, transformers 5 dtype.
            dtype_fields = {"torch_dtype", "dtype"} & config.keys() or {"torch_dtype"}
            config |= dict.fromkeys(dtype_fields, dtype)
            dtypes = dict.fromkeys(names, FLOATS[dtype])
        with _new_directory(directory, "config.json") as target:
            write_tensors(
                target, self.parts, arrays, mesh, dtypes, max_file_bytes=max_file_bytes, note=note
            )
            if jax.process_index() == 0:
                config = write_text_files(target, self.files.directory, task, config, note)
                (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def write_adapters(
        self,
        directory: str | os.PathLike[str],
        arrays: Mapping[str, jax.Array],
        layers: Layers,
        mesh: Mesh,
        task: Task,
        dtype: str | None = None,
        *,
        base_model: str = "",
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Writes only the adapters, in PEFT's format, and the tokenizer.

        Args:
          directory: New or empty directory, or hf://org/name[@branch] to upload the files to the
            Hugging Face Hub.
          arrays: Weights and adapters, keyed by path, padded and sharded.
          layers: Layers with adapters.
          mesh: Mesh of the arrays.
          task: See `write`.
          dtype: See `write`. If None, adapters are written in float32.
          base_model: Name or directory of the model without adapters.
          note: See `write`.

        Raises:
          ConfigError: See `write` and `write_peft`.
        """
        _check_dtype(dtype)
        tensor_dtype = FLOATS[dtype or "float32"]
        with _new_directory(directory, "adapter_config.json") as target:
            write_peft(target, self.parts, arrays, layers, mesh, tensor_dtype, base_model)
            if jax.process_index() == 0:
                write_text_files(target, self.files.directory, task, self.config, note)

    def _leaves(self) -> list[Any]:
        leaves = self.layout.leaves()
        return [leaf for leaf in leaves if leaf.path.rpartition("/")[2] not in ADAPTER_WEIGHTS]


class FromHuggingFace:
    """Initial state for `run.init_from_huggingface`: reads all weights except adapters.

    Args:
      directory: Directory of the model.
      layout: Layout of the TrainState.

    Raises:
      ConfigError: See `Pretrained`.
    """

    step = 0

    def __init__(self, directory: str | os.PathLike[str], layout: StateLayout):
        self.directory, self.layout = directory, layout
        self._pretrained = Pretrained(directory, layout.select("mdl_vars"))
        self.paths = {f"mdl_vars/{path}" for path in self._pretrained.paths}

    def keep(self, files: JobDir) -> None:
        """Copies the files that an export needs, such as config.json, to the job directory."""
        if jax.process_index() == 0:
            write_description(self.directory, files.huggingface)

    def read(self, mesh: Mesh, note: Callable[[str], None]) -> dict[str, jax.Array]:
        """Returns padded and sharded weights, keyed by their paths in the TrainState."""
        arrays = self._pretrained.read(mesh, note)
        arrays = {f"mdl_vars/{path}": x for path, x in arrays.items()}
        new = random_weights(self.layout, arrays)
        note(
            f"{len(arrays)} weights from {self.directory}"
            + (f"; new: {first_few(new)}" if new else "")
        )
        return arrays


def write_description(directory: str | os.PathLike[str], target: Path) -> None:
    """Copies the files that an export needs besides weights: config.json, tokenizer, shapes.

    Args:
      directory: Directory of the model.
      target: Folder in the job directory.

    Raises:
      ConfigError: See `TensorFiles`.
    """
    files = TensorFiles(model_folder(directory))
    target.mkdir(parents=True, exist_ok=True)
    description = json.dumps(files.description(), indent=1)
    (target / DESCRIBED).write_text(f"{description}\n", "utf-8")
    came_from = repo_name(directory) if is_hub_url(directory) else files.directory.absolute()
    (target / CAME_FROM).write_text(f"{came_from}\n", "utf-8")
    copy_files(files.directory, target, ("config.json", *names_of_tokenizer(files.directory)))


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None:
        require_choice("export: dtype", dtype, tuple(FLOATS))


def _new_directory(
    directory: str | os.PathLike[str], last: str
) -> contextlib.AbstractContextManager[Path]:
    """Returns a context manager that creates a directory, which is complete once `last` exists."""
    if jax.process_index() != 0:  # Only the first process writes.
        return contextlib.nullcontext(Path())
    return output_directory(directory, last)
