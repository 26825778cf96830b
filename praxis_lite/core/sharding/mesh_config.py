"""MeshConfig: the axes of a mesh and their sizes, as an experiment specifies them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.core.sharding.devices.axis_types import AXIS_TYPES

__all__ = ("MeshConfig", "TPUS")

CompilerOptions = Mapping[str, Mapping[str, bool | int | float | str]]
# Names of TPUs, as topologies and compiler_options have them, by `jax.Device.device_kind`.
TPUS = {
    "tpu v4": "v4", "tpu v5 lite": "v5e", "tpu v5e": "v5e", "tpu v5": "v5p", "tpu v5p": "v5p",
    "tpu v6 lite": "v6e", "tpu v6e": "v6e", "tpu7x": "tpu7x",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The number of devices along each named axis.

    Attributes:
      ici_mesh_shape: devices along each axis within a slice (fast interconnect). One size may be
        -1: as many as there are devices for.
      dcn_mesh_shape: slices along each axis (data-centre network); None: there is one slice.
      axis_names: the names that split-dims mappings use, outermost axis first.
      allow_unused_devices: accept a mesh smaller than the accelerators there are.
      allow_split_physical_axes: let an axis take a part of a TPU torus's dim, where the sizes do
        not match the torus otherwise; collectives along it then share links with another axis.
      compiler_options: by platform ("cpu", "gpu", "tpu") or kind of TPU ("v4", "v5e", "v5p",
        "v6e", "tpu7x"), options of XLA by name for the train, eval and decode steps; those of a
        kind count before those of "tpu". Those of other devices wait until a job runs there. An
        option that the compiler lacks is an error; of a name with "?" at its end, a warning.
      axis_types: "auto", or "explicit": in training and evaluation JAX's types of arrays say how
        they split over it, checked while a step is traced. A word for all axes, or one for each.
    """

    ici_mesh_shape: Sequence[int]
    dcn_mesh_shape: Sequence[int] | None = None
    axis_names: Sequence[str] = ("replica", "data", "mdl")
    allow_unused_devices: bool = False
    allow_split_physical_axes: bool = False
    compiler_options: CompilerOptions | None = dataclasses.field(default=None, hash=False)
    axis_types: str | Sequence[str] = "auto"

    def __post_init__(self):
        names = tuple(self.axis_names)
        if len(set(names)) != len(names):
            raise ConfigError(f"mesh.axis_names {names} names an axis twice. Make them distinct.")
        for field in ("ici_mesh_shape", "dcn_mesh_shape"):
            shape = getattr(self, field)
            if shape is None:
                continue
            may_fill = field == "ici_mesh_shape"
            is_right = len(shape) == len(names) and list(shape).count(-1) <= may_fill and all(
                isinstance(size, int) and not isinstance(size, bool) and (size > 0 or size == -1)
                for size in shape
            )
            expected = f"one positive integer for each of the axes {names}" + (
                ", or -1 for one of them" if may_fill else ""
            )
            change = f"Fix mesh.{field} or mesh.axis_names."
            require(is_right, f"mesh.{field}", tuple(shape), expected, change)
        if not isinstance(self.axis_types, str):
            expected = f"a word of {', '.join(AXIS_TYPES)}, or one for each of the axes {names}"
            require(
                isinstance(self.axis_types, Sequence) and len(self.axis_types) == len(names),
                "mesh.axis_types", self.axis_types, expected,
            )
        for word in self.axis_type_words:
            require_choice("mesh.axis_types", word, AXIS_TYPES)

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices along each axis: the ICI and DCN shapes multiplied, axis by axis.

        Raises:
          ConfigError: a size is -1, and `filled_mesh` has not filled it.
        """
        if -1 in self.ici_mesh_shape:
            raise ConfigError(
                f"mesh.ici_mesh_shape {tuple(self.ici_mesh_shape)} has a size of -1, which is "
                "known only where the devices are. Call filled_mesh(config) first, or say a number."
            )
        dcn_mesh_shape = self.dcn_mesh_shape or (1,) * len(self.ici_mesh_shape)
        return tuple(i * d for i, d in zip(self.ici_mesh_shape, dcn_mesh_shape, strict=True))

    @property
    def axis_type_words(self) -> tuple[str, ...]:
        """The word of `axis_types` for each axis."""
        types, names = self.axis_types, self.axis_names
        return (types,) * len(names) if isinstance(types, str) else tuple(types)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"The mesh {dict(zip(self.axis_names, self.shape, strict=True))}"


def merged_options(first: CompilerOptions | None, more: CompilerOptions | None) -> CompilerOptions:
    """Returns the options of both; `first`, with its "tpu" for all kinds of TPU, takes precedence.

    A name that ends in "?", which XLA may lack, is the same option as the name without it.
    """
    first, more = first or {}, more or {}
    merged = {}
    for name in more | first:
        own = dict(first.get(name, {}))
        of_all = first.get("tpu", {}) if name in TPUS.values() else {}
        before = {key.removesuffix("?") for key in (*own, *of_all)}
        others = {
            key: value for key, value in more.get(name, {}).items()
            if key.removesuffix("?") not in before
        }
        merged[name] = others | own
    return merged
