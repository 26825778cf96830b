"""Reads the collectives and the memory per device from a compiled program.

XLA's `cost_analysis()` counts the body of a loop once, as if a scanned model had a single layer.
This module counts every execution of an instruction in a loop. Functions take a
`jax.stages.Compiled` or its text, in the formats of jax 0.10 to 0.12 for CPU, GPU and TPU.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from praxis_lite.core.errors import format_bytes
from praxis_tools.explain.hlo_groups import axes_of_groups, device_groups
from praxis_tools.explain.hlo_layers import (
    layers_of,
    merged_layer,
    source_frames,
    source_line,
)
from praxis_tools.explain.hlo_runs import Site, executed
from praxis_tools.explain.hlo_text import (
    Array,
    arrays_of,
    braced,
    bracket,
    op_name_of,
    parse,
    root_of,
)

if TYPE_CHECKING:
    import jax
    import numpy as np

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


@dataclass(frozen=True)
class Collective:
    """A collective instruction in a compiled program.

    Attributes:
      kind: One of `KINDS`.
      bytes: Bytes of the result on one device per execution, summed over a tuple's elements.
      dtypes: XLA's names of the distinct element types in the result ('f32', 'bf16').
      count: Number of executions in one run of the program.
      at_least: Whether the collective is in a loop with an unknown trip count, for which `count`
        assumes one iteration.
      at_most: Whether the collective is in a branch that `count` assumes to be taken.
      group_size: Number of devices in a replica group; None for collective-permute.
      op_name: JAX operation, such as 'jit(step)/while/body/layer/dot_general', or ''.
      layers: (layer, bytes) for each array in the result. The layer is, for example, 'encoder/ffn'
        or 'gradient of encoder/ffn'. Outside of layers, the source line (such as 'model.py:13') or
        '' is used instead.
      axes: Mesh axes along which the collective runs; empty if no mesh was given.
      source: Source line, such as 'model.py:13', or ''.
      dims: Shape of each array in the result.
      groups: Replica groups, as device positions in the mesh, int [groups, devices]; None if no
        mesh was given.
    """

    kind: str
    bytes: int
    dtypes: tuple[str, ...]
    count: int
    at_least: bool
    at_most: bool
    group_size: int | None
    op_name: str
    layers: tuple[tuple[str, int], ...] = (("", 0),)
    axes: tuple[str, ...] = ()
    source: str = ""
    dims: tuple[tuple[int, ...], ...] = ()
    groups: "np.ndarray | None" = field(default=None, compare=False, repr=False)

    @property
    def layer(self) -> str:
        """The layer, or a description such as 'several in encoder' if XLA merged several layers."""
        return merged_layer(dict(self.layers)) or "unknown"


@dataclass(frozen=True)
class MemoryPerDevice:
    """Bytes that XLA plans to allocate on each device.

    Attributes:
      arguments: Bytes of arguments.
      outputs: Bytes of outputs.
      temp: Bytes of temporary buffers.
      aliased: Bytes of outputs that reuse the buffers of donated arguments.
      peak: arguments + outputs - aliased + temp.
      host: The same sum for host memory, which the CPU compiler counts as device memory.
    """

    arguments: int
    outputs: int
    temp: int
    aliased: int
    peak: int
    host: int = 0


def collectives(
    compiled: "jax.stages.Compiled | str", axis_sizes: Mapping[str, int] | None = None
) -> list[Collective]:
    """Returns the collectives executed in one run of a program.

    An asynchronous collective (start and done) is counted once.

    Args:
      compiled: The program or its text.
      axis_sizes: Number of devices along each mesh axis, or None to omit axes and groups.
    """
    program, found, seen = parse(compiled), [], set()
    for site in executed(program):
        instruction, attributes = site.instruction, site.instruction.attributes
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        channel = re.search(r"channel_id=(\d+)", attributes)
        shape, scattered_shape = instruction.shape, _reduce_scatter_shape(site)
        if scattered_shape is not None:
            kind, shape = "reduce-scatter", scattered_shape
        elif site.fused and channel:
            # The TPU compiler spreads an all-gather over several fusions (start, steps that overlap
            # with compute, done), each with a copy of the instruction on the same channel.
            if (site.scope, channel.group(1)) in seen:
                continue
            seen.add((site.scope, channel.group(1)))
        if instruction.opcode.endswith("-start") and (
            kind != "all-reduce" or shape.startswith("((")
        ):
            shape = bracket(shape, 0)[0][1]  # (operands, results, ...); all-reduce-start: results.
        arrays = arrays_of(shape)
        groups = device_groups(attributes, program)
        group_size = None
        if groups is not None and "source_target_pairs=" not in attributes:
            group_size = groups.shape[1]
        found.append(
            Collective(
                kind=kind,
                bytes=sum(array.bytes for array in arrays),
                dtypes=tuple(dict.fromkeys(array.dtype for array in arrays)),
                count=site.num_runs,
                at_least=site.at_least,
                at_most=site.at_most,
                group_size=group_size,
                op_name=op_name_of(instruction),
                layers=tuple(layers_of(program, instruction, site.computation).items()),
                axes=axes_of_groups(groups, axis_sizes)
                if axis_sizes and groups is not None
                else (),
                source=source_line(source_frames(program, instruction)),
                dims=tuple(array.dims for array in arrays),
                groups=groups if axis_sizes else None,
            )
        )
    return found


def _reduce_scatter_shape(site: Site) -> str | None:
    """Returns the result shape of a fused all-reduce and slice, or None for other instructions.

    The TPU compiler writes a reduce-scatter in this form.
    """
    if not site.fused or site.instruction.opcode != "all-reduce":
        return None
    root = root_of(site.computation)
    outputs = [site.computation[n] for n in root.operands] if root.opcode == "tuple" else [root]
    return root.shape if all(output.opcode == "dynamic-slice" for output in outputs) else None


def summarize(collectives: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """Maps each kind of collective to (number of executions, bytes of all executions)."""
    totals = {kind: (0, 0) for kind in KINDS}
    for collective in collectives:
        count, size = totals[collective.kind]
        totals[collective.kind] = (
            count + collective.count,
            size + collective.count * collective.bytes,
        )
    return {kind: total for kind, total in totals.items() if total != (0, 0)}


def by_layer(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """Groups collectives by kind and layer, sorted by kind and then by decreasing bytes."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.kind, collective.layer), []).append(collective)
    return sorted(
        groups.values(),
        key=lambda group: (KINDS.index(group[0].kind), -sum(c.count * c.bytes for c in group)),
    )


def collectives_table(collectives: Iterable[Collective]) -> str:
    """Returns a text table with a line for each kind of collective, followed by its layers.

    Lower and upper bounds are marked by '>=' and '<=', and numbers that are neither by '~'.
    """
    collectives, lines = list(collectives), []
    for kind in summarize(collectives):
        same = [collective for collective in collectives if collective.kind == kind]
        lines.append(_row(kind, same))
        lines += [_row(f"  {group[0].layer}", group) for group in by_layer(same)]
    if not lines:
        return "no collectives"
    width = max(21, *(len(name) + 2 for name, *_ in lines))
    lines.insert(0, ("collective", "count", "bytes"))
    return "\n".join(f"{name:<{width}}{count:>10}{size:>14}" for name, count, size in lines)


def _row(name: str, group: Sequence[Collective]) -> tuple[str, str, str]:
    sign, count = bound_sign(group), sum(c.count for c in group)
    return name, f"{sign}{count:,}", sign + format_bytes(sum(c.count * c.bytes for c in group))


def bound_sign(group: Sequence[Collective]) -> str:
    """Returns the sign to print before sums over a group of collectives.

    The sign is '>=' for lower bounds, '<=' for upper bounds, '~' if counts are both, and ''
    otherwise.
    """
    at_least, at_most = any(c.at_least for c in group), any(c.at_most for c in group)
    return "~" if at_least and at_most else ">=" if at_least else "<=" if at_most else ""


def donated_bytes(compiled: "jax.stages.Compiled | str") -> int:
    """Returns the bytes per device of donated inputs whose buffers are reused by outputs."""
    return sum(array.bytes for array in _donated(compiled))


def num_donated(compiled: "jax.stages.Compiled | str") -> int:
    """Returns the number of donated inputs whose buffers are reused by outputs."""
    return len(_donated(compiled))


def _donated(compiled: "jax.stages.Compiled | str") -> list[Array]:
    program = parse(compiled)
    entry = program.computations[program.entry].values()
    shapes = {int(p.operands[0]): p.shape for p in entry if p.opcode == "parameter"}
    # { {output index}: (parameter, {index in it}, may-alias), ... }
    pairs = braced(program.header, "input_output_alias=")
    donated = []
    for parameter, index in re.findall(r": \((\d+), \{([\d, ]*)\}", pairs):
        shape = shapes[int(parameter)]
        for position in re.findall(r"\d+", index):
            shape = bracket(shape, 0)[0][int(position)]
        donated += arrays_of(shape)
    return donated


def memory_per_device(compiled: "jax.stages.Compiled") -> MemoryPerDevice:
    """Returns the memory that XLA plans to allocate for a program."""
    stats = compiled.memory_analysis()

    def sizes(prefix: str) -> list[int]:
        names = ("argument", "output", "temp", "alias")
        return [getattr(stats, f"{prefix}{name}_size_in_bytes") for name in names]

    arguments, outputs, temp, aliased = sizes("")
    # Do not use XLA's peak_memory_in_bytes, which excludes temp on CPU (jax 0.10 and 0.12).
    peak = arguments + outputs - aliased + temp
    *on_host, aliased_on_host = sizes("host_")
    return MemoryPerDevice(arguments, outputs, temp, aliased, peak, sum(on_host) - aliased_on_host)
