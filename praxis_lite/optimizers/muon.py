"""Which weights are matrices, for Muon; AdamW has the rest.

Muon (Keller Jordan 2024) replaces the momentum of a matrix by the nearest orthogonal one, about, by
five Newton-Schulz steps. optax has it, and asks how each weight is a matrix:

    optimizer=fdl.Partial(
        optax.contrib.muon, consistent_rms=0.2, weight_decay=0.1, adam_b2=0.95,
        muon_weight_dimension_numbers=fdl.Config(muon_matrices),
    )

`consistent_rms=0.2` scales a step to the size of AdamW's, so that both take AdamW's learning rate
and weight decay (Liu et al. 2025, https://arxiv.org/abs/2502.16982); without it a step is scaled by
sqrt(max(1, outputs / inputs)) and wants a rate of about 0.02. optax's defaults: beta 0.95 with
Nesterov, which its AdamW then uses too, eps 1e-8, no weight decay.

Slots: of a matrix one of its shape, half of Adam's; of the others Adam's two.
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

# Weights with these in their paths are AdamW's where their layers do not say what they are.
_ADAMW = re.compile(r"(.*/)?((softmax|logits)/.+|lora_[abm])")


def muon_matrices(
    equations: Mapping[str, str | None] | None = None,
) -> Callable[[PyTree], PyTree]:
    """Returns optax's `muon_weight_dimension_numbers`: a function from weights to their matrices.

    A layer says with each weight which of its dims a product sums over and which it gives to the
    outputs: weights of attentions are matrices of model dims by all heads; each of a combined
    query, key and value, each expert, each block of a gate is a matrix of its own. Embeddings,
    softmaxes, biases, scales, low-rank adapters and weights of one dim are AdamW's. Other weights
    of two dims, such as Flax's, are matrices of inputs by outputs.

    Args:
      equations: patterns, matched from the start of a weight's path under params (`re.match`), to
        the einsum that the weight is used in, or to None for AdamW; before what the layers say, and
        the first that matches counts. A dim that is summed over is the matrix's input, one of the
        outputs alone its output; one of both numbers matrices:

          {"network/.*/w": "hwi,hwio->o",           # a convolution
           ".*/post/w": "nk,nkd->d",                # use_nhd_shape
           ".*/router/w": None}

    Raises:
      ConfigError: a pattern is not a regular expression, or an equation makes no matrix. Later, on
        a weight: one of three dims or more has no equation, or an equation of another number of
        dims; names the path.
    """
    local = [
        (pattern, path_mask(include=pattern), equation, equation and _dims(equation))
        for pattern, equation in (equations or {}).items()
    ]

    def matrices(weights: PyTree) -> PyTree:
        masks = [mask(weights) for _, mask, _, _ in local]

        def matrix(path: tuple, weight: Any, *matches: bool) -> MuonDimensionNumbers | None:
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

        return jax.tree.map_with_path(matrix, weights, *masks)

    return matrices


def _declared_matrix(name: str, weight: Any) -> MuonDimensionNumbers | None:
    """Returns the matrix that a weight's layer declares; else, of two dims, the weight itself."""
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
        f"muon_matrices: how {name}, {list(weight.shape)}, is a matrix is not known. Say in "
        f"`equations` which einsum it is used in, such as {{'{re.escape(name)}': 'hwi,hwio->o'}} "
        "for a convolution, or None for AdamW; or make it with `matrix=` of BaseLayer.weight."
    )


def _letters(equation: str) -> tuple[str, str, str]:
    """Returns the letters of inputs, weight and outputs."""
    result = re.fullmatch(r"([a-z]+),([a-z]+)->([a-z]+)", re.sub(r"[ .]", "", str(equation)))
    if not result:
        raise ConfigError(
            f"muon_matrices: {equation!r} is not an einsum of inputs and a weight, such as "
            "'d,dnk->nk'. Write one, or None for AdamW."
        )
    return result.groups()


def _dims(equation: str) -> MuonDimensionNumbers:
    inputs, weight, outputs = _letters(equation)
    summed = tuple(i for i, dim in enumerate(weight) if dim in inputs and dim not in outputs)
    result = tuple(i for i, dim in enumerate(weight) if dim in outputs and dim not in inputs)
    unused = set(weight) - set(inputs) - set(outputs)
    if not summed or not result or unused or len(set(weight)) < len(weight):
        raise ConfigError(
            f"muon_matrices: {equation!r} makes no matrix of the weight. It needs a dim that the "
            "inputs share with it, a dim that the outputs share with it, and each dim once."
        )
    return MuonDimensionNumbers(summed, result)
