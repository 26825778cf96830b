"""The dims of weights: each a size, with a name that the layer or its parent gives, and a split."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims, to_partition_spec

# Such a setting's type: an entry per dim, or entries by the names of dims.
SplitSetting = SplitDims | Mapping[str, DimSplit]
# The end of the names of settings that say how an array splits.
SPLIT = "_split_dims_mapping"


class Matrix(NamedTuple):
    """The dims of a weight that are a matrix; the others number matrices.

    Attributes:
      summed: those of the inputs.
      made: those of the outputs.
    """

    summed: tuple[int, ...]
    made: tuple[int, ...]


# Of a weight that is no matrix, such as a table of embeddings.
NONE = Matrix((), ())
# The name of a dim of classes.
CLASSES = "vocab"
# Of a dim of the residual stream.
MODEL_DIMS = "embed"
# Of the residual stream, [B, T, D], between the parts of blocks.
RESIDUAL = ("residual_batch", "residual_length", "activation_embed")


class Dim(int):
    """A size of a weight. It counts something, such as "embed", and may split over mesh axes.

    It is an int wherever one is needed; what is computed of it is a plain int again.

    Attributes:
      name: of what it counts; None: it has no name.
      split: the mesh axes that it splits over; None: no axis splits it.
      is_explicit: whether a setting chose the split (None then means "replicated").
    """

    name: str | None
    split: DimSplit
    is_explicit: bool

    def __new__(
        cls, size: int, name: str | None = None, split: DimSplit = None, *,
        is_explicit: bool = False,
    ) -> "Dim":
        self = super().__new__(cls, size)
        self.name, self.split, self.is_explicit = name, split, is_explicit or split is not None
        return self


def merged_dim(first: int, *others: int) -> int:
    """Returns the dim that several make, which lie in each other and all split."""
    dims = (first, *others)
    if not others:
        return first
    split = tuple(axis for dim in dims for axis in _axes(getattr(dim, "split", None))) or None
    name = " ".join(name for name in names_of(dims) if name) or None
    return Dim(math.prod(dims), name, split, is_explicit=split_of(dims) is not None)


def _axes(split: DimSplit) -> tuple[int | str, ...]:
    return (split,) if isinstance(split, str | int) else tuple(split or ())


def sized(dim: int, size: int) -> int:
    """Returns a dim of another size: of keys' heads as that of heads."""
    if not isinstance(dim, Dim):
        return size
    return Dim(size, dim.name, dim.split, is_explicit=dim.is_explicit)


def split_of(dims: Sequence[int]) -> SplitDims:
    """Returns the split of a weight with these dims; None if no setting chose one."""
    is_explicit = any(isinstance(dim, Dim) and dim.is_explicit for dim in dims)
    return tuple(getattr(dim, "split", None) for dim in dims) if is_explicit else None


def names_of(dims: Sequence[int]) -> tuple[str | None, ...]:
    """Returns the name of each dim, None where it has none."""
    return tuple(getattr(dim, "name", None) for dim in dims)


def matrix_of(equation: str, letters: Sequence[str]) -> Matrix:
    """Returns the matrix that a product by a weight is.

    Args:
      equation: of inputs and weight, "...d,dnk->...nk".
      letters: of each dim of the weight, ("d", "n", "k").
    """
    operands, outputs = equation.split("->")
    inputs = operands.split(",")[0]
    return Matrix(
        tuple(i for i, x in enumerate(letters) if x[0] in inputs and x[0] not in outputs),
        tuple(i for i, x in enumerate(letters) if x[0] in outputs and x[0] not in inputs),
    )


def splits(**dims: Sequence[str | None]) -> dict[str, tuple[str | None, ...]]:
    """Returns a layer's settings that say how arrays split, with the name of each dim.

    `splits(weight=("embed", "mlp"), activation=RESIDUAL)` is of `weight_split_dims_mapping` and
    `activation_split_dims_mapping`; () stands for any dims, without names.
    """
    return {f"{name}{SPLIT}": tuple(names) for name, names in dims.items()}


# Of weights [D, N, K], and of what they make of [B, T, D].
OF_HEADS = splits(
    weight=("embed", "heads", "head_dim"),
    activation=("batch", "length", "activation_heads", "activation_head_dim"),
)


def checked_mapping(setting: str, mapping: Any, names: Sequence[str | None]) -> SplitDims:
    """Returns a setting as an entry per dim, given so or by the dims' names.

    Args:
      setting: its name, for the messages.
      mapping: an entry per dim, those at the end may be missing; or entries by name.
      names: of the dims that the layer declares for the setting.

    Raises:
      ConfigError: it is neither, or has a name that the layer does not have.
    """
    if mapping is None:
        return None
    known = [name for name in names if name]
    if isinstance(mapping, PartitionSpec):
        mapping = tuple(mapping)
    if isinstance(mapping, Mapping) and known:
        for name in mapping:
            require_choice(f"a dim of {setting}", name, known)
        return tuple(_entry(mapping.get(name)) for name in names)
    if isinstance(mapping, str | Mapping) or not isinstance(mapping, Sequence):
        to_partition_spec(mapping, (), path=setting)  # It says what is wrong.
    return tuple(map(_entry, mapping))


def _entry(entry: DimSplit) -> DimSplit:
    return tuple(entry) if isinstance(entry, list) else entry


def dims_of(
    sizes: Sequence[int], names: Sequence[str | None], mapping: SplitDims, setting: str
) -> tuple[Dim, ...]:
    """Returns sizes as dims: with the layer's own split, else that which a parent gave.

    Args:
      names: of the layer's dims; (): they have none. A name that a parent gave stays.
      mapping: an entry for each size, those at the end may be missing; None: nothing is said.

    Raises:
      ConfigError: the mapping has more entries, or the layer other names; names the setting.
    """
    if names and len(names) != len(sizes):
        raise ConfigError(
            f"{setting}: the layer's `splits` has the dims {tuple(names)}, but the sizes are "
            f"{tuple(map(int, sizes))}. Name each dim there, with None for one without a name."
        )
    if mapping is not None and len(mapping) > len(sizes):
        raise ConfigError(
            f"{setting}: split dims {mapping} have {len(mapping)} entries, but the array has "
            f"{len(sizes)} dimensions. Remove {len(mapping) - len(sizes)} of them."
        )
    names = names or (None,) * len(sizes)
    entries = (*(mapping or ()), *(None,) * len(sizes))
    result = []
    for size, name, entry in zip(sizes, names, entries, strict=False):  # Entries are longer.
        given = size if isinstance(size, Dim) else Dim(size)
        split, is_explicit = (given.split, given.is_explicit) if mapping is None else (entry, True)
        result.append(Dim(size, given.name or name, split, is_explicit=is_explicit))
    return tuple(result)
