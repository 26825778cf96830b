"""Converts a Pax model's variables to weights of our models, scanned or not, and back.

Our layers have Pax's names (except RENAMES in `paths`), shapes and meanings of weights. The
differences are the form of stacks of layers, padding, and the model's prefix in its task.
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

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.models.model import MdlVars, spec_leaves
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.weight_spec import WeightSpec
from praxis_lite.job.job_dir import JobDir
from praxis_lite.pax.paths import StackPath, flat_pax_vars, names_in_pax, stack_path

Name = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A variable of ours: its path including the collection, and its path in Pax."""

    path: str
    spec: WeightSpec
    pax_path: str
    split: StackPath

    @property
    def own_shape(self) -> tuple[int, ...]:
        return self.spec.shape[len(self.spec.stack_shape) :]

    def layers(self, per_block: Mapping[str, int]) -> list[int]:
        """Returns the numbers of the array's layers, in its order."""
        count = math.prod(self.spec.stack_shape)
        first, step = self.split.block * count, per_block[self.split.stack]
        return [(first + i) * step + self.split.inner for i in range(count)]


def mdl_vars_from_pax(
    model: NnxModel,
    pax_vars: Mapping[str, Any],
    *,
    ignore: Sequence[str] = (),
    new: Sequence[str] = (),
    key: jax.Array | None = None,
) -> MdlVars:
    """Returns `{"params": ..., "non_trainable": ...}` of NumPy arrays, not padded.

    A stack may be unrolled, scanned or pipelined on either side. Padding is removed.

    Args:
      model: the model that gets the weights.
      pax_vars: arrays by Pax's path, for example from `read_pax_checkpoint`: nested mappings, or
        paths "params/lm/softmax/..." or "mdl_vars.params.lm.softmax...". A common prefix that the
        model lacks, such as "lm", is removed.
      ignore: patterns (`*` is any text) of Pax's paths below the collection to leave out.
      new: patterns of the model's paths below the collection that Pax lacks, such as "*/lora_?";
        the model's `init` draws them with `key` (default: of seed 0).

    Raises:
      ConfigError: variables are left over or missing, have another shape, or have padding that is
        not zero; lists them all.
    """
    all_leaves = list(_leaves(model))
    leaves = [leaf for leaf in all_leaves if not _is_any(leaf.path.partition("/")[2], new)]
    pax_arrays = {
        path: array for path, array in flat_pax_vars(pax_vars).items() if not _is_any(path, ignore)
    }
    pax_arrays = _without_prefix(pax_arrays, {_first_name(leaf.pax_path) for leaf in leaves})
    layers = _PaxLayers(leaves, pax_arrays)
    layers.check_names()
    arrays = {leaf.path: layers.array_of(leaf) for leaf in leaves}
    layers.check_shapes()
    if len(leaves) < len(all_leaves):
        drawn = jax.device_get(jax.jit(model.init)(jax.random.key(0) if key is None else key))
        arrays = flatten_dict(drawn, sep="/") | arrays
    return {"params": {}, "non_trainable": {}, **unflatten_dict(arrays, sep="/")}


class FromPax:
    """The initial state from a Pax checkpoint: all weights; those in `new` are drawn.

    Args:
      variables: from `read_pax_checkpoint`.
      ignore, new: see `mdl_vars_from_pax`.
      seed: of new weights.
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
        """The job needs no files of Pax later."""

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

    Unrolled stacks become `x_layers_i`, and stacked ones `repeat/sub/x_layers_j` with one leading
    dim.
    """
    leaves = list(_leaves(model))
    per_block, arrays = _per_block(leaf.split for leaf in leaves), flatten_dict(mdl_vars, sep="/")
    result: dict[str, np.ndarray] = {}
    for leaf in leaves:
        array = np.asarray(arrays[leaf.path])
        collection, split = leaf.path.split("/")[0], leaf.split
        names = [collection, leaf.pax_path]
        if split != StackPath(leaf.pax_path):
            if split.is_stacked:
                levels = ["repeat", "sub", f"x_layers_{split.inner}"]
                array = array.reshape(-1, *leaf.own_shape)
            else:
                levels = [f"x_layers_{leaf.layers(per_block)[0]}"]
            names = [collection, split.stack, *levels, split.rest]
        result["/".join(filter(None, names))] = array
    return result


def _is_any(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _leaves(model: NnxModel) -> Iterator[_Leaf]:
    specs = spec_leaves(model.weight_specs())
    module = model.abstract_module()
    # A list's keys are ints in the module's graph.
    own_paths = {
        path: tuple(int(name) if name.isdigit() else name for name in path.split("/")[1:])
        for path, _ in specs
    }
    named = names_in_pax(module, own_paths.values())
    for path, spec in specs:
        pax_path = named[own_paths[path]]
        yield _Leaf(path, spec, pax_path, stack_path(pax_path))


def _per_block(paths: Iterable[StackPath]) -> dict[str, int]:
    """Returns the number of layers per block of each stack."""
    counts: dict[str, int] = {}
    for path in paths:
        counts[path.stack] = max(counts.get(path.stack, 1), 1 + path.inner)
    return counts


def _without_prefix(arrays: dict[str, Any], first_names: set[str]) -> dict[str, Any]:
    """Removes the common prefix of all paths that the model lacks, such as a task's "lm"."""
    while arrays:
        firsts = {_first_name(path) for path in arrays}
        if len(firsts) > 1 or firsts & first_names or "" in firsts:
            break
        arrays = {path.partition("/")[2]: array for path, array in arrays.items()}
    return arrays


def _first_name(path: str) -> str:
    """Returns the first name of the layer's path; "" for the model itself or its stack."""
    split = stack_path(path)
    owner = split.stack if split.rest else split.stack.rpartition("/")[0]
    return owner.split("/")[0]


class _PaxLayers:
    """The arrays of a Pax checkpoint, by layer of our variables; collects errors."""

    def __init__(self, leaves: list[_Leaf], pax_arrays: dict[str, Any]):
        self.leaves, self.pax_arrays = leaves, pax_arrays
        self.per_block = _per_block(leaf.split for leaf in leaves)
        self.own_shapes: dict[Name, tuple[int, ...]] = {
            leaf.split.name: leaf.own_shape for leaf in leaves
        }
        splits = {path: stack_path(path) for path in pax_arrays}
        pax_per_block = _per_block(splits.values())
        self.errors: list[str] = []
        self.unpadded: dict[str, np.ndarray] = {}
        # (stack, rest, layer) -> Pax's path, and the index in its array.
        self.found_in: dict[tuple[str, str, int], tuple[str, int]] = {}
        for path, split in splits.items():
            for i in range(self._num_layers(path, split)):
                layer = i * pax_per_block[split.stack] + split.inner
                self.found_in[*split.name, layer] = path, i

    def _num_layers(self, path: str, split: StackPath) -> int:
        """Returns the number of layers of a Pax array; 0, and an error, if its rank is wrong."""
        if split.name not in self.own_shapes:
            return 1  # Left over.
        own_shape, shape = self.own_shapes[split.name], tuple(np.shape(self.pax_arrays[path]))
        lead = len(shape) - len(own_shape)
        if lead < 0 or (lead and not split.is_stacked):
            self.errors.append(f"{path} has shape {shape} in Pax, {own_shape} in the model")
            return 0
        return math.prod(shape[:lead])

    def check_names(self) -> None:
        self.check_shapes()
        expected: dict[tuple[str, str, int], str] = {}
        for leaf in self.leaves:
            for layer in leaf.layers(self.per_block):
                expected[*leaf.split.name, layer] = leaf.path
        missing = _by_path({key: expected[key] for key in expected.keys() - self.found_in.keys()})
        over = {key: self.found_in[key][0] for key in self.found_in.keys() - expected.keys()}
        left_over = _by_path(over)
        if missing or left_over:
            lines = [
                f"{path}{layers} is missing from Pax's variables."
                f"{did_you_mean(path.partition('/')[2], left_over)}"
                for path, layers in missing.items()
            ]
            lines += [
                f"{path}{layers} is left over: the model has no such weight."
                for path, layers in left_over.items()
            ]
            raise ConfigError(
                f"{len(missing)} of the model's variables are missing and {len(left_over)} of "
                f"Pax's are left over: {' '.join(lines)} Build the model with the settings of the "
                "Pax model, or name the variables to leave out in `ignore`."
            )

    def check_shapes(self) -> None:
        if self.errors:
            raise ConfigError(
                f"Pax's variables do not fit the model: {'; '.join(self.errors)}. Build the model "
                "with the settings of the Pax model."
            )

    def array_of(self, leaf: _Leaf) -> np.ndarray:
        """Returns a variable gathered from Pax's arrays; zeros, and an error, for a wrong shape."""
        parts = [self.found_in[*leaf.split.name, layer] for layer in leaf.layers(self.per_block)]
        paths = {path for path, _ in parts}
        arrays = {path: self._unpadded(path, leaf.own_shape) for path in paths}
        if any(array is None for array in arrays.values()):
            return np.zeros(leaf.spec.shape, leaf.spec.dtype)
        array = arrays[parts[0][0]]
        if len(paths) > 1 or [i for _, i in parts] != list(range(len(array))):
            array = np.stack([arrays[path][i] for path, i in parts])
        return array.reshape(leaf.spec.shape).astype(leaf.spec.dtype, copy=False)

    def _unpadded(self, path: str, own_shape: tuple[int, ...]) -> np.ndarray | None:
        """Returns Pax's array as [layers, *own_shape]; None, and an error, for a wrong shape."""
        if path in self.unpadded:
            return self.unpadded[path]
        array = np.asarray(self.pax_arrays[path])
        lead = array.ndim - len(own_shape)
        shape = array.shape[lead:]
        array = array.reshape(-1, *shape)
        unpadded = array[(slice(None), *map(slice, own_shape))]
        if unpadded.shape[1:] != tuple(own_shape):
            self.errors.append(f"{path} has shape {shape} in Pax, {own_shape} in the model")
            return None
        # Pax pads with zeros; other values mean that the shape differs.
        if np.count_nonzero(array) != np.count_nonzero(unpadded):
            self.errors.append(
                f"{path} has shape {shape} in Pax, {own_shape} in the model, but is not zero "
                "beyond the model's shape"
            )
            return None
        if lead:
            self.unpadded[path] = unpadded  # An unrolled model needs it once per layer.
        return unpadded


def _by_path(paths: Mapping[tuple[str, str, int], str]) -> dict[str, str]:
    """Returns the paths, each with a list of its layers."""
    layers: dict[str, list[int]] = {}
    for (_, rest, layer), path in paths.items():
        layers.setdefault(path, []).append(layer)
        if not rest:
            layers[path].clear()
    return {
        path: f" (layers {', '.join(map(str, sorted(layers[path])))})" if layers[path] else ""
        for path in sorted(layers)
    }
