"""Selects the weights that Muon treats as matrices; AdamW updates the other weights.

Muon (Keller Jordan 2024) replaces the momentum of a matrix with an approximation of the nearest
orthogonal matrix, computed in five Newton-Schulz steps. The implementation in optax must be told
which dims of each weight form a matrix:

    optimizer=fdl.Partial(
        optax.contrib.muon, consistent_rms=0.2, weight_decay=0.1, adam_b2=0.95,
        muon_weight_dimension_numbers=fdl.Config(muon_matrices),
    )

`consistent_rms=0.2` scales a step to the size of AdamW's, so both optimizers can use AdamW's
learning rate and weight decay (Liu et al. 2025, https://arxiv.org/abs/2502.16982). Without this
setting, a step is scaled by sqrt(max(1, outputs / inputs)), which requires a rate of about 0.02.
The defaults in optax are beta=0.95 with Nesterov momentum, which also applies to the AdamW part,
eps=1e-8 and no weight decay.

A matrix has one slot of the same shape, which takes half the memory that Adam needs. Other weights
have Adam's two slots.
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

# AdamW updates weights with these names if their layers declare nothing.
_ADAMW = re.compile(r"(.*/)?((softmax|logits)/.+|lora_[abm])")


def muon_matrices(
    equations: Mapping[str, str | None] | None = None,
) -> Callable[[PyTree], PyTree]:
    """Returns a function from weights to matrix dims, for optax's `muon_weight_dimension_numbers`.

    Layers declare, for each weight, which dims are summed over in a matmul and which dims become
    outputs. Attention weights are matrices [model dims, all heads]. The query, key and value parts
    of a combined weight, each expert, and each block of a gate are separate matrices. AdamW updates
    embeddings, softmax weights, biases, scales, low-rank adapters and 1D weights. Other 2D weights,
    such as Flax's, are treated as matrices [inputs, outputs].

    Args:
      equations: Maps patterns, matched from the start of a weight's path under params (`re.match`),
        to the einsum in which the weight is used, or to None for AdamW. The first matching pattern
        applies, and overrides the declarations of layers. Dims that are summed over are inputs of
        the matrix, and dims that occur only in the outputs are its outputs. Dims that occur in both
        the inputs and the outputs index separate matrices:

          {"network/.*/w": "hwi,hwio->o",           # a convolution
           ".*/post/w": "nk,nkd->d",                # use_nhd_shape
           ".*/router/w": None}

    Raises:
      ConfigError: A pattern is not a valid regular expression, or an equation defines no matrix.
        When the function is called: a weight has three or more dims but no equation, or its rank
        differs from its equation. The message names the path of the weight.
    """
    local = [
        (pattern, path_mask(include=pattern), equation, equation and _dims(equation))
        for pattern, equation in (equations or {}).items()
    ]

    def matrices(weights: PyTree) -> PyTree:
        # Evaluate the patterns as masks, so that `collected_patterns` sees them.
        masks = [mask(weights) for _, mask, _, _ in local]

        def matrix_of(path: tuple, weight: Any, *matches: bool) -> MuonDimensionNumbers | None:
            name = path_of(path)
            for (pattern, _, equation, dims), is_match in zip(local, matches, strict=True):
                if not is_match:
                    continue
                if equation is None:
                    return None
                if len(_subscripts(equation)[1]) != weight.ndim:
                    raise ConfigError(
                        f"muon_matrices: the equation {equation!r} for {pattern!r} uses a weight "
                        f"with {len(_subscripts(equation)[1])} dims, but {name} has the shape "
                        f"{list(weight.shape)}. Fix the equation, or the pattern if it should not "
                        "match this weight."
                    )
                return dims
            return _declared_matrix(name, weight)

        return jax.tree.map_with_path(matrix_of, weights, *masks)

    return matrices


def _declared_matrix(name: str, weight: Any) -> MuonDimensionNumbers | None:
    """Returns the matrix dims that a layer declares; by default, 2D weights are matrices."""
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
        f"muon_matrices: cannot treat {name} of shape {list(weight.shape)} as a matrix. Add the "
        f"einsum that uses it to `equations`, such as {{'{re.escape(name)}': 'hwi,hwio->o'}} for a "
        "convolution, or None for AdamW. Alternatively, pass `matrix=` to BaseLayer.weight."
    )


def _subscripts(equation: str) -> tuple[str, str, str]:
    """Returns the einsum subscripts for the inputs, the weight and the outputs."""
    match = re.fullmatch(r"([a-z]+),([a-z]+)->([a-z]+)", re.sub(r"[ .]", "", str(equation)))
    if not match:
        raise ConfigError(
            f"muon_matrices: {equation!r} is not an einsum of inputs and a weight. Expected an "
            "equation such as 'd,dnk->nk', or None for AdamW."
        )
    return match[1], match[2], match[3]


def _dims(equation: str) -> MuonDimensionNumbers:
    inputs, weight, outputs = _subscripts(equation)
    summed = tuple(i for i, dim in enumerate(weight) if dim in inputs and dim not in outputs)
    produced = tuple(i for i, dim in enumerate(weight) if dim in outputs and dim not in inputs)
    unused = set(weight) - set(inputs) - set(outputs)
    if not summed or not produced or unused or len(set(weight)) < len(weight):
        raise ConfigError(
            f"muon_matrices: {equation!r} defines no matrix. The weight needs a dim that it shares "
            "with the inputs and a dim that it shares with the outputs, without repeated dims."
        )
    return MuonDimensionNumbers(summed, produced)
