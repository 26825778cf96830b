"""Weights that a state keeps in another form than their layers declare, such as in 4 bits."""

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

# From a weight to the tree of arrays that is kept of it, each of the weight's rank. Stacked dims go
# in front.
Pack = Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class PackedForm:
    """The form in which a state keeps a weight.

    Attributes:
      keep: makes it of the weight.
      spec: of the weight, as its layer declares it.
    """

    keep: Pack
    spec: WeightSpec

    @functools.cached_property
    def _abstract(self) -> Any:
        return jax.eval_shape(self.keep, jax.ShapeDtypeStruct(self.spec.shape, self.spec.dtype))

    @functools.cached_property
    def parts(self) -> dict[str, WeightSpec]:
        """The arrays by name, each split as the weight."""
        return {
            name: dataclasses.replace(self.spec, shape=x.shape, dtype=x.dtype)
            for name, x in leaves_with_path(self._abstract)
        }

    def kept(self, weight: jax.Array) -> dict[str, jax.Array]:
        """Returns the arrays that are kept of a weight."""
        return dict(leaves_with_path(self.keep(weight)))

    def of_parts(self, parts: Mapping[str, Any]) -> Any:
        """Returns the tree that `keep` makes, of its arrays."""
        leaves = [parts[name] for name in self.parts]
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)


class PackedModel(NnxModel):
    """An NNX module some of whose weights are kept in another form, which no learner trains.

    The state has a dict of arrays in the place of such a weight; the layer that reads it gets what
    the form makes of it, a `StoredWeight`.

    Args:
      build: as of NnxModel.
      forms: called with the module, its weights abstract, returns forms by path, "params/ffn/w".
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
        return {path: PackedForm(keep, spec_of[path]) for path, keep in forms.items()}

    def init(self, key: jax.Array) -> MdlVars:
        return self._in_parts(super().init(key), lambda form, weight: form.kept(weight))

    def weight_specs(self) -> MdlVars:
        return self._in_parts(super().weight_specs(), lambda form, spec: form.parts)

    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> nnx.Module:
        flat = traverse_util.flatten_dict(mdl_vars)
        for path, form in self.packed_forms.items():
            keys = tuple(path.split("/"))
            # A block of a device is gathered here, and in this form.
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
    """Checks that a learner trains no weight that is kept in another form.

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
            f"Learner: {few(sorted(trained))} would be trained, kept as "
            f"{specs[sorted(trained)[0]].dtype}, which has no gradient. Freeze what is kept in 4 "
            "bits: bprop_variable_inclusion names what is trained, such as '.*/lora_[abm]', "
            "bprop_variable_exclusion what is not."
        )
