"""Quantization recipes: the rounding of a whole model's products, by a word. Data, to be read.

`task.quantization = "float8"` (of a LanguageModelTask), or `--set task.quantization=float8`, rounds
the products of all dense layers but the one that makes logits, forward and backward. "nf4" and
"int4" keep the weights of these layers in 4 bits (four_bit_weights.py), frozen. A recipe with a
change is a rule in `quantized` (quantization.py), which says what is rounded, and how.
"""

import functools
from collections.abc import Callable, Mapping

from flax import nnx

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.core.learner.learner import Learner
from praxis_lite.core.models.model import Model
from praxis_lite.layers.whole_model.four_bit_weights import forms_in_4_bits
from praxis_lite.layers.whole_model.kept_weights import KeptModel, check_frozen
from praxis_lite.layers.whole_model.quantization import QuantizationRule, quantized

_rule = functools.partial(QuantizationRule, "", but_logits=True)
# float8 as in arXiv:2209.05433: more digits forward, a wider range backward.
_float8 = functools.partial(_rule, "float8_e4m3fn", "float8_e5m2")

# By recipe, for `task.quantization`; a str is the type in which weights are kept.
QUANTIZATION_RECIPES: Mapping[str, QuantizationRule | str] = {
    # A scale for each output channel and each token; the most exact.
    "int8": _rule("int8", "int8"),
    "float8": _float8(),
    # A scale for each weight, and for all tokens of a product: fewer operations, and coarser.
    "int8_per_tensor": _rule("int8", "int8", scales="tensor"),
    "float8_per_tensor": _float8(scales="tensor"),
    # Frozen weights are kept in 4 bits, under adapters (QLoRA, arXiv:2305.14314).
    "nf4": "nf4",
    "int4": "int4",
}


def with_recipe(
    model: Model | Callable[..., nnx.Module], recipe: str | None, learner: Learner
) -> Model | Callable[..., nnx.Module]:
    """Returns a task's model with its products rounded by a recipe; None: as it is.

    Args:
      learner: of the task; it may not train weights that are kept in 4 bits.

    Raises:
      ConfigError: no recipe has that name, the model is not made of this library's layers, or the
        learner trains what is kept in 4 bits.
    """
    if recipe is None:
        return model
    require_choice("task.quantization", recipe, QUANTIZATION_RECIPES)
    if isinstance(model, Model):
        raise ConfigError(
            f"task.quantization is {recipe!r}, but the model is a {type(model).__name__}; products "
            "are replaced in dense layers of praxis_lite alone. Leave it out."
        )
    rule = QUANTIZATION_RECIPES[recipe]
    if isinstance(rule, QuantizationRule):
        return functools.partial(quantized, model=model, rules=(rule,))
    kept = KeptModel(model, functools.partial(forms_in_4_bits, qtype=rule))
    check_frozen(kept, learner)
    return kept
