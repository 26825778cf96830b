"""How many devices sum a dense layer's product together, as its splits say."""

import math
from collections.abc import Sequence

import jax

from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.split_dims import SplitDims, to_partition_spec, without_axes
from praxis_lite.layers.base.dense import Dense
from praxis_lite.layers.base.dims import MODEL_DIMS

Counts = tuple[tuple[str, int], ...]


def summing_devices(layer: Dense, rows: str, rows_split: SplitDims) -> Counts:
    """Returns the number of devices that hold parts of a sum, by the letter that is summed over.

    Over the weight's letters go the products that make outputs and gradients of inputs, over those
    of rows the product that makes the weight's gradient. A letter without an entry is whole, or is
    gathered before the product: a weight is, over the axes that split the batch, and its model dims
    over those that split time, too. The others are whole where tokens meet all of them.

    Args:
      rows: the letters of the inputs' rows: the batch's, and time's.
      rows_split: how they split; None: unknown.
    """
    mesh, metadata = jax.sharding.get_abstract_mesh(), layer.w.get_metadata()

    def axes_by(letters: Sequence[str], mapping: SplitDims) -> dict[str, set[str]]:
        spec = without_axes(to_partition_spec(mapping or (), mesh.axis_names), mesh.manual_axes)
        return {x: set(axes_of(entry)) for x, entry in zip(letters, spec, strict=False)}

    if mesh.empty:
        return ()
    of_rows = axes_by(rows, rows_split)
    of_batch, of_all = of_rows.get(rows[:1], set()), set().union(*of_rows.values())
    firsts = [letters[0] for letters in layer.letters]
    of_w = axes_by(firsts, metadata.get("split_dims_mapping"))
    for letter, name in zip(firsts, metadata.get("dim_names", ()), strict=False):
        if letter in of_w:
            of_w[letter] -= of_all if name == MODEL_DIMS else of_batch
    of_products = set().union(*of_w.values())
    axes = of_w | {letter: split - of_products for letter, split in of_rows.items()}
    counts = {x: math.prod(mesh.shape[axis] for axis in split) for x, split in axes.items()}
    return tuple((letter, count) for letter, count in counts.items() if count > 1)
