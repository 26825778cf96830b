"""A directory of Hugging Face: a model's weights read from it, and written to it."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import require_choice
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.task import Task
from praxis_lite.files.whole_files import new_directory
from praxis_lite.host.optional_packages import require_package
from praxis_lite.inputs.tokenizers.files import names_of_tokenizer
from praxis_lite.layers.whole_model.adapters import ADAPTER_WEIGHTS, REFERENCE
from praxis_lite.run.checkpoints.init.kept_arrays import in_kept_form, kept_paths, whole_layout
from praxis_lite.run.job.local_directory import local_directory
from praxis_lite.tools.huggingface.adapters import Layers, write_peft
from praxis_lite.tools.huggingface.family import family_of, read_config
from praxis_lite.tools.huggingface.fields.exported_text import copy_files, write_text_files
from praxis_lite.tools.huggingface.same_model import check_same_model, weights_of
from praxis_lite.tools.huggingface.tensors.reading import read_weights, stored
from praxis_lite.tools.huggingface.tensors.tensor_files import DESCRIBED, FLOATS, TensorFiles
from praxis_lite.tools.huggingface.tensors.writing import MAX_FILE_BYTES, write_tensors
from praxis_lite.tools.huggingface.weights import parts

# Where a job's model came from, of what `keep_description` writes.
CAME_FROM = "came_from.txt"
_REFERENCE = f"params/{REFERENCE}/"


class Pretrained:
    """The model in a directory, and the parts of it that a layout's weights are.

    Args:
      directory: with config.json and safetensors files.
      layout: of mdl_vars. Weights of adapters are left out: they have no tensors. A frozen copy of
        the model is read as the model, and not written.

    Attributes:
      config: the fields of config.json.
      files: the tensors.
      parts: of all weights, with the names of these files.
      of_reference: of those of the frozen copy.

    Raises:
      ConfigError: the architecture, a field or a tensor is not known; files are missing, damaged
        or pickled; the weights are not those of the model in the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], layout: StateLayout):
        path = local_directory(directory)
        require_package("safetensors", f"The model {path}")
        self.config = read_config(path)
        family = family_of(self.config)
        self.layout, self._kept, self.files = whole_layout(layout), layout, TensorFiles(path)
        self._not_followed = family.not_followed(self.config)
        shapes = {leaf.path: leaf.shape for leaf in self._leaves()}
        local = {path: x for path, x in shapes.items() if not path.startswith(_REFERENCE)}
        settings = family.decoder_settings(self.config)
        num_layers = settings.num_layers
        left_out = range(num_layers, num_layers + settings.num_prediction_layers)
        # The dims of the weights are those of the model in config.json, whoever trains it.
        weights = weights_of(settings)
        check_same_model(path, weights, local)
        self.parts = stored(family, parts(family, settings, weights), self.files, left_out)
        self.of_reference = [
            dataclasses.replace(part, path=path) for part in self.parts
            if (path := part.path.replace("params/", _REFERENCE, 1)) in shapes
        ]

    @property
    def paths(self) -> set[str]:
        """The paths of the arrays that are read, as the layout keeps them."""
        paths = {part.path for part in (*self.parts, *self.of_reference)}
        return kept_paths(self._kept, paths)

    def read(
        self, mesh: Mesh, note: Callable[[str], None] = lambda line: None
    ) -> dict[str, jax.Array]:
        """Returns the weights by path, padded and in their shards; `note` is told how far it is.

        A weight that the layout keeps in another form is brought into it before the next is read.
        """
        for line in self._not_followed:
            note(line)
        parts = [*self.parts, *self.of_reference]
        return read_weights(
            self._leaves(), mesh, parts, self.files, note,
            lambda path, weight: in_kept_form(self._kept, path, weight, mesh),
        )

    def write(
        self, directory: str | os.PathLike[str], arrays: Mapping[str, jax.Array], mesh: Mesh,
        task: Task, dtype: str | None = None, *, max_file_bytes: int = MAX_FILE_BYTES,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Writes weights as Hugging Face keeps them: config.json, safetensors, the tokenizer.

        Args:
          directory: a new or an empty one.
          arrays: as `read` returns them.
          task: whose tokenizer, template and ends of text are written.
          dtype: "float32", "bfloat16" or "float16"; None: of each tensor that of the files read.
          max_file_bytes: of each file.
          note: told how far it is.

        Raises:
          ConfigError: there are files in the directory, or the dtype is another.
        """
        _check_dtype(dtype)
        config, names = dict(self.config), dict.fromkeys(part.tensor for part in self.parts)
        dtypes = {name: self.files.dtype(name) for name in names}
        if dtype is not None:
            # Its name in transformers 4, and in 5.
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
        """Writes the adapters alone, as PEFT keeps them, and the tokenizer.

        Args:
          directory, arrays, task, dtype, note: as of `write`; a dtype of None is float32.
          layers: those with adapters.
          base_model: the name or the directory of the model that they belong to.

        Raises:
          ConfigError: as `write`, and as `write_peft`.
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


def keep_description(directory: str | os.PathLike[str], target: Path) -> None:
    """Writes a model's parts that a job needs besides weights: config.json, tokenizer, shapes.

    Raises:
      ConfigError: see `TensorFiles`.
    """
    files = TensorFiles(local_directory(directory))
    target.mkdir(parents=True, exist_ok=True)
    described = json.dumps(files.described(), indent=1)
    (target / DESCRIBED).write_text(f"{described}\n", "utf-8")
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
