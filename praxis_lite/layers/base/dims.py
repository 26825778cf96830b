"""Dims of weights: sizes with a name and a sharding, which the layer or its parent chooses."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims, to_partition_spec

# A setting for the sharding of an array: an entry per dim, or a mapping from dim names to entries.
SplitSetting = SplitDims | Mapping[str, DimSplit]
# Suffix of the names of these settings.
SPLIT = "_split_dims_mapping"


class Matrix(NamedTuple):
    """The dims of a weight that form a matrix; the remaining dims stack matrices.

    Attributes:
      contracted: Dims that are contracted with the inputs.
      outputs: Dims of the outputs.
    """

    contracted: tuple[int, ...]
    outputs: tuple[int, ...]


# For weights that are not matrices, such as embedding tables.
NONE = Matrix((), ())
# Name of the dim of classes, such as tokens.
CLASSES = "vocab"
# Name of the model dim, the last dim of the residual stream.
MODEL_DIMS = "embed"
# Names of the dims [B, T, D] of the residual stream between sublayers.
RESIDUAL = ("residual_batch", "residual_length", "activation_embed")


class Dim(int):
    """The size of a weight's dim, with a name, such as "embed", and the mesh axes that shard it.

    Arithmetic with a Dim returns plain ints.

    Attributes:
      name: Name of the dim, or None.
      split: Mesh axes over which the dim is sharded, or None.
      is_explicit: Whether a setting chose `split`; None then means "replicated".
    """

    name: str | None
    split: DimSplit
    is_explicit: bool

    def __new__(
        cls,
        size: int,
        name: str | None = None,
        split: DimSplit = None,
        *,
        is_explicit: bool = False,
    ) -> "Dim":
        self = super().__new__(cls, size)
        self.name, self.split, self.is_explicit = name, split, is_explicit or split is not None
        return self


def merged_dim(first: int, *others: int) -> int:
    """Merges dims, outermost first, into one dim that is sharded over the axes of all dims."""
    dims = (first, *others)
    if not others:
        return first
    split = tuple(axis for dim in dims for axis in _axes(getattr(dim, "split", None))) or None
    name = " ".join(name for name in names_of(dims) if name) or None
    return Dim(math.prod(dims), name, split, is_explicit=split_of(dims) is not None)


def _axes(split: DimSplit) -> tuple[int | str, ...]:
    return (split,) if isinstance(split, str | int) else tuple(split or ())


def sized(dim: int, size: int) -> int:
    """Returns a copy of `dim` with a different size."""
    if not isinstance(dim, Dim):
        return size
    return Dim(size, dim.name, dim.split, is_explicit=dim.is_explicit)


def split_of(dims: Sequence[int]) -> SplitDims:
    """Returns the split mapping for a weight with these dims; None if no setting specifies it."""
    is_explicit = any(isinstance(dim, Dim) and dim.is_explicit for dim in dims)
    return tuple(getattr(dim, "split", None) for dim in dims) if is_explicit else None


def names_of(dims: Sequence[int]) -> tuple[str | None, ...]:
    """Returns the name of each dim, or None."""
    return tuple(getattr(dim, "name", None) for dim in dims)


def matrix_of(equation: str, letters: Sequence[str]) -> Matrix:
    """Returns the dims of a weight that form a matrix in an einsum.

    Args:
      equation: Einsum equation of inputs and weight, such as "...d,dnk->...nk".
      letters: Subscripts of each dim of the weight, such as ("d", "n", "k").
    """
    operands, outputs = equation.split("->")
    inputs = operands.split(",")[0]
    return Matrix(
        tuple(i for i, x in enumerate(letters) if x[0] in inputs and x[0] not in outputs),
        tuple(i for i, x in enumerate(letters) if x[0] in outputs and x[0] not in inputs),
    )


def splits(**dims: Sequence[str | None]) -> dict[str, tuple[str | None, ...]]:
    """Declares a layer's sharding settings; returns the dim names, keyed by setting.

    `splits(weight=("embed", "mlp"), activation=RESIDUAL)` declares `weight_split_dims_mapping` and
    `activation_split_dims_mapping`. Use () for any number of dims without names.
    """
    return {f"{name}{SPLIT}": tuple(names) for name, names in dims.items()}


# Settings for weights [D, N, K], and for the heads [B, T, N, K] that these weights compute.
HEAD_SPLITS = splits(
    weight=("embed", "heads", "head_dim"),
    activation=("batch", "length", "activation_heads", "activation_head_dim"),
)


def checked_mapping(setting: str, mapping: Any, names: Sequence[str | None]) -> SplitDims:
    """Checks a sharding setting, and converts it to one entry per dim.

    Args:
      setting: Name of the setting, for error messages.
      mapping: An entry per dim (trailing entries may be missing), or a mapping from dim names to
        entries.
      names: Dim names that the layer declares for the setting.

    Raises:
      ConfigError: The mapping has the wrong type or contains an unknown name.
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
        to_partition_spec(mapping, (), path=setting)  # type: ignore[arg-type]  # Raises ConfigError.
    return tuple(map(_entry, mapping))


def _entry(entry: DimSplit) -> DimSplit:
    return tuple(entry) if isinstance(entry, list) else entry


def dims_of(
    sizes: Sequence[int], names: Sequence[str | None], mapping: SplitDims, setting: str
) -> tuple[Dim, ...]:
    """Converts sizes to dims that are sharded as the layer's setting or its parent specifies.

    Args:
      sizes: Sizes, or dims from a parent.
      names: Names of the layer's dims, or () if they have none. The parent's names take precedence.
      mapping: An entry per size (trailing entries may be missing). If None, the dims are sharded as
        the parent chose.
      setting: Name of the setting, for error messages.

    Raises:
      ConfigError: The mapping has more entries than there are sizes, or the number of names differs
        from the number of sizes.
    """
    if names and len(names) != len(sizes):
        raise ConfigError(
            f"{setting}: the layer's `splits` declares the dims {tuple(names)}, but the sizes are "
            f"{tuple(map(int, sizes))}. List one name per dim, and None for dims without a name."
        )
    if mapping is not None and len(mapping) > len(sizes):
        raise ConfigError(
            f"{setting} is {mapping}, which has {len(mapping)} entries, but the array's rank is "
            f"{len(sizes)}. Specify one entry per dim."
        )
    names = names or (None,) * len(sizes)
    entries = (*(mapping or ()), *(None,) * len(sizes))
    dims = []
    for size, name, entry in zip(sizes, names, entries, strict=False):  # Entries are longer.
        given = size if isinstance(size, Dim) else Dim(size)
        split, is_explicit = (given.split, given.is_explicit) if mapping is None else (entry, True)
        dims.append(Dim(size, given.name or name, split, is_explicit=is_explicit))
    return tuple(dims)
