"""A model of Hugging Face on a mesh: its logits, what it continues, and a config to train it."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import optax
from jax.sharding import Mesh

from praxis_lite.decode import Greedy
from praxis_lite.errors import ConfigError, require
from praxis_lite.inputs import TokenIds
from praxis_lite.interop.huggingface.decoder import DecoderSettings, lm_config, pattern
from praxis_lite.interop.huggingface.family import Family, family_of, read_config
from praxis_lite.interop.huggingface.reading import check_tensors, read_weights
from praxis_lite.interop.huggingface.tensor_files import TensorFiles
from praxis_lite.interop.huggingface.weights import Part, parts
from praxis_lite.layers import set_sharding_params
from praxis_lite.learner import Learner
from praxis_lite.partitioner import Partitioner
from praxis_lite.sharding import MeshConfig, make_mesh
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.trainer.forward_pass import forward_pass

AXIS_NAMES = ("replica", "data", "mdl")
BATCH_OVER_DATA = {
    "map_1d": (("replica", "data"),),
    "map_2d": (("replica", "data"), None),
}


def load(
    directory: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    preset: str = "fsdp+tensor",
    note: Callable[[str], None] = lambda line: None,
) -> "HuggingFaceModel":
    """Returns a model of Hugging Face, its weights in float32 on a mesh.

    Args:
      directory: with config.json and safetensors files.
      mesh: of the axes replica, data and mdl; None: one device.
      preset: how weights and activations split, of SHARDING_PRESETS.
      note: told how far the reading is.

    Raises:
      ConfigError: the architecture, a field or a tensor is not known, files are missing, damaged
        or pickled, or the mesh has other axes.
    """
    path = Path(directory)
    config = read_config(path)
    family = family_of(config)
    settings = settings_of(family, config)
    if mesh is None:
        mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1), allow_unused_devices=True))
    require(
        tuple(mesh.axis_names) == AXIS_NAMES, "load: the axes of the mesh", mesh.axis_names,
        f"{AXIS_NAMES}",
    )
    task = task_config(settings, preset)
    partitioner = Partitioner(fdl.build(task), mesh)
    files = TensorFiles(path)
    layout = partitioner.layout.select("mdl_vars")
    found = parts_of(family, settings, partitioner)
    names = check_tensors(family, found, files)
    leaves = read_weights(layout, mesh, found, files, names, note)
    mdl_vars = jax.tree.unflatten(jax.tree.structure(layout.shapes), leaves)
    return HuggingFaceModel(partitioner, mdl_vars, task)


def settings_of(family: Family, config: dict[str, Any]) -> DecoderSettings:
    """Returns the settings that a config.json amounts to.

    Raises:
      ConfigError: a field is missing, or not known.
    """
    translated = family.translated(config)
    fields = {field.name: field for field in dataclasses.fields(DecoderSettings)}
    missing = [
        name for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in translated
    ]
    if missing:
        raise ConfigError(f"config.json of {family.name} says nothing of {', '.join(missing)}.")
    return DecoderSettings(**translated)


def parts_of(
    family: Family, settings: DecoderSettings, partitioner: Partitioner
) -> list[Part]:
    """Returns which tensors make which weights of a partitioner's task."""
    weights = {
        leaf.path: leaf.shape for leaf in partitioner.layout.select("mdl_vars").leaves()
    }
    windows = [settings.window_of(i) for i in range(settings.num_layers)]
    return parts(family, settings, len(pattern(windows)), weights)


def task_config(settings: DecoderSettings, preset: str) -> "fdl.Config[LanguageModelTask]":
    """Returns the config of the task that trains such a model."""
    learner = fdl.Config(
        Learner, optimizer=fdl.Partial(optax.adamw, b2=0.95, weight_decay=0.1),
        learning_rate=1e-5, clip_gradient_norm_to_value=1.0,
    )
    return fdl.Config(
        LanguageModelTask, model=set_sharding_params(lm_config(settings), preset),
        learner=learner, inputs_split_mapping=BATCH_OVER_DATA, tokenizer=fdl.Config(TokenIds),
    )


class HuggingFaceModel:
    """The weights of a checkpoint of Hugging Face on a mesh, and what the model computes.

    Each method compiles when it is called for the first time with arrays of some shapes.

    Attributes:
      partitioner: the task on its mesh.
      mdl_vars: the weights as the compiled steps take them: padded and split.
      task: the config of the task.
    """

    def __init__(self, partitioner: Partitioner, mdl_vars: Any, task: fdl.Config):
        self.partitioner, self.mdl_vars, self.task = partitioner, mdl_vars, task
        self._forward = forward_pass(partitioner)
        self._decoding: dict[int, Partitioner] = {}

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
          attention_mask: [B, T], 0 for padding, on the right or on the left; no token sees it.
          position_ids: int [B, T]; None: where there is a mask the number of true tokens before,
            else 0 to T - 1.
          segment_ids: int [B, T], of packed rows: tokens see their own segment; 0 is padding.
        """
        ids = np.asarray(ids, np.int32)
        given: dict[str, Any] = {}
        if attention_mask is not None:
            mask = np.asarray(attention_mask) != 0
            if position_ids is None:
                position_ids = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
            if segment_ids is not None:
                segment_ids = np.where(mask, segment_ids, 0)
            else:
                given["paddings"] = 1.0 - mask.astype(np.float32)
        if position_ids is not None:
            given["positions"] = np.broadcast_to(np.asarray(position_ids, np.int32), ids.shape)
        if segment_ids is not None:
            given["segment_ids"] = np.asarray(segment_ids, np.int32)
        return self._forward(self.mdl_vars, ids, **given)[0]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 16, *,
        eos_id: int | None = None,
    ) -> list[list[int]]:
        """Returns the likeliest next ids of each prompt, a token at a time.

        Args:
          prompts: of any lengths, a token each at least.
          eos_id: a row ends with this token; None: none ends it.
        """
        lengths = np.array([len(one) for one in prompts], np.int32)
        require(
            len(lengths) > 0 and lengths.min() > 0, "generate: the lengths of the prompts",
            lengths.tolist(), "a prompt at least, of a token at least",
        )
        ids = np.zeros((len(lengths), lengths.max()), np.int32)
        for row, one in zip(ids, prompts, strict=True):
            row[: len(one)] = one
        partitioner = self._greedy(max_new_tokens, TokenIds.eos_id if eos_id is None else eos_id)
        batch = partitioner.global_batch({
            "ids": ids, "prefix_lengths": lengths, "weights": np.ones(len(lengths), np.float32),
        })
        found = jax.device_get(
            partitioner.decode_step(self.mdl_vars, batch, partitioner.key(0))
        )
        return [
            row[0, : length[0]].tolist()
            for row, length in zip(found["output_ids"], found["decode_lengths"], strict=True)
        ]

    def _greedy(self, max_decode_steps: int, eos_id: int) -> Partitioner:
        key = max_decode_steps, eos_id
        if key not in self._decoding:
            decoder = fdl.Config(Greedy, max_decode_steps=max_decode_steps, eos_id=eos_id)
            task = fdl.build(fdl.copy_with(self.task, decoder=decoder))
            self._decoding[key] = Partitioner(task, self.partitioner.mesh)
        return self._decoding[key]
