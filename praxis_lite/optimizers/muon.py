"""Selects the matrices among weights, for Muon; the other weights are updated by AdamW.

Muon (Keller Jordan 2024) replaces the momentum of a matrix by approximately the nearest orthogonal
matrix, in five Newton-Schulz steps. optax implements it, and needs to know how each weight is a
matrix:

    optimizer=fdl.Partial(
        optax.contrib.muon, consistent_rms=0.2, weight_decay=0.1, adam_b2=0.95,
        muon_weight_dimension_numbers=fdl.Config(muon_matrices),
    )

`consistent_rms=0.2` scales a step to the size of AdamW's, so both can use AdamW's learning rate and
weight decay (Liu et al. 2025, https://arxiv.org/abs/2502.16982). Without it, a step is scaled by
sqrt(max(1, outputs / inputs)), which requires a rate of about 0.02. optax's defaults are beta 0.95
with Nesterov, which its AdamW then uses too, eps 1e-8 and no weight decay.

A matrix has one slot of its shape, half of Adam's memory; other weights have Adam's two slots.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.learner.path_masks import path_mask
from praxis_lite.core.sharding.leaf_paths import path_of
from praxis_lite.core.sharding.weight_spec import declared_weight

PyTree = Any

# Weights with these names belong to AdamW if their layers declare nothing.
_ADAMW = re.compile(r"(.*/)?((softmax|logits)/.+|lora_[abm])")


def muon_matrices(
    equations: Mapping[str, str | None] | None = None,
) -> Callable[[PyTree], PyTree]:
    """Returns a `muon_weight_dimension_numbers` for optax, a function from weights to matrices.

    A layer declares, with each weight, over which of its dims a product sums and which it adds to
    the outputs. Attention weights are matrices of model dims by all heads; the query, key and value
    parts of a combined weight, each expert, and each block of a gate are separate matrices.
    Embeddings, softmaxes, biases, scales, low-rank adapters and weights with one dim belong to
    AdamW. Other weights with two dims, such as Flax's, are matrices of inputs by outputs.

    Args:
      equations: A dict from patterns, matched from the start of a weight's path under params
        (`re.match`), to the einsum that uses the weight, or None for AdamW. It overrides the
        layers' declarations, and the first matching pattern applies. A dim that is summed over is
        an input of the matrix, a dim of only the outputs is an output; a dim of both numbers
        separate matrices:

          {"network/.*/w": "hwi,hwio->o",           # a convolution
           ".*/post/w": "nk,nkd->d",                # use_nhd_shape
           ".*/router/w": None}

    Raises:
      ConfigError: A pattern is not a regular expression, or an equation defines no matrix. Later,
        for a weight, whose path the message names: it has three or more dims and no equation, or
        an equation with another number of dims.
    """
    local = [
        (pattern, path_mask(include=pattern), equation, equation and _dims(equation))
        for pattern, equation in (equations or {}).items()
    ]

    def matrices(weights: PyTree) -> PyTree:
        masks = [mask(weights) for _, mask, _, _ in local]

        def matrix_of(path: tuple, weight: Any, *matches: bool) -> MuonDimensionNumbers | None:
            name = path_of(path)
            for (pattern, _, equation, dims), is_match in zip(local, matches, strict=True):
                if not is_match:
                    continue
                if equation is None:
                    return None
                if len(_letters(equation)[1]) != weight.ndim:
                    raise ConfigError(
                        f"muon_matrices: {equation!r}, for {pattern!r}, has a weight of "
                        f"{len(_letters(equation)[1])} dims, but {name} is {list(weight.shape)}. "
                        "Fix the equation, or the pattern if it should not match this weight."
                    )
                return dims
            return _declared_matrix(name, weight)

        return jax.tree.map_with_path(matrix_of, weights, *masks)

    return matrices


def _declared_matrix(name: str, weight: Any) -> MuonDimensionNumbers | None:
    """Returns the matrix that a weight's layer declares; by default, a weight of two dims."""
    spec = declared_weight(name)
    if weight.ndim < 2:
        return None
    if spec is not None and spec.matrix is not None:
        return MuonDimensionNumbers(*spec.matrix) if any(spec.matrix) else None
    if _ADAMW.fullmatch(name):
        return None
    if weight.ndim == 2:
        return MuonDimensionNumbers((0,), (1,))
    raise ConfigError(
        f"muon_matrices: cannot treat {name}, {list(weight.shape)}, as a matrix. Set in "
        f"`equations` the einsum that uses it, such as {{'{re.escape(name)}': 'hwi,hwio->o'}} "
        "for a convolution, or None for AdamW; or create it with `matrix=` of BaseLayer.weight."
    )


def _letters(equation: str) -> tuple[str, str, str]:
    """Returns the dims of inputs, weight and outputs, as letters."""
    match = re.fullmatch(r"([a-z]+),([a-z]+)->([a-z]+)", re.sub(r"[ .]", "", str(equation)))
    if not match:
        raise ConfigError(
            f"muon_matrices: {equation!r} is not an einsum of inputs and a weight. Expected an "
            "equation such as 'd,dnk->nk', or None for AdamW."
        )
    return match.groups()


def _dims(equation: str) -> MuonDimensionNumbers:
    inputs, weight, outputs = _letters(equation)
    summed = tuple(i for i, dim in enumerate(weight) if dim in inputs and dim not in outputs)
    produced = tuple(i for i, dim in enumerate(weight) if dim in outputs and dim not in inputs)
    unused = set(weight) - set(inputs) - set(outputs)
    if not summed or not produced or unused or len(set(weight)) < len(weight):
        raise ConfigError(
            f"muon_matrices: {equation!r} defines no matrix. The weight needs a dim that it shares "
            "with the inputs and a dim that it shares with the outputs, each dim once."
        )
    return MuonDimensionNumbers(summed, produced)
