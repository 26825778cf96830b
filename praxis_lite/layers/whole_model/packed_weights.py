"""Models whose train state stores some weights in a packed format, such as 4 bits."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx, traverse_util

from praxis_lite.core.errors import ConfigError, first_few
from praxis_lite.core.learner.learner import Learner
from praxis_lite.core.models.model import MdlVars, gather_sharded, spec_leaves
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.weight_spec import WeightSpec, spec_items

# Takes a weight, and returns the tree of arrays to store. The arrays have the weight's rank, with
# stacked dims first.
Pack = Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class PackedForm:
    """The format in which a train state stores a weight.

    Attributes:
      pack: Computes the stored arrays from the weight.
      spec: The weight's declaration in its layer.
    """

    pack: Pack
    spec: WeightSpec

    @functools.cached_property
    def _abstract(self) -> Any:
        return jax.eval_shape(self.pack, jax.ShapeDtypeStruct(self.spec.shape, self.spec.dtype))

    @functools.cached_property
    def parts(self) -> dict[str, WeightSpec]:
        """Specs of the stored arrays, keyed by name; each array is sharded like the weight."""
        return {
            name: dataclasses.replace(self.spec, shape=x.shape, dtype=x.dtype)
            for name, x in leaves_with_path(self._abstract)
        }

    def to_parts(self, weight: jax.Array) -> dict[str, jax.Array]:
        """Returns the arrays to store for a weight, keyed by name."""
        return dict(leaves_with_path(self.pack(weight)))

    def from_parts(self, parts: Mapping[str, Any]) -> Any:
        """Rebuilds the result of `pack` from the stored arrays."""
        leaves = [parts[name] for name in self.parts]
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)


class PackedModel(NnxModel):
    """An NNX module in which some weights are packed and cannot be trained.

    In the state, such a weight is a dict of arrays. Its layer receives a `StoredWeight`.

    Args:
      build: See NnxModel.
      forms: Takes the module with abstract weights, and returns functions that pack weights,
        keyed by path, such as "params/ffn/w".
    """

    def __init__(
        self, build: Callable[..., nnx.Module], forms: Callable[[nnx.Module], Mapping[str, Pack]]
    ):
        super().__init__(build)
        self._forms = forms

    @functools.cached_property
    def packed_forms(self) -> Mapping[str, PackedForm]:  # type: ignore[override]  # Computed late.
        spec_of = dict(spec_leaves(super().weight_specs()))
        forms = self._forms(self.abstract_module())
        return {path: PackedForm(pack, spec_of[path]) for path, pack in forms.items()}

    def init(self, key: jax.Array) -> MdlVars:
        return self._replace_packed(super().init(key), lambda form, weight: form.to_parts(weight))

    def weight_specs(self) -> MdlVars:
        return self._replace_packed(super().weight_specs(), lambda form, spec: form.parts)

    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> nnx.Module:
        flat = traverse_util.flatten_dict(mdl_vars)
        for path, form in self.packed_forms.items():
            keys = tuple(path.split("/"))
            # Gather here, while a device's block is still packed.
            parts = {name: gather_sharded(flat.pop((*keys, name))) for name in form.parts}
            flat[keys] = form.from_parts(parts)
        return super().module(traverse_util.unflatten_dict(flat), key, eval_key)

    def _replace_packed(
        self, mdl_vars: MdlVars, parts_of: Callable[[PackedForm, Any], Mapping[str, Any]]
    ) -> MdlVars:
        flat = traverse_util.flatten_dict(mdl_vars)
        for path, form in self.packed_forms.items():
            keys = tuple(path.split("/"))
            for name, part in parts_of(form, flat.pop(keys)).items():
                flat[(*keys, name)] = part
        return {"params": {}, "non_trainable": {}} | traverse_util.unflatten_dict(flat)


def check_frozen(model: PackedModel, learner: Learner) -> None:
    """Checks that a learner does not train packed weights.

    Raises:
      ConfigError: The learner trains a packed weight. The message names the weights, and the
        settings that freeze them.
    """
    specs = {"/".join(path): spec for path, spec in spec_items(model.weight_specs()["params"])}
    packed = {
        f"{path.removeprefix('params/')}/{name}"
        for path, form in model.packed_forms.items()
        for name in form.parts
    }
    trained = [
        path
        for group in learner.bind(model.weight_specs()["params"]).groups.by_name.values()
        for path in map("/".join, group.paths)
        if path in packed
    ]
    if trained:
        raise ConfigError(
            f"Learner: {first_few(sorted(trained))} would be trained, but weights that are stored "
            f"as {specs[sorted(trained)[0]].dtype} have no gradient. Freeze the 4-bit weights: set "
            "bprop_variable_inclusion to the weights to train, such as '.*/lora_[abm]', or "
            "bprop_variable_exclusion to the weights to freeze."
        )
