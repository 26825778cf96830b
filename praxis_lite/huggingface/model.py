"""Loads Hugging Face models onto a mesh, for logits, generation and export."""

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import fiddle as fdl
import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.config.experiment_overrides import configured
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.mesh import attached_mesh, filled_mesh, make_mesh, simulate_devices
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.sampling import Greedy
from praxis_lite.decode.stop_strings import continuation_text
from praxis_lite.experiment import registry
from praxis_lite.experiment.experiment import Job
from praxis_lite.host.host_memory import FirstRuns
from praxis_lite.huggingface.pretrained import Pretrained
from praxis_lite.huggingface.tensors.writing import MAX_FILE_BYTES
from praxis_lite.inputs.text.length_classes import length_of_prompts
from praxis_lite.inputs.text.token_ids import checked_int, token_ids
from praxis_lite.trained_model.generation import changed_decoder
from praxis_lite.trainer.forward_pass import forward_pass

__all__ = ("EXPERIMENT", "HuggingFaceModel", "load", "load_on_devices")

_log = logging.getLogger(__name__)

EXPERIMENT = "huggingface.CausalLm"
AXIS_NAMES = ("replica", "data", "mdl")


def load(
    directory: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    settings: Sequence[str] = (),
    note: Callable[[str], None] = _log.info,
) -> "HuggingFaceModel":
    """Loads a Hugging Face model onto a mesh, with float32 weights.

    Args:
      directory: Directory with config.json and safetensors files, or hf://org/name[@revision] on
        the Hugging Face Hub.
      mesh: Mesh with the axes replica, data and mdl, or None for one device.
      settings: Settings "path=value" of the experiment huggingface.CausalLm, as for --set, such as
        "SHARDING_PRESET=fsdp".
      note: Called with progress messages, messages about ignored config.json fields, and warnings
        about NaN weights.

    Raises:
      ConfigError: The architecture, a field or a tensor is unknown; files are missing, damaged or
        pickled; or the mesh has different axes.
    """
    if mesh is None:
        mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1), allow_unused_devices=True))
    require(
        tuple(mesh.axis_names) == AXIS_NAMES,
        "load: the axes of the mesh",
        mesh.axis_names,
        f"{AXIS_NAMES}",
    )
    experiment = configured(
        registry.get_experiment(EXPERIMENT), [f"HF_DIR={os.fspath(directory)}", *settings]
    )
    task, partitioner_tpl = fdl.build(experiment.task), experiment.partitioner
    make_partitioner = Partitioner if partitioner_tpl is None else fdl.build(partitioner_tpl)
    partitioner = make_partitioner(task, mesh)
    pretrained = Pretrained(directory, partitioner.layout.select("mdl_vars"))
    arrays = pretrained.read(mesh, note)
    return HuggingFaceModel(partitioner, arrays, experiment, pretrained)


def load_on_devices(
    directory: str | os.PathLike[str],
    mesh: MeshConfig | Literal["attached", "job"],
    *,
    settings: Sequence[str] = (),
) -> "HuggingFaceModel":
    """Loads a Hugging Face model onto the mesh for a MeshConfig; see `load`.

    Args:
      directory: See `load`.
      mesh: See `praxis_lite.load`. "job" selects the mesh of the experiment huggingface.CausalLm
        with these settings, whose devices are simulated on CPU if there are no accelerators.
      settings: See `load`.
    """
    if isinstance(mesh, str):
        config = fdl.build(configured(registry.get_experiment(EXPERIMENT), settings).mesh)
        mesh = attached_mesh(config) if mesh == "attached" else config
    mesh = filled_mesh(mesh)
    simulate_devices(mesh.num_devices)
    return load(directory, make_mesh(mesh), settings=settings)


class HuggingFaceModel:
    """A Hugging Face model whose weights are placed on a mesh.

    Each method compiles when it is called with new shapes. `generate` caches an unstacked copy of
    stacked weights (one array per layer).

    Attributes:
      partitioner: Partitioner of the task and the mesh.
      arrays: Weights, keyed by path, padded and sharded.
      mdl_vars: The same weights as a tree, as the compiled steps expect them.
      experiment: Config of the experiment huggingface.CausalLm, for training the model.
      pretrained: The files from which the model was loaded.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        arrays: Mapping[str, jax.Array],
        experiment: "fdl.Config[Job]",
        pretrained: Pretrained,
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
          ids: Token ids, int [B, T].
          attention_mask: [B, T], 0 for padding on the left or right, which is not attended to.
          position_ids: Positions, int [B, T]. If None, positions count from 0 in each segment.
            Without segments, only tokens selected by attention_mask are counted.
          segment_ids: Segments of packed rows, int [B, T]. A token only attends to tokens in the
            same segment. 0 marks padding.

        Raises:
          ConfigError: An argument has the wrong shape, or an id or position is out of range.
        """
        mask = None if attention_mask is None else np.asarray(attention_mask) != 0
        if mask is not None:
            require(
                mask.shape == np.shape(ids),
                "logits: the shape of attention_mask",
                mask.shape,
                f"the shape of ids, {np.shape(ids)}",
            )
        ids = token_ids(ids, "logits: ids", self._sizes["ids"], counts=mask)
        inputs: dict[str, Any] = {}
        # Packed rows mark padding by segment 0, other rows by `paddings`.
        if segment_ids is not None:
            segment_ids = _ids_like(ids, segment_ids, "logits: segment_ids")
            inputs["segment_ids"] = segment_ids if mask is None else np.where(mask, segment_ids, 0)
        elif mask is not None:
            inputs["paddings"] = 1.0 - mask.astype(np.float32)
        if position_ids is not None:
            inputs["positions"] = _ids_like(
                ids, position_ids, "logits: position_ids", self._sizes.get("segment_pos"), mask
            )
        # Padding on the left does not shift the positions.
        elif mask is not None and segment_ids is None:
            inputs["positions"] = np.maximum(np.cumsum(mask, axis=1, dtype=np.int32) - 1, 0)
        self._require_positions(ids.shape[1], "logits: the length of ids")
        return self._forward(self.mdl_vars, ids, **inputs)[0]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 16,
        *,
        eos_id: int | Sequence[int] | None = None,
        **settings: Any,
    ) -> list[list[int]]:
        """Continues each prompt by greedy decoding, and returns the new ids.

        Args:
          prompts: Token ids of one or more prompts, which may differ in length.
          max_new_tokens: Maximum number of new tokens per prompt.
          eos_id: One or more tokens that end a continuation. If None, max_new_tokens tokens are
            always decoded.
          settings: Other arguments of `praxis_lite.decode.Greedy`, such as
            num_speculative_tokens=4. A continuation ends with the token that completes one of the
            stop_strings.

        Raises:
          ConfigError: An id or position is out of range, or a setting does not exist.
        """
        argument = "generate: max_new_tokens"
        max_new_tokens = checked_int(max_new_tokens, argument, 1)
        require(
            not isinstance(prompts, str) and len(prompts) > 0,
            "generate: prompts",
            prompts,
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
            longest + max_new_tokens,
            f"{argument}={max_new_tokens} plus a prompt of {longest} tokens",
        )
        eos_ids: tuple[int, ...] = ()
        if eos_id is not None:
            given = eos_id if isinstance(eos_id, list | tuple) else [eos_id]
            eos_ids = tuple(token_ids(given, "generate: eos_id", vocab_size, ndim=1).tolist())
        # Pad to one of a few lengths, because each length is compiled separately.
        padded_length = length_of_prompts(longest, max_new_tokens, num_positions)
        ids = np.zeros((len(lengths), padded_length), np.int32)
        for padded, row in zip(ids, rows, strict=True):
            padded[: len(row)] = row
        # The storage format of weights was determined when the model was loaded.
        weights_form = self.partitioner.task.decoder.weights_form
        for name, expected in weights_form.items():
            actual = settings.get(name, expected)
            require(
                actual == expected,
                f"generate: {name}",
                actual,
                f"{expected!r}",
                f"Load the model with settings=['task.decoder.{name}=...'].",
            )
        # The decoder is part of the task, so each combination of settings has its own Partitioner.
        config = self.experiment.task
        greedy = Greedy(max_decode_steps=max_new_tokens, eos_id=eos_ids, **weights_form)
        decoder = changed_decoder(self.partitioner.task, config, greedy, settings)
        stop_strings = decoder.stop_strings
        require(
            not stop_strings or config.tokenizer is not None,
            "generate: stop_strings",
            stop_strings,
            "(), because the model has no tokenizer",
            "Pass the token ids as stop_sequences.",
        )
        if decoder not in self._decoding:
            task = fdl.build(fdl.copy_with(config, decoder=decoder))
            self._decoding[decoder] = Partitioner(task, self.partitioner.mesh)
        partitioner = self._decoding[decoder]
        batch = partitioner.global_batch(
            {
                "ids": ids,
                "prefix_lengths": lengths,
                "weights": np.ones(len(lengths), np.float32),
            }
        )
        outputs = jax.device_get(
            self._runs.run(
                partitioner.decode_step,
                self._for_decoding,
                batch,
                partitioner.key(0),
                key=ids.shape,
            )
        )
        # Greedy decoding has a single hypothesis, which has index 0.
        new_ids = [
            row[0, : length[0]].tolist()
            for row, length in zip(outputs["output_ids"], outputs["decode_lengths"], strict=True)
        ]
        if not stop_strings:
            return new_ids
        tokenizer = partitioner.task.tokenizer
        return [
            row[: continuation_text(tokenizer, prompt, row, stop_strings).num_tokens]
            for prompt, row in zip(rows, new_ids, strict=True)
        ]

    def export(
        self,
        directory: str | os.PathLike[str],
        dtype: str | None = None,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Exports the model in Hugging Face format: config.json and safetensors files.

        Weights that have not changed since `load` are bitwise equal to the tensors that were read.

        Args:
          directory: New or empty directory, or hf://org/name[@branch] to upload the files to the
            Hugging Face Hub. A new repository is private.
          dtype: "float32", "bfloat16" or "float16". If None, each tensor keeps its original dtype.
          max_file_bytes: Maximum size of a file.
          note: Called with progress messages.

        Raises:
          ConfigError: The directory is not empty, the repository cannot be written, or the dtype
            is not supported.
        """
        self.pretrained.write(
            directory,
            self.arrays,
            self.partitioner.mesh,
            self.partitioner.task,
            dtype,
            max_file_bytes=max_file_bytes,
            note=note,
        )

    def _require_positions(self, length: int, argument: str) -> None:
        """Raises ConfigError if a sequence is longer than the model's number of positions."""
        num_positions = self._sizes.get("segment_pos")
        if num_positions is not None and length > num_positions:
            raise ConfigError(
                f"{argument} is {length}; expected at most {num_positions}, the model's number of "
                "positions (max_position_embeddings). Shorten the input, or load the model with "
                "settings=['task.model.max_positions=NUMBER'] if its positions are rotary."
            )

    @functools.cached_property
    def _for_decoding(self) -> Any:
        return self.partitioner.for_decoding(self.mdl_vars)

    @functools.cached_property
    def _sizes(self) -> Mapping[str, int]:
        return self.partitioner.task.num_ids()


def _ids_like(
    ids: np.ndarray,
    value: Any,
    argument: str,
    size: int | None = None,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Returns an argument as int32, broadcast to the shape of `ids`."""
    try:
        value = np.broadcast_to(np.asarray(value), ids.shape)
    except ValueError:
        raise ConfigError(
            f"{argument} does not have the shape of ids, {list(ids.shape)}. Pass a value per id."
        ) from None
    return token_ids(value, argument, size, counts=mask)
