"""Exports LoRA adapters, either merged into the weights or as separate files in PEFT's format."""

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

# Layers with adapters, keyed by path in the model, as from `praxis_lite.layers.adapted_layers`.
Layers = Mapping[str, Any]


def merged_weights(
    arrays: Mapping[str, jax.Array], leaves: Sequence[LeafLayout], layers: Layers
) -> dict[str, jax.Array]:
    """Returns weights with merged adapters, keyed by path; padding and sharding do not change."""
    layout_by_path, merged = {leaf.path: leaf for leaf in leaves}, dict(arrays)
    for path, layer in layers.items():
        weight_paths = [f"params/{path}/{name}" for name in ("w", *layer.product.weights)]
        layouts = [layout_by_path[weight_path] for weight_path in weight_paths]

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

        padded = [arrays[weight_path] for weight_path in weight_paths]
        merged[weight_paths[0]] = jax.jit(merge, out_shardings=padded[0].sharding)(*padded)
    return merged


def write_peft(
    directory: Path,
    parts: Sequence[Part],
    arrays: Mapping[str, jax.Array],
    layers: Layers,
    mesh: Mesh,
    dtype: np.dtype,
    base_model: str,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors in PEFT's format.

    Every process must call this function, but only the first process writes.

    Args:
      directory: Existing directory to write to.
      parts: Tensors of the model; see `Pretrained.parts`.
      arrays: Weights and adapters, keyed by path, padded and sharded.
      layers: Layers with adapters.
      mesh: Mesh of the arrays.
      dtype: Dtype of the written tensors.
      base_model: Name or directory of the model without adapters.

    Raises:
      ConfigError: A layer's weight is only a slice of a tensor, which PEFT does not support; or the
        layers differ in rank, alpha or the use of DoRA.
    """
    pieces, tensors, modules, variants = Pieces(arrays, mesh), {}, [], set()
    is_transposed = False
    for path, layer in layers.items():
        for part in [part for part in parts if part.path == f"params/{path}/w"]:
            matrix = matrix_of(layer.equation, layer.letters)
            _check_maps_to_one_tensor(part, layer, matrix)
            # GPT-2 stores matrices as [in, out], which PEFT calls fan_in_fan_out.
            is_transposed = is_transposed or set(part.form[0]) == set(matrix.contracted)
            module = part.tensor.removesuffix(".weight")
            modules.append(module)
            w, a, b, *m = (
                pieces(f"params/{path}/{x}", part.index, getattr(layer, x).shape[len(part.index) :])
                for x in ("w", *layer.product.weights)
            )
            rank = layer.lora_a.shape[-1]
            # Our matrices are [*inputs, rank] and [rank, *outputs]. PEFT's matrices are [rank, in]
            # and [out, rank].
            peft_tensors = {"A.weight": a.reshape(-1, rank).T, "B.weight": b.reshape(rank, -1).T}
            if m:  # Our m is the learned column norm minus the initial one; PEFT stores their sum.
                norms = np.sqrt(np.square(w, dtype=np.float32).sum(axis=matrix.contracted))
                peft_tensors["magnitude_vector"] = norms.reshape(-1) + m[0].reshape(-1)
            for name, tensor in peft_tensors.items():
                name = f"base_model.model.{module}.lora_{name}"
                tensors[name] = np.ascontiguousarray(tensor.astype(dtype))
            is_dora = isinstance(layer.product, DecomposedProduct)
            variants.add((rank, layer.product.scale * rank, is_dora))
    if len(variants) > 1:
        raise ConfigError(
            f"export: the adapters differ in (rank, alpha, use_dora): {sorted(variants)}. PEFT "
            "supports only a single combination. Export the merged model instead: --adapters merge."
        )
    ((rank, alpha, is_dora),) = variants
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "target_modules": _targets(modules),
        "use_dora": is_dora,
        "inference_mode": True,
    }
    if jax.process_index() == 0:
        save_tensors(tensors, directory / "adapter_model.safetensors")
        text = json.dumps(config, indent=2) + "\n"
        (directory / "adapter_config.json").write_text(text, "utf-8")


def _check_maps_to_one_tensor(part: Part, layer: Any, matrix: Matrix) -> None:
    """Checks that a tensor contains only this layer's matrix, with its dims in the same order."""
    is_only_part = part.dim is None and part.interleave_index is None and not form_of(layer).stack
    if not is_only_part or set(part.form) != set(matrix):
        raise ConfigError(
            f"export: PEFT cannot represent the adapter of {part.path}, because {part.tensor} "
            "merges several weights or orders their dims differently. Export the merged model "
            "instead: --adapters merge."
        )


def _targets(modules: Sequence[str]) -> list[str]:
    """Returns PEFT's target_modules.

    If all layers have the same adapters, only the last components of module names are listed.
    """
    counts: dict[str, int] = {}
    for module in modules:
        last = module.rpartition(".")[2]
        counts[last] = counts.get(last, 0) + 1
    layers = {part for module in modules for part in module.split(".") if part.isdecimal()}
    num_layers = max(map(int, layers), default=0) + 1
    is_uniform = len(layers) == num_layers and set(counts.values()) == {num_layers}
    return sorted(counts) if is_uniform else list(modules)
