"""Hugging Face models on a mesh: logits, continuations, export, and a config to train them."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import fiddle as fdl
import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.config.class_attributes import configured
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.mesh import attached_mesh, filled_mesh, make_mesh, simulate_devices
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.sampling import Greedy
from praxis_lite.experiment import registry
from praxis_lite.experiment.experiment import Job
from praxis_lite.host.host_memory import FirstRuns
from praxis_lite.huggingface.pretrained import Pretrained
from praxis_lite.huggingface.tensors.writing import MAX_FILE_BYTES
from praxis_lite.inputs.text.length_classes import length_of_prompts
from praxis_lite.inputs.text.token_ids import token_ids, whole_number
from praxis_lite.trained_model.generation import changed_decoder
from praxis_lite.trainer.forward_pass import forward_pass

__all__ = ("EXPERIMENT", "HuggingFaceModel", "load", "load_on_devices")

EXPERIMENT = "huggingface.CausalLm"
AXIS_NAMES = ("replica", "data", "mdl")


def load(
    directory: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    settings: Sequence[str] = (),
    note: Callable[[str], None] = print,
) -> "HuggingFaceModel":
    """Returns a Hugging Face model with its weights in float32 on a mesh.

    Args:
      directory: with config.json and safetensors files.
      mesh: with the axes replica, data and mdl; None: one device.
      settings: "path=value" each, of the experiment huggingface.CausalLm, as for --set; such as
        "SHARDING_PRESET=fsdp".
      note: called with the progress, with ignored fields of config.json and with NaN weights.

    Raises:
      ConfigError: the architecture, a field or a tensor is unknown; files are missing, damaged or
        pickled; the mesh has other axes.
    """
    if mesh is None:
        mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1), allow_unused_devices=True))
    require(
        tuple(mesh.axis_names) == AXIS_NAMES, "load: the axes of the mesh", mesh.axis_names,
        f"{AXIS_NAMES}",
    )
    experiment = configured(
        registry.get_experiment(EXPERIMENT), [f"HF_DIR={os.fspath(directory)}", *settings]
    )
    task, make = fdl.build(experiment.task), experiment.partitioner
    partitioner = Partitioner(task, mesh) if make is None else fdl.build(make)(task, mesh)
    pretrained = Pretrained(directory, partitioner.layout.select("mdl_vars"))
    arrays = pretrained.read(mesh, note)
    return HuggingFaceModel(partitioner, arrays, experiment, pretrained)


def load_on_devices(
    directory: str | os.PathLike[str], mesh: MeshConfig | Literal["attached", "job"], *,
    settings: Sequence[str] = (),
) -> "HuggingFaceModel":
    """Returns a Hugging Face model on the devices that a command line names; see `load`.

    Args:
      mesh: as of `praxis_lite.load`; "job" is the mesh of the experiment huggingface.CausalLm with
        the settings. Its devices are simulated if there are no accelerators.
    """
    if isinstance(mesh, str):
        config = fdl.build(configured(registry.get_experiment(EXPERIMENT), settings).mesh)
        mesh = attached_mesh(config) if mesh == "attached" else config
    mesh = filled_mesh(mesh)
    simulate_devices(mesh.num_devices)
    return load(directory, make_mesh(mesh), settings=settings)


class HuggingFaceModel:
    """The weights of a Hugging Face checkpoint on a mesh, and the model's calls.

    Each method compiles when it is first called with arrays of some shapes; `generate` keeps a copy
    of the weights of stacked layers, with one array per layer.

    Attributes:
      partitioner: the task on its mesh.
      arrays: the weights by path, padded and sharded.
      mdl_vars: the same as a tree, for the compiled steps.
      experiment: a config to train it, of the experiment huggingface.CausalLm.
      pretrained: the files that it was read from.
    """

    def __init__(
        self, partitioner: Partitioner, arrays: Mapping[str, jax.Array],
        experiment: "fdl.Config[Job]", pretrained: Pretrained,
    ):
        self.partitioner, self.arrays, self.experiment = partitioner, arrays, experiment
        self.pretrained = pretrained
        layout = partitioner.layout.select("mdl_vars")
        leaves = [arrays[leaf.path] for leaf in layout.leaves()]
        self.mdl_vars = jax.tree.unflatten(jax.tree.structure(layout.shapes), leaves)
        self._forward = forward_pass(partitioner)
        self._decoding: dict[Decoder, Partitioner] = {}
        self._runs = FirstRuns("generate", "Give it fewer or shorter prompts.")

    def logits(
        self,
        ids: Any,
        attention_mask: Any | None = None,
        position_ids: Any | None = None,
        segment_ids: Any | None = None,
    ) -> np.ndarray:
        """Returns float32 logits [B, T, V].

        Args:
          ids: int [B, T].
          attention_mask: [B, T], 0 for padding on the right or the left, which no token sees.
          position_ids: int [B, T]; None: from 0 in each segment; without segments, with a mask the
            number of real tokens before, else 0 to T - 1.
          segment_ids: int [B, T], of packed rows: tokens see their own segment; 0 is padding.

        Raises:
          ConfigError: an argument has another shape, or an id or position that the model lacks.
        """
        mask = None if attention_mask is None else np.asarray(attention_mask) != 0
        if mask is not None:
            require(
                mask.shape == np.shape(ids), "logits: the shape of attention_mask", mask.shape,
                f"that of ids, {np.shape(ids)}",
            )
        ids = token_ids(ids, "logits: ids", self._sizes["ids"], counts=mask)
        given: dict[str, Any] = {}
        if segment_ids is not None:
            segment_ids = _ids_like(ids, segment_ids, "logits: segment_ids")
            given["segment_ids"] = segment_ids if mask is None else np.where(mask, segment_ids, 0)
        elif mask is not None:
            given["paddings"] = 1.0 - mask.astype(np.float32)
        if position_ids is not None:
            given["positions"] = _ids_like(
                ids, position_ids, "logits: position_ids", self._sizes.get("segment_pos"), mask
            )
        elif mask is not None and segment_ids is None:
            given["positions"] = np.maximum(np.cumsum(mask, axis=1, dtype=np.int32) - 1, 0)
        self._require_positions(ids.shape[1], "logits: the length of ids")
        return self._forward(self.mdl_vars, ids, **given)[0]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 16, *,
        eos_id: int | Sequence[int] | None = None, **settings: Any,
    ) -> list[list[int]]:
        """Returns the likeliest next ids of each prompt.

        Args:
          prompts: of any lengths from one token on.
          eos_id: a row ends with this token, or one of these; None: no token ends it.
          settings: others of `praxis_lite.decode.Greedy`, such as num_speculative_tokens=4.

        Raises:
          ConfigError: the model lacks an id or a position, or there is no such setting.
        """
        what = "generate: max_new_tokens"
        max_new_tokens = whole_number(max_new_tokens, what, 1)
        require(
            not isinstance(prompts, str) and len(prompts) > 0, "generate: prompts", prompts,
            "a list of prompts, each a list of token ids",
        )
        vocab_size, num_positions = self._sizes["ids"], self._sizes.get("segment_pos")
        rows = [
            token_ids(prompt, f"generate: prompt {number}", vocab_size, ndim=1)
            for number, prompt in enumerate(prompts)
        ]
        lengths = np.array([len(row) for row in rows], np.int32)
        longest = int(lengths.max())
        self._require_positions(
            longest + max_new_tokens, f"{what}={max_new_tokens} after a prompt of {longest} tokens"
        )
        ends: tuple[int, ...] = ()
        if eos_id is not None:
            ends = eos_id if isinstance(eos_id, list | tuple) else [eos_id]
            ends = tuple(token_ids(ends, "generate: eos_id", vocab_size, ndim=1).tolist())
        padded_length = length_of_prompts(longest, max_new_tokens, num_positions)
        ids = np.zeros((len(lengths), padded_length), np.int32)
        for padded, row in zip(ids, rows, strict=True):
            padded[: len(row)] = row
        form = self.partitioner.task.decoder.weights_form
        for name, expected in form.items():
            actual = settings.get(name, expected)
            require(
                actual == expected, f"generate: {name}", actual, f"{expected!r}",
                f"Load the model with settings=['task.decoder.{name}=...'].",
            )
        config = self.experiment.task
        decoder = Greedy(max_decode_steps=max_new_tokens, eos_id=ends, **form)
        decoder = changed_decoder(self.partitioner.task, config, decoder, settings)
        if decoder not in self._decoding:
            task = fdl.build(fdl.copy_with(config, decoder=decoder))
            self._decoding[decoder] = Partitioner(task, self.partitioner.mesh)
        partitioner = self._decoding[decoder]
        batch = partitioner.global_batch({
            "ids": ids, "prefix_lengths": lengths, "weights": np.ones(len(lengths), np.float32),
        })
        outputs = jax.device_get(self._runs.run(
            partitioner.decode_step, self._for_decoding, batch, partitioner.key(0), key=ids.shape
        ))
        return [
            row[0, : length[0]].tolist()
            for row, length in zip(outputs["output_ids"], outputs["decode_lengths"], strict=True)
        ]

    def export(
        self, directory: str | os.PathLike[str], dtype: str | None = None, *,
        max_file_bytes: int = MAX_FILE_BYTES, note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Exports the model in Hugging Face format: config.json and safetensors files.

        Untrained weights are written bit for bit as they were read.

        Args:
          directory: new or empty.
          dtype: "float32", "bfloat16" or "float16"; None: for each tensor that of the files read.
          max_file_bytes: of each file.
          note: called with the progress.

        Raises:
          ConfigError: the directory has files, or the dtype is not one of these.
        """
        self.pretrained.write(
            directory, self.arrays, self.partitioner.mesh, self.partitioner.task, dtype,
            max_file_bytes=max_file_bytes, note=note,
        )

    def _require_positions(self, length: int, what: str) -> None:
        most = self._sizes.get("segment_pos")
        if most is not None and length > most:
            raise ConfigError(
                f"{what} is {length}; expected at most {most}, the positions of the model "
                "(max_position_embeddings). Shorten it, or load the model with "
                "settings=['task.model.max_positions=NUMBER'] if its positions are rotary."
            )

    @functools.cached_property
    def _for_decoding(self) -> Any:
        return self.partitioner.for_decoding(self.mdl_vars)

    @functools.cached_property
    def _sizes(self) -> Mapping[str, int]:
        return self.partitioner.task.num_ids()


def _ids_like(
    ids: np.ndarray, given: Any, what: str, size: int | None = None, mask: np.ndarray | None = None
) -> np.ndarray:
    """Returns an argument as int32 with the shape of ids; a row counts for all rows."""
    try:
        given = np.broadcast_to(np.asarray(given), ids.shape)
    except ValueError:
        raise ConfigError(
            f"{what} does not have the shape of ids, {list(ids.shape)}. Give a number for each id."
        ) from None
    return token_ids(given, what, size, counts=mask)
