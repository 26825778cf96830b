"""A Pax model's variables as this library's weights, scanned or not, and back.

Our layers' names are Pax's (but for RENAMES in `pax_paths`), and so are the shapes and meanings of
their weights; what differs is how a stack of layers is stored, what pads an array, and where the
model stands in its task.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError, did_you_mean, shown
from praxis_lite.core.models.model import MdlVars, spec_leaves
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.weight_spec import WeightSpec
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.tools.pax.paths import Place, flat_pax_vars, names_in_pax, place_of

Name = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A variable of ours: its path with the collection in front, and its counterpart in Pax."""

    path: str
    spec: WeightSpec
    pax_path: str
    place: Place

    @property
    def own_shape(self) -> tuple[int, ...]:
        return self.spec.shape[len(self.spec.stack_shape) :]

    def layers(self, per_block: Mapping[str, int]) -> list[int]:
        """Returns the layers that the array holds, in its order."""
        count = math.prod(self.spec.stack_shape)
        first, step = self.place.block * count, per_block[self.place.stack]
        return [(first + i) * step + self.place.inner for i in range(count)]


def mdl_vars_from_pax(
    model: NnxModel,
    pax_vars: Mapping[str, Any],
    *,
    ignore: Sequence[str] = (),
    new: Sequence[str] = (),
    key: jax.Array | None = None,
) -> MdlVars:
    """Returns `{"params": ..., "non_trainable": ...}` of NumPy arrays, not padded.

    A stack may be unrolled, scanned or pipelined on either side. What Pax padded is cut off.

    Args:
      model: whose weights are wanted.
      pax_vars: arrays by Pax's path, such as `read_pax_checkpoint` gives: nested mappings, or
        paths "params/lm/softmax/..." or "mdl_vars.params.lm.softmax...". Names in front that all
        have and that the model does not know, such as "lm", are left out.
      ignore: patterns (`*` is any text) of Pax's paths below the collection that are not wanted.
      new: patterns of the model's paths below the collection that Pax has nothing for, such as
        "*/lora_?"; they are drawn by the model's `init` with `key` (default: of seed 0).

    Raises:
      ConfigError: variables are left over or missing, or have another shape, or what would be cut
        off is not zeros; it lists them all.
    """
    all_leaves = list(_leaves(model))
    leaves = [leaf for leaf in all_leaves if not _is_any(leaf.path.partition("/")[2], new)]
    result = flat_pax_vars(pax_vars)
    result = {path: array for path, array in result.items() if not _is_any(path, ignore)}
    result = _below_the_model(result, {_first_name(leaf.pax_path) for leaf in leaves})
    layers = _PaxLayers(leaves, result)
    layers.check_names()
    arrays = {leaf.path: layers.array_of(leaf) for leaf in leaves}
    layers.check_shapes()
    if len(leaves) < len(all_leaves):
        drawn = jax.device_get(jax.jit(model.init)(jax.random.key(0) if key is None else key))
        arrays = flatten_dict(drawn, sep="/") | arrays
    return {"params": {}, "non_trainable": {}, **unflatten_dict(arrays, sep="/")}


class FromPax:
    """The initial state that a checkpoint of Pax gives: all weights, those in `new` drawn.

    Args:
      variables: as `read_pax_checkpoint` returns them.
      ignore, new: see `mdl_vars_from_pax`.
      seed: of what is new.
    """

    step = 0

    def __init__(
        self, variables: Mapping[str, Any], partitioner: Partitioner, *,
        ignore: Sequence[str] = (), new: Sequence[str] = (), seed: int = 0,
    ):
        self._variables, self._model = variables, partitioner.task.model
        self._layout = partitioner.layout.select("mdl_vars")
        self._settings = {"ignore": ignore, "new": new, "key": jax.random.key(seed)}
        self.paths = [f"mdl_vars/{leaf.path}" for leaf in self._layout.leaves()]

    def keep(self, files: JobDir) -> None:
        """Nothing of Pax is needed later on."""

    def read(self, mesh: Mesh, note: Callable[[str], None]) -> dict[str, jax.Array]:
        """Returns the weights.

        Raises:
          ConfigError: the variables do not fit the model.
        """
        mdl_vars = mdl_vars_from_pax(self._model, self._variables, **self._settings)
        place = jax.jit(self._layout.pad, out_shardings=self._layout.shardings(mesh))
        return dict(zip(self.paths, jax.tree.leaves(place(mdl_vars)), strict=True))


def pax_vars_from_mdl_vars(model: NnxModel, mdl_vars: MdlVars) -> dict[str, np.ndarray]:
    """Returns arrays by Pax's path, collection first: "params/softmax/logits_ffn/linear/w".

    Stacks stay as they are: unrolled ones are `x_layers_i`, stacked ones `repeat/sub/x_layers_j`
    with one leading dim.
    """
    leaves = list(_leaves(model))
    per_block, arrays = _per_block(leaf.place for leaf in leaves), flatten_dict(mdl_vars, sep="/")
    result: dict[str, np.ndarray] = {}
    for leaf in leaves:
        array = np.asarray(arrays[leaf.path])
        collection, place = leaf.path.split("/")[0], leaf.place
        names = [collection, leaf.pax_path]
        if place != Place(leaf.pax_path):
            layer = leaf.layers(per_block)[0]
            if place.has_dims:
                levels = ["repeat", "sub", f"x_layers_{place.inner}"]
                array = array.reshape(-1, *leaf.own_shape)
            else:
                levels = [f"x_layers_{layer}"]
            names = [collection, place.stack, *levels, place.rest]
        result["/".join(filter(None, names))] = array
    return result


def _is_any(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _leaves(model: NnxModel) -> Iterator[_Leaf]:
    specs = spec_leaves(model.weight_specs())
    module = model.abstract_module()
    own_paths = {path: _keys(path) for path, _ in specs}
    named = names_in_pax(module, own_paths.values())
    for path, spec in specs:
        pax_path = named[own_paths[path]]
        yield _Leaf(path, spec, pax_path, place_of(pax_path))


def _keys(path: str) -> tuple:
    """Returns a path below its collection as the module's graph has it: a list's keys are ints."""
    return tuple(int(name) if name.isdigit() else name for name in path.split("/")[1:])


def _per_block(places: Iterable[Place]) -> dict[str, int]:
    """Returns how many layers a block of each stack has."""
    counts: dict[str, int] = {}
    for place in places:
        counts[place.stack] = max(counts.get(place.stack, 1), 1 + place.inner)
    return counts


def _below_the_model(arrays: dict[str, Any], first_names: set[str]) -> dict[str, Any]:
    """Returns the variables without names in front that all of them have: "lm" of a task's."""
    while arrays:
        firsts = {_first_name(path) for path in arrays}
        if len(firsts) > 1 or firsts & first_names or "" in firsts:
            break
        arrays = {path.partition("/")[2]: array for path, array in arrays.items()}
    return arrays


def _first_name(path: str) -> str:
    """Returns the name of the layer that has it; "" if that is the model itself, or its stack."""
    place = place_of(path)
    owner = place.stack if place.rest else place.stack.rpartition("/")[0]
    return owner.split("/")[0]


class _PaxLayers:
    """A Pax checkpoint's arrays for each layer of each of our variables."""

    def __init__(self, leaves: list[_Leaf], found: dict[str, Any]):
        self.leaves, self.found = leaves, found
        self.per_block = _per_block(leaf.place for leaf in leaves)
        self.own_shapes: dict[Name, tuple[int, ...]] = {
            leaf.place.name: leaf.own_shape for leaf in leaves
        }
        places = {path: place_of(path) for path in found}
        pax_per_block = _per_block(places.values())
        self.errors: list[str] = []
        self.cut: dict[str, np.ndarray] = {}
        # (stack, rest, layer) -> the path that has it, and where in it.
        self.found_in: dict[tuple[str, str, int], tuple[str, int]] = {}
        for path, place in places.items():
            for i in range(self._count(path, place)):
                layer = i * pax_per_block[place.stack] + place.inner
                self.found_in[*place.name, layer] = path, i

    def _count(self, path: str, place: Place) -> int:
        """Returns how many layers an array of Pax's has; 0 if its rank is wrong, which is noted."""
        if place.name not in self.own_shapes:
            return 1  # Left over, whatever it is.
        own_shape, shape = self.own_shapes[place.name], tuple(np.shape(self.found[path]))
        lead = len(shape) - len(own_shape)
        if lead < 0 or (lead and not place.has_dims):
            self.errors.append(f"{path} has shape {shape} in Pax, {own_shape} in the model")
            return 0
        return math.prod(shape[:lead])

    def check_names(self) -> None:
        self.check_shapes()
        expected: dict[tuple[str, str, int], str] = {}
        for leaf in self.leaves:
            for layer in leaf.layers(self.per_block):
                expected[*leaf.place.name, layer] = leaf.path
        missing = _by_path({key: expected[key] for key in expected.keys() - self.found_in.keys()})
        over = {key: self.found_in[key][0] for key in self.found_in.keys() - expected.keys()}
        left_over = _by_path(over)
        if missing or left_over:
            lines = [
                f"{shown(path, 300)}{layers} is missing from Pax's variables."
                f"{did_you_mean(path.partition('/')[2], left_over)}"
                for path, layers in missing.items()
            ]
            lines += [
                f"{shown(path, 300)}{layers} is left over: the model has no such weight."
                for path, layers in left_over.items()
            ]
            raise ConfigError(
                f"{len(missing)} of the model's variables are missing and {len(left_over)} of "
                f"Pax's are left over: {' '.join(lines)} Build the model with the settings of the "
                "Pax model, or name what is not wanted in `ignore`."
            )

    def check_shapes(self) -> None:
        if self.errors:
            raise ConfigError(
                f"Pax's variables do not fit the model: {'; '.join(self.errors)}. Build the model "
                "with the settings of the Pax model."
            )

    def array_of(self, leaf: _Leaf) -> np.ndarray:
        """Returns a variable gathered from Pax's; zeros if a shape is wrong, which is noted."""
        parts = [self.found_in[*leaf.place.name, layer] for layer in leaf.layers(self.per_block)]
        paths = {path for path, _ in parts}
        whole = {path: self._true(path, leaf.own_shape) for path in paths}
        if any(array is None for array in whole.values()):
            return np.zeros(leaf.spec.shape, leaf.spec.dtype)
        if len(paths) == 1 and [i for _, i in parts] == list(range(len(whole[parts[0][0]]))):
            array = whole[parts[0][0]]
        else:
            array = np.stack([whole[path][i] for path, i in parts])
        return array.reshape(leaf.spec.shape).astype(leaf.spec.dtype, copy=False)

    def _true(self, path: str, own_shape: tuple[int, ...]) -> np.ndarray | None:
        """Returns Pax's array as [layers, *own_shape], with its padding cut off."""
        if path in self.cut:
            return self.cut[path]
        array = np.asarray(self.found[path])
        lead = array.ndim - len(own_shape)
        shape = array.shape[lead:]
        array = array.reshape(-1, *shape)
        true = array[(slice(None), *map(slice, own_shape))]
        if true.shape[1:] != tuple(own_shape):
            self.errors.append(f"{path} has shape {shape} in Pax, {own_shape} in the model")
            return None
        # Pax pads with zeros, and keeps them; anything else is part of another shape.
        if np.count_nonzero(array) != np.count_nonzero(true):
            self.errors.append(
                f"{path} has shape {shape} in Pax, {own_shape} in the model, and what would be "
                "cut off is not padding: it is not zero"
            )
            return None
        if lead:
            self.cut[path] = true  # An unrolled model asks for it once a layer.
        return true


def _by_path(paths: Mapping[tuple[str, str, int], str]) -> dict[str, str]:
    """Returns the paths, each with the layers that it is about, in order."""
    layers: dict[str, list[int]] = {}
    for (_, rest, layer), path in paths.items():
        layers.setdefault(path, []).append(layer)
        if not rest:
            layers[path].clear()
    return {
        path: f" (layers {', '.join(map(str, sorted(layers[path])))})" if layers[path] else ""
        for path in sorted(layers)
    }
