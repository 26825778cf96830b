"""A model of Hugging Face on a mesh: its logits, what it continues, and a config to train it."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fiddle as fdl
import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.checkpoints.huggingface.pretrained import Pretrained
from praxis_lite.checkpoints.huggingface.writing import MAX_FILE_BYTES
from praxis_lite.config.class_attributes import configured
from praxis_lite.decode import Greedy
from praxis_lite.errors import require
from praxis_lite.experiment import registry
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs import TokenIds
from praxis_lite.partitioner import Partitioner
from praxis_lite.sharding import MeshConfig, make_mesh
from praxis_lite.trainer.forward_pass import forward_pass

EXPERIMENT = "huggingface.CausalLm"
AXIS_NAMES = ("replica", "data", "mdl")


def load(
    directory: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    settings: Sequence[str] = (),
    note: Callable[[str], None] = lambda line: None,
) -> "HuggingFaceModel":
    """Returns a model of Hugging Face, its weights in float32 on a mesh.

    Args:
      directory: with config.json and safetensors files.
      mesh: of the axes replica, data and mdl; None: one device.
      settings: "path=value" each, of the experiment huggingface.CausalLm, as for --set; such as
        "SHARDING_PRESET=fsdp".
      note: told how far the reading is, a line now and then.

    Raises:
      ConfigError: the architecture, a field or a tensor is not known; files are missing, damaged
        or pickled; the mesh has other axes.
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


class HuggingFaceModel:
    """The weights of a checkpoint of Hugging Face on a mesh, and what the model computes.

    Each method compiles when it is called for the first time with arrays of some shapes.

    Attributes:
      partitioner: the task on its mesh.
      arrays: the weights by path, padded and split.
      mdl_vars: the same as the compiled steps take them.
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
        self._decoding: dict[tuple[int, int], Partitioner] = {}

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
          position_ids: int [B, T]; None: from 0 in each segment; without segments, where there is
            a mask, the number of true tokens before, else 0 to T - 1.
          segment_ids: int [B, T], of packed rows: tokens see their own segment; 0 is padding.
        """
        ids = np.asarray(ids, np.int32)
        given: dict[str, Any] = {}
        if attention_mask is not None:
            mask = np.asarray(attention_mask) != 0
            if position_ids is None and segment_ids is None:
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

    def export(
        self, directory: str | os.PathLike[str], dtype: str | None = None, *,
        max_file_bytes: int = MAX_FILE_BYTES, note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Writes the model as Hugging Face keeps it: config.json and safetensors files.

        What was read and not trained comes out bit for bit.

        Args:
          directory: a new or an empty one.
          dtype: "float32", "bfloat16" or "float16"; None: of each tensor that of the files read.
          max_file_bytes: of each file.
          note: told how far it is.

        Raises:
          ConfigError: there are files in the directory, or the dtype is another.
        """
        self.pretrained.write(
            directory, self.arrays, self.partitioner.mesh, dtype, max_file_bytes=max_file_bytes,
            note=note,
        )

    def _greedy(self, max_decode_steps: int, eos_id: int) -> Partitioner:
        key = max_decode_steps, eos_id
        if key not in self._decoding:
            decoder = fdl.Config(Greedy, max_decode_steps=max_decode_steps, eos_id=eos_id)
            task = fdl.build(fdl.copy_with(self.experiment.task, decoder=decoder))
            self._decoding[key] = Partitioner(task, self.partitioner.mesh)
        return self._decoding[key]
