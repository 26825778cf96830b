"""MeshConfig: an experiment's settings for the names and sizes of its mesh axes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.core.sharding.devices.axis_types import AXIS_TYPES

__all__ = ("MeshConfig", "TPUS")

CompilerOptions = Mapping[str, Mapping[str, bool | int | float | str]]
# Maps `jax.Device.device_kind` to the TPU's name in topologies and compiler_options.
TPUS = {
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5": "v5p",
    "tpu v5p": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu7x": "tpu7x",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Names and sizes of the mesh axes, and settings for the mesh's devices.

    Attributes:
      ici_mesh_shape: Number of devices along each axis within a slice (fast interconnect). One size
        may be -1 to use all remaining devices.
      dcn_mesh_shape: Number of slices along each axis (data-center network). If None, there is one
        slice.
      axis_names: Axis names for split-dims mappings, outermost axis first.
      allow_unused_devices: Whether the mesh may be smaller than the number of accelerators.
      allow_split_physical_axes: Whether an axis may use a fraction of a TPU torus dim if the sizes
        do not match the torus otherwise. Its collectives then share links with another axis.
      compiler_options: XLA options for the train, eval and decode steps. Maps a platform ("cpu",
        "gpu", "tpu") or TPU type ("v4", "v5e", "v5p", "v6e", "tpu7x") to options, keyed by name.
        Options for a TPU type override those for "tpu"; options for other devices are ignored. An
        option that the compiler does not accept is an error, or a warning if its name ends in "?".
      axis_types: "auto" or "explicit", either one string for all axes or one per axis. In train
        and eval steps, Explicit axes are part of array types, which JAX checks while tracing.
    """

    ici_mesh_shape: Sequence[int]
    dcn_mesh_shape: Sequence[int] | None = None
    axis_names: Sequence[str] = ("replica", "data", "mdl")
    allow_unused_devices: bool = False
    allow_split_physical_axes: bool = False
    compiler_options: CompilerOptions | None = dataclasses.field(default=None, hash=False)
    axis_types: str | Sequence[str] = "auto"

    def __post_init__(self) -> None:
        names = tuple(self.axis_names)
        if len(set(names)) != len(names):
            raise ConfigError(f"mesh.axis_names {names} are not unique. Make the names distinct.")
        for field in ("ici_mesh_shape", "dcn_mesh_shape"):
            shape = getattr(self, field)
            if shape is None:
                continue
            may_be_free = field == "ici_mesh_shape"
            is_valid = (
                len(shape) == len(names)
                and list(shape).count(-1) <= may_be_free
                and all(
                    isinstance(size, int)
                    and not isinstance(size, bool)
                    and (size > 0 or size == -1)
                    for size in shape
                )
            )
            expected = f"one positive integer for each of the axes {names}" + (
                ", or -1 for one of them" if may_be_free else ""
            )
            change = f"Fix mesh.{field} or mesh.axis_names."
            require(is_valid, f"mesh.{field}", tuple(shape), expected, change)
        if not isinstance(self.axis_types, str):
            expected = f"one of {', '.join(AXIS_TYPES)}, or one of these for each axis of {names}"
            require(
                isinstance(self.axis_types, Sequence) and len(self.axis_types) == len(names),
                "mesh.axis_types",
                self.axis_types,
                expected,
            )
        for name in self.axis_type_names:
            require_choice("mesh.axis_types", name, AXIS_TYPES)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of devices along each axis: the product of the ICI and DCN shapes.

        Raises:
          ConfigError: A size is -1. Call `filled_mesh` first to replace it.
        """
        if -1 in self.ici_mesh_shape:
            raise ConfigError(
                f"mesh.ici_mesh_shape {tuple(self.ici_mesh_shape)} contains -1, whose value "
                "depends on the devices. Call filled_mesh(config) first, or set a number."
            )
        dcn_mesh_shape = self.dcn_mesh_shape or (1,) * len(self.ici_mesh_shape)
        return tuple(i * d for i, d in zip(self.ici_mesh_shape, dcn_mesh_shape, strict=True))

    @property
    def axis_type_names(self) -> tuple[str, ...]:
        """The axis type of each axis: "auto" or "explicit"."""
        types, names = self.axis_types, self.axis_names
        return (types,) * len(names) if isinstance(types, str) else tuple(types)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"The mesh {dict(zip(self.axis_names, self.shape, strict=True))}"


def merged_options(first: CompilerOptions | None, more: CompilerOptions | None) -> CompilerOptions:
    """Returns the union of two sets of options; those in `first` take precedence.

    The "tpu" options in `first` also override the options for TPU types in `more`. Names with and
    without the suffix "?" (for options that XLA may not accept) denote the same option.
    """
    first, more = first or {}, more or {}
    merged = {}
    for name in {**more, **first}:
        preferred = dict(first.get(name, {}))
        of_all_tpus = first.get("tpu", {}) if name in TPUS.values() else {}
        present = {key.removesuffix("?") for key in (*preferred, *of_all_tpus)}
        others = {
            key: value
            for key, value in more.get(name, {}).items()
            if key.removesuffix("?") not in present
        }
        merged[name] = others | preferred
    return merged
