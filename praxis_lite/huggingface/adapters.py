"""Merges a model's adapters into its weights, or writes them in PEFT's format."""

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
from praxis_lite.huggingface.tensors.writing import Pieces, save_tensors
from praxis_lite.huggingface.weights import Part
from praxis_lite.layers.base.dims import Matrix, matrix_of
from praxis_lite.layers.whole_model.adapted_products import DecomposedProduct, form_of

# Adapted layers by their path in the model, of `praxis_lite.layers.adapted_layers`.
Layers = Mapping[str, Any]


def merged_weights(
    arrays: Mapping[str, jax.Array], leaves: Sequence[LeafLayout], layers: Layers
) -> dict[str, jax.Array]:
    """Returns the weights by path with the adapters merged, padded and sharded as before."""
    leaf_of, merged = {leaf.path: leaf for leaf in leaves}, dict(arrays)
    for path, layer in layers.items():
        names = [f"params/{path}/{name}" for name in ("w", *layer.product.weights)]
        layouts = [leaf_of[name] for name in names]

        def merge(
            *padded: jax.Array, layouts: Sequence[LeafLayout] = layouts, layer: Any = layer
        ) -> jax.Array:
            arrays = [
                x[tuple(map(slice, layout.shape))]
                for x, layout in zip(padded, layouts, strict=True)
            ]
            sizes = zip(layouts[0].shape, layouts[0].padded_shape, strict=True)
            w = layer.product.merge(layer, *arrays)
            return jnp.pad(w, [(0, padded_size - size) for size, padded_size in sizes])

        padded = [arrays[name] for name in names]
        merged[names[0]] = jax.jit(merge, out_shardings=padded[0].sharding)(*padded)
    return merged


def write_peft(
    directory: Path, parts: Sequence[Part], arrays: Mapping[str, jax.Array], layers: Layers,
    mesh: Mesh, dtype: np.dtype, base_model: str,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors in PEFT's format.

    Call it on every process; the first one writes.

    Args:
      directory: an existing directory.
      parts: of the model's weights.
      dtype: of the tensors.
      base_model: the name or directory of the model that they belong to.

    Raises:
      ConfigError: a layer's weight is only a part of a tensor, which PEFT's adapters do not
        support; or the layers differ in rank, alpha or use of DoRA.
    """
    pieces, tensors, modules, kinds = Pieces(arrays, mesh), {}, [], set()
    is_transposed = False
    for path, layer in layers.items():
        for part in [part for part in parts if part.path == f"params/{path}/w"]:
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
            named = {"A.weight": a.reshape(-1, rank).T, "B.weight": b.reshape(rank, -1).T}
            if m:  # Our m is the learned norm minus the norm of the column.
                lengths = np.sqrt(np.square(w, dtype=np.float32).sum(axis=matrix.summed))
                named["magnitude_vector"] = lengths.reshape(-1) + m[0].reshape(-1)
            for name, tensor in named.items():
                name = f"base_model.model.{module}.lora_{name}"
                tensors[name] = np.ascontiguousarray(tensor.astype(dtype))
            is_dora = isinstance(layer.product, DecomposedProduct)
            kinds.add((rank, layer.product.scale * rank, is_dora))
    if len(kinds) > 1:
        raise ConfigError(
            "export: the adapters have several ranks, alphas and values of use_dora, "
            f"{sorted(kinds)}; PEFT's file has one of each. Export the merged model: --adapters "
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
    """Checks that a tensor is the matrix of a single layer, with its dims in the layer's order."""
    is_alone = part.dim is None and part.turn is None and not form_of(layer).stack
    if not is_alone or set(part.form) != set(matrix):
        raise ConfigError(
            f"export: {part.tensor} consists of several of our weights, or has dims in another "
            f"order, and {part.path} has a separate adapter, which PEFT does not support. Export "
            "the merged model: --adapters merge."
        )


def _targets(modules: Sequence[str]) -> list[str]:
    """Returns the modules' last names, or their full names if some layer has no adapter."""
    counts: dict[str, int] = {}
    for module in modules:
        last = module.rpartition(".")[2]
        counts[last] = counts.get(last, 0) + 1
    layers = {part for item in modules for part in item.split(".") if part.isdecimal()}
    highest = max(map(int, layers), default=0) + 1
    is_each = len(layers) == highest and set(counts.values()) == {highest}
    return sorted(counts) if is_each else list(modules)
