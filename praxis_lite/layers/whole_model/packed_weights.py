"""Weights that a state stores in another form than their layers declare, such as in 4 bits."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx, traverse_util

from praxis_lite.core.errors import ConfigError, few
from praxis_lite.core.learner.learner import Learner
from praxis_lite.core.models.model import MdlVars, spec_leaves, whole
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.weight_spec import WeightSpec, spec_items

# weight -> tree of arrays to store, each of the weight's rank. Stacked dims come first.
Pack = Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class PackedForm:
    """The form in which a state stores a weight.

    Attributes:
      pack: computes it from the weight.
      spec: of the weight, as declared by its layer.
    """

    pack: Pack
    spec: WeightSpec

    @functools.cached_property
    def _abstract(self) -> Any:
        return jax.eval_shape(self.pack, jax.ShapeDtypeStruct(self.spec.shape, self.spec.dtype))

    @functools.cached_property
    def parts(self) -> dict[str, WeightSpec]:
        """The arrays by name, each split as the weight."""
        return {
            name: dataclasses.replace(self.spec, shape=x.shape, dtype=x.dtype)
            for name, x in leaves_with_path(self._abstract)
        }

    def packed(self, weight: jax.Array) -> dict[str, jax.Array]:
        """Returns the arrays to store for a weight."""
        return dict(leaves_with_path(self.pack(weight)))

    def of_parts(self, parts: Mapping[str, Any]) -> Any:
        """Returns the result of `pack`, given its arrays."""
        leaves = [parts[name] for name in self.parts]
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)


class PackedModel(NnxModel):
    """An NNX module with some weights stored in another form, which cannot be trained.

    The state has a dict of arrays in place of such a weight; its layer gets a `StoredWeight`.

    Args:
      build: as of NnxModel.
      forms: from the module, with abstract weights, to packing functions by path, "params/ffn/w".
    """

    def __init__(
        self, build: Callable[..., nnx.Module], forms: Callable[[nnx.Module], Mapping[str, Pack]]
    ):
        super().__init__(build)
        self._forms = forms

    @functools.cached_property
    def packed_forms(self) -> Mapping[str, PackedForm]:
        spec_of = dict(spec_leaves(super().weight_specs()))
        forms = self._forms(self.abstract_module())
        return {path: PackedForm(pack, spec_of[path]) for path, pack in forms.items()}

    def init(self, key: jax.Array) -> MdlVars:
        return self._in_parts(super().init(key), lambda form, weight: form.packed(weight))

    def weight_specs(self) -> MdlVars:
        return self._in_parts(super().weight_specs(), lambda form, spec: form.parts)

    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> nnx.Module:
        flat = traverse_util.flatten_dict(mdl_vars)
        for path, form in self.packed_forms.items():
            keys = tuple(path.split("/"))
            # Gather a device's block here, in the packed form.
            parts = {name: whole(flat.pop((*keys, name))) for name in form.parts}
            flat[keys] = form.of_parts(parts)
        return super().module(traverse_util.unflatten_dict(flat), key, eval_key)

    def _in_parts(
        self, mdl_vars: MdlVars, parts_of: Callable[[PackedForm, Any], Mapping[str, Any]]
    ) -> MdlVars:
        flat = traverse_util.flatten_dict(mdl_vars)
        for path, form in self.packed_forms.items():
            keys = tuple(path.split("/"))
            for name, part in parts_of(form, flat.pop(keys)).items():
                flat[(*keys, name)] = part
        return {"params": {}, "non_trainable": {}} | traverse_util.unflatten_dict(flat)


def check_frozen(model: PackedModel, learner: Learner) -> None:
    """Checks that a learner trains no packed weight.

    Raises:
      ConfigError: it would; names the weights and the settings that freeze them.
    """
    specs = {"/".join(path): spec for path, spec in spec_items(model.weight_specs()["params"])}
    kept = {
        f"{path.removeprefix('params/')}/{name}" for path, form in model.packed_forms.items()
        for name in form.parts
    }
    trained = [
        path for group in learner.bind(model.weight_specs()["params"]).groups.by_name.values()
        for path in map("/".join, group.paths) if path in kept
    ]
    if trained:
        raise ConfigError(
            f"Learner: {few(sorted(trained))} would be trained, but is stored as "
            f"{specs[sorted(trained)[0]].dtype}, which has no gradient. Freeze weights in 4 "
            "bits: bprop_variable_inclusion names what is trained, such as '.*/lora_[abm]', "
            "bprop_variable_exclusion what is not."
        )
