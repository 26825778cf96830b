"""A model's adapters: folded into its weights, or written as PEFT keeps them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import LeafLayout
from praxis_lite.layers.base.dims import Matrix, matrix_of
from praxis_lite.layers.whole_model.adapted_products import DecomposedProduct, form_of
from praxis_lite.tools.huggingface.tensors.writing import Pieces, save_tensors
from praxis_lite.tools.huggingface.weights import Part

# Adapted layers by their path in the model, of `praxis_lite.layers.adapted_layers`.
Layers = Mapping[str, Any]


def merged_weights(
    arrays: Mapping[str, jax.Array], leaves: Sequence[LeafLayout], layers: Layers
) -> dict[str, jax.Array]:
    """Returns the weights by path, as padded and split as they are, with the adapters in them."""
    leaf_of, result = {leaf.path: leaf for leaf in leaves}, dict(arrays)
    for path, layer in layers.items():
        names = [f"params/{path}/{name}" for name in ("w", *layer.product.weights)]
        local = [leaf_of[name] for name in names]

        def added(
            *padded: jax.Array, own: Sequence[LeafLayout] = local, layer: Any = layer
        ) -> jax.Array:
            true = [x[tuple(map(slice, leaf.shape))] for x, leaf in zip(padded, own, strict=True)]
            sizes = zip(own[0].shape, own[0].padded_shape, strict=True)
            whole = layer.product.merged(layer, *true)
            return jnp.pad(whole, [(0, much - size) for size, much in sizes])

        given = [arrays[name] for name in names]
        result[names[0]] = jax.jit(added, out_shardings=given[0].sharding)(*given)
    return result


def write_peft(
    directory: Path, parts: Sequence[Part], arrays: Mapping[str, jax.Array], layers: Layers,
    mesh: Mesh, dtype: np.dtype, base_model: str,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which PEFT loads onto the model.

    Called on each process of a job; the first one writes.

    Args:
      directory: that exists.
      parts: of the model's weights.
      dtype: of what is written.
      base_model: the name or the directory of the model that they belong to.

    Raises:
      ConfigError: a layer's weight is part of a tensor of theirs, so that PEFT has no adapter of
        that form; or the layers differ in rank, in alpha or in being DoRA's.
    """
    pieces, tensors, modules, kinds = Pieces(arrays, mesh), {}, [], set()
    is_transposed = False
    for path, layer in layers.items():
        of_layer = [part for part in parts if part.path == f"params/{path}/w"]
        for part in of_layer:
            matrix = matrix_of(layer.equation, layer.letters)
            _check_alone(part, layer, matrix)
            is_transposed = is_transposed or set(part.form[0]) == set(matrix.summed)
            module = part.tensor.removesuffix(".weight")
            modules.append(module)
            w, a, b, *m = (
                pieces(f"params/{path}/{x}", part.index, getattr(layer, x).shape[len(part.index) :])
                for x in ("w", *layer.product.weights)
            )
            rank = layer.lora_a.shape[-1]
            # Ours are [*inputs, rank] and [rank, *outputs], theirs [rank, in] and [out, rank].
            of_module = {"A.weight": a.reshape(-1, rank).T, "B.weight": b.reshape(rank, -1).T}
            if m:  # Ours is the difference of the learned length from that of the column.
                lengths = np.sqrt(np.square(w, dtype=np.float32).sum(axis=matrix.summed))
                of_module["magnitude_vector"] = lengths.reshape(-1) + m[0].reshape(-1)
            for name, tensor in of_module.items():
                name = f"base_model.model.{module}.lora_{name}"
                tensors[name] = np.ascontiguousarray(tensor.astype(dtype))
            is_dora = isinstance(layer.product, DecomposedProduct)
            kinds.add((rank, layer.product.scale * rank, is_dora))
    if len(kinds) > 1:
        raise ConfigError(
            "export: the adapters have several ranks, alphas and values of use_dora, "
            f"{sorted(kinds)}; PEFT's file is written for one. Write the model whole: --adapters "
            "merge."
        )
    ((rank, alpha, is_dora),) = kinds
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": is_transposed, "target_modules": _targets(modules),
        "use_dora": is_dora, "inference_mode": True,
    }
    if jax.process_index() == 0:
        save_tensors(tensors, directory / "adapter_model.safetensors")
        text = json.dumps(config, indent=2) + "\n"
        (directory / "adapter_config.json").write_text(text, "utf-8")


def _check_alone(part: Part, layer: Any, matrix: Matrix) -> None:
    """Checks that a tensor is the matrix of a single layer, its dims in the layer's order."""
    is_alone = part.dim is None and part.turn is None and not form_of(layer).stack
    if not is_alone or set(part.form) != set(matrix):
        raise ConfigError(
            f"export: {part.tensor} holds several of our weights, or dims in another order, and "
            f"{part.path} has an adapter of its own; PEFT has none of that form. Write the model "
            "whole: --adapters merge."
        )


def _targets(modules: Sequence[str]) -> list[str]:
    """Returns the last names of the modules, or whole names if not every layer has an adapter."""
    counts: dict[str, int] = {}
    for module in modules:
        last = module.rpartition(".")[2]
        counts[last] = counts.get(last, 0) + 1
    layers = {part for item in modules for part in item.split(".") if part.isdecimal()}
    highest = max(map(int, layers), default=0) + 1
    is_each = len(layers) == highest and set(counts.values()) == {highest}
    return sorted(counts) if is_each else list(modules)
