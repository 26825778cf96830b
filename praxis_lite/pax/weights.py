"""Converts the variables of a Pax model to weights of our models, and back.

Within a layer, the names, shapes and semantics of weights are the same as in Pax (except RENAMES in
`paths`). The differences are padding, whether layers are stacked, and the model's prefix in its
task.
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
    """A variable of our model: its path with the collection, its spec, and its path in Pax."""

    path: str
    spec: WeightSpec
    pax_path: str
    split: StackPath

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape without the stacked dims."""
        return self.spec.shape[len(self.spec.stack_shape) :]

    def layers(self, per_block: Mapping[str, int]) -> list[int]:
        """Returns the indices of the array's layers in the stack, in array order.

        Args:
          per_block: Number of layers per block, for each stack.
        """
        num_blocks = math.prod(self.spec.stack_shape)
        first, step = self.split.block * num_blocks, per_block[self.split.stack]
        # Layers are numbered block by block.
        return [(first + i) * step + self.split.inner for i in range(num_blocks)]


def mdl_vars_from_pax(
    model: NnxModel,
    pax_vars: Mapping[str, Any],
    *,
    ignore: Sequence[str] = (),
    new: Sequence[str] = (),
    key: jax.Array | None = None,
) -> MdlVars:
    """Converts Pax variables to the variables of a model, as unpadded NumPy arrays.

    Stacks of layers may be unrolled, scanned or pipelined in either model.

    Args:
      model: Model that receives the weights.
      pax_vars: Arrays keyed by Pax path, for example from `read_pax_checkpoint`. Mappings may be
        nested, or have keys such as "params/lm/softmax/..." or "mdl_vars.params.lm.softmax...". A
        common prefix that does not occur in the model, such as "lm", is removed.
      ignore: Patterns of Pax paths (without the collection) to ignore; `*` matches any string.
      new: Patterns of paths (without the collection) of model weights that are not in the Pax
        variables, such as "*/lora_?". The model's `init` initializes these weights.
      key: Key for `init`. If None, a key with seed 0 is used.

    Returns:
      `{"params": ..., "non_trainable": ...}`.

    Raises:
      ConfigError: Variables are missing or unused, have wrong shapes, or have nonzero padding. The
        message lists all of them.
    """
    all_leaves = list(_leaves(model))
    leaves = [leaf for leaf in all_leaves if not _matches_any(leaf.path.partition("/")[2], new)]
    pax_arrays = {
        path: array
        for path, array in flat_pax_vars(pax_vars).items()
        if not _matches_any(path, ignore)
    }
    pax_arrays = _without_prefix(pax_arrays, {_first_name(leaf.pax_path) for leaf in leaves})
    layers = _PaxLayers(leaves, pax_arrays)
    layers.check_names()
    # `array_of` records errors, so that `check_shapes` can list all of them.
    arrays = {leaf.path: layers.array_of(leaf) for leaf in leaves}
    layers.check_shapes()
    if len(leaves) < len(all_leaves):
        initial = jax.device_get(jax.jit(model.init)(jax.random.key(0) if key is None else key))
        arrays = flatten_dict(initial, sep="/") | arrays
    return {"params": {}, "non_trainable": {}, **unflatten_dict(arrays, sep="/")}


class FromPax:
    """Initial state whose weights come from a Pax checkpoint, except for weights that match `new`.

    Args:
      variables: Result of `read_pax_checkpoint`.
      partitioner: Partitioner of the new job.
      ignore: As in `mdl_vars_from_pax`.
      new: As in `mdl_vars_from_pax`.
      seed: Seed for initializing new weights.
    """

    step = 0

    def __init__(
        self,
        variables: Mapping[str, Any],
        partitioner: Partitioner,
        *,
        ignore: Sequence[str] = (),
        new: Sequence[str] = (),
        seed: int = 0,
    ):
        model = partitioner.task.model
        if not isinstance(model, NnxModel):
            raise ConfigError(
                f"task.model is a {type(model).__name__}; expected an NNX module. Pax weights "
                "can only be loaded into models that consist of NNX modules."
            )
        self._variables, self._model = variables, model
        self._layout = partitioner.layout.select("mdl_vars")
        self._ignore, self._new, self._key = ignore, new, jax.random.key(seed)
        self.paths = [f"mdl_vars/{leaf.path}" for leaf in self._layout.leaves()]

    def keep(self, files: JobDir) -> None:
        """Does nothing, because later launches of the job do not read the Pax checkpoint."""

    def read(self, mesh: Mesh, note: Callable[[str], None]) -> dict[str, jax.Array]:
        """Returns the padded and sharded weights, keyed by path.

        Raises:
          ConfigError: The variables do not fit the model.
        """
        mdl_vars = mdl_vars_from_pax(
            self._model, self._variables, ignore=self._ignore, new=self._new, key=self._key
        )
        pad = jax.jit(self._layout.pad, out_shardings=self._layout.shardings(mesh))
        return dict(zip(self.paths, jax.tree.leaves(pad(mdl_vars)), strict=True))


def pax_vars_from_mdl_vars(model: NnxModel, mdl_vars: MdlVars) -> dict[str, np.ndarray]:
    """Converts a model's variables to arrays keyed by Pax path, such as "params/softmax/...".

    Unrolled layers become `x_layers_i`. Stacked layers become `repeat/sub/x_layers_j` with one
    leading dim.

    Args:
      model: The model.
      mdl_vars: Variables of the model, without padding.
    """
    leaves = list(_leaves(model))
    per_block, arrays = _per_block(leaf.split for leaf in leaves), flatten_dict(mdl_vars, sep="/")
    pax_vars: dict[str, np.ndarray] = {}
    for leaf in leaves:
        array = np.asarray(arrays[leaf.path])
        collection, split = leaf.path.split("/")[0], leaf.split
        names = [collection, leaf.pax_path]
        # The variable is in a stack of layers.
        if split != StackPath(leaf.pax_path):
            if split.is_stacked:
                levels = ["repeat", "sub", f"x_layers_{split.inner}"]
                array = array.reshape(-1, *leaf.own_shape)
            else:
                levels = [f"x_layers_{leaf.layers(per_block)[0]}"]
            names = [collection, split.stack, *levels, split.rest]
        pax_vars["/".join(filter(None, names))] = array
    return pax_vars


def _matches_any(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _leaves(model: NnxModel) -> Iterator[_Leaf]:
    specs = spec_leaves(model.weight_specs())
    module = model.abstract_module()
    # In the module's graph, list indices are ints.
    own_paths = {
        path: tuple(int(name) if name.isdigit() else name for name in path.split("/")[1:])
        for path, _ in specs
    }
    pax_paths = names_in_pax(module, own_paths.values())
    for path, spec in specs:
        pax_path = pax_paths[own_paths[path]]
        yield _Leaf(path, spec, pax_path, stack_path(pax_path))


def _per_block(paths: Iterable[StackPath]) -> dict[str, int]:
    """Returns the number of layers per block, for each stack."""
    counts: dict[str, int] = {}
    for path in paths:
        counts[path.stack] = max(counts.get(path.stack, 1), 1 + path.inner)
    return counts


def _without_prefix(arrays: dict[str, Any], first_names: set[str]) -> dict[str, Any]:
    """Removes a prefix, such as "lm", that all Pax paths share but no model path has."""
    while arrays:
        firsts = {_first_name(path) for path in arrays}
        if len(firsts) > 1 or firsts & first_names or "" in firsts:
            break
        arrays = {path.partition("/")[2]: array for path, array in arrays.items()}
    return arrays


def _first_name(path: str) -> str:
    """Returns the first component of the layer's path, or "" for the model itself or its stack."""
    split = stack_path(path)
    owner = split.stack if split.rest else split.stack.rpartition("/")[0]
    return owner.split("/")[0]


class _PaxLayers:
    """Looks up arrays of a Pax checkpoint for our variables, layer by layer.

    Errors are collected, so that one message lists all variables that do not fit.
    """

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
        # Maps (stack, rest, layer) to the path of a Pax array and the index in that array.
        self.sources: dict[tuple[str, str, int], tuple[str, int]] = {}
        for path, split in splits.items():
            for i in range(self._num_layers(path, split)):
                layer = i * pax_per_block[split.stack] + split.inner
                self.sources[*split.name, layer] = path, i

    def _num_layers(self, path: str, split: StackPath) -> int:
        """Returns the number of layers in a Pax array, or records an error if its rank is wrong."""
        if split.name not in self.own_shapes:
            return 1  # `check_names` reports the array as unused.
        own_shape, shape = self.own_shapes[split.name], tuple(np.shape(self.pax_arrays[path]))
        num_leading = len(shape) - len(own_shape)
        if num_leading < 0 or (num_leading and not split.is_stacked):
            self.errors.append(f"{path} has shape {shape} in Pax, {own_shape} in the model")
            return 0
        return math.prod(shape[:num_leading])

    def check_names(self) -> None:
        """Raises ConfigError if there are variables without Pax arrays, or unused Pax arrays."""
        self.check_shapes()
        # Variables by (stack, rest, layer), as in `sources`.
        expected: dict[tuple[str, str, int], str] = {}
        for leaf in self.leaves:
            for layer in leaf.layers(self.per_block):
                expected[*leaf.split.name, layer] = leaf.path
        missing = _describe_layers(
            {key: expected[key] for key in expected.keys() - self.sources.keys()}
        )
        unused = _describe_layers(
            {key: self.sources[key][0] for key in self.sources.keys() - expected.keys()}
        )
        if missing or unused:
            lines = [
                f"{path}{layers} is missing from the Pax variables."
                f"{did_you_mean(path.partition('/')[2], unused)}"
                for path, layers in missing.items()
            ]
            lines += [
                f"{path}{layers} is unused, because the model has no such weight."
                for path, layers in unused.items()
            ]
            raise ConfigError(
                f"{len(missing)} of the model's variables are missing and {len(unused)} Pax "
                f"variables are unused: {' '.join(lines)} Build the model with the settings of the "
                "Pax model, or list the variables to ignore in `ignore`."
            )

    def check_shapes(self) -> None:
        """Raises ConfigError with all recorded errors, if there are any."""
        if self.errors:
            raise ConfigError(
                f"The Pax variables do not fit the model: {'; '.join(self.errors)}. Build the "
                "model with the settings of the Pax model."
            )

    def array_of(self, leaf: _Leaf) -> np.ndarray:
        """Assembles a variable of our model from Pax arrays.

        If a shape is wrong, records an error and returns zeros.
        """
        parts = [self.sources[*leaf.split.name, layer] for layer in leaf.layers(self.per_block)]
        paths = {path for path, _ in parts}
        arrays: dict[str, np.ndarray] = {}
        for path in paths:
            unpadded = self._unpadded(path, leaf.own_shape)
            if unpadded is not None:
                arrays[path] = unpadded
        if len(arrays) < len(paths):
            return np.zeros(leaf.spec.shape, leaf.spec.dtype)
        array = arrays[parts[0][0]]
        # Stack the layers, unless one Pax array contains exactly these layers in order.
        if len(paths) > 1 or [i for _, i in parts] != list(range(len(array))):
            array = np.stack([arrays[path][i] for path, i in parts])
        return array.reshape(leaf.spec.shape).astype(leaf.spec.dtype, copy=False)

    def _unpadded(self, path: str, own_shape: tuple[int, ...]) -> np.ndarray | None:
        """Returns a Pax array with the shape [layers, *own_shape].

        If the shape is wrong, records an error and returns None.
        """
        if path in self.unpadded:
            return self.unpadded[path]
        array = np.asarray(self.pax_arrays[path])
        num_leading = array.ndim - len(own_shape)
        shape = array.shape[num_leading:]
        array = array.reshape(-1, *shape)
        unpadded = array[(slice(None), *map(slice, own_shape))]
        if unpadded.shape[1:] != tuple(own_shape):
            self.errors.append(f"{path} has shape {shape} in Pax, {own_shape} in the model")
            return None
        # Pax pads with zeros, so other values mean that the model is smaller than the Pax model.
        if np.count_nonzero(array) != np.count_nonzero(unpadded):
            self.errors.append(
                f"{path} has shape {shape} in Pax and {own_shape} in the model, but the Pax array "
                "is not zero beyond the model's shape"
            )
            return None
        if num_leading:
            self.unpadded[path] = unpadded  # Unrolled models read the array once per layer.
        return unpadded


def _describe_layers(paths: Mapping[tuple[str, str, int], str]) -> dict[str, str]:
    """Formats the layers of each path as " (layers 0, 1)", or "" if the path is not in a stack."""
    layers: dict[str, list[int]] = {}
    for (_, rest, layer), path in paths.items():
        layers.setdefault(path, []).append(layer)
        # Without a rest, the path is not in a stack.
        if not rest:
            layers[path].clear()
    return {
        path: f" (layers {', '.join(map(str, sorted(layers[path])))})" if layers[path] else ""
        for path in sorted(layers)
    }
