"""A compiled program on a device, read from its text: collectives, memory.

XLA's `cost_analysis()` counts a loop's body once, so a scanned model looks like one layer. Here an
instruction counts as often as its loops run it. `compiled` is a `jax.stages.Compiled` or its
`as_text()`, as jax 0.10 to 0.12 writes it for CPU and TPU; cuBLAS's calls are understood too.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from praxis_lite.core.errors import format_bytes
from praxis_lite.tools.explain.hlo_groups import axes_of_groups, device_groups, devices_in_group
from praxis_lite.tools.explain.hlo_layers import layers_of, source_frames, source_line, together
from praxis_lite.tools.explain.hlo_runs import Site, executed
from praxis_lite.tools.explain.hlo_text import (
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
    """A collective instruction of a compiled program.

    Attributes:
      kind: one of `KINDS`.
      bytes: of one execution's result on one device, all elements of a tuple together.
      dtypes: element types of the result, each once, in XLA's names ('f32', 'bf16').
      count: executions in one run of the program.
      at_least: it is in a loop of unknown trip count, of which `count` takes one pass.
      at_most: it is in a branch that may not be taken; `count` takes it as taken.
      group_size: devices in one group; None for collective-permute.
      op_name: the JAX operation it comes from, 'jit(step)/while/body/layer/dot_general', or ''.
      layers: where the result comes from, and the bytes of each part: 'encoder/ffn' or 'gradient of
        encoder/ffn'; outside of any layer the source line, 'model.py:13', or ''.
      axes: the mesh axes that it runs along; empty where no mesh was given.
      source: the line that it comes from, 'model.py:13', or ''.
      dims: of the arrays of the result.
      groups: of devices by their places in the mesh, [groups, devices], if a mesh was given.
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
        """The layer, or 'several in encoder' if XLA merged several."""
        return together(dict(self.layers)) or "unknown"


@dataclass(frozen=True)
class MemoryPerDevice:
    """Bytes on a device, as XLA plans them.

    `aliased` outputs lie in donated arguments; `peak` is all that a run allocates: arguments +
    outputs - aliased + temp. `host` is the same of the host's memory, which the CPU's compiler
    counts as the device's.
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
    """Returns the collectives that a run of the program executes; start and done count once.

    Args:
      axis_sizes: of the mesh, for the axes of each.
    """
    program, result, seen = parse(compiled), [], set()
    for site in executed(program):
        opcode, attributes = site.instruction.opcode, site.instruction.attributes
        kind = opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        channel = re.search(r"channel_id=(\d+)", attributes)
        shape, scattered = site.instruction.shape, _scattered(site)
        if scattered is not None:
            kind, shape = "reduce-scatter", scattered
        elif site.fused and channel:
            # A TPU spreads an all-gather over fusions (start, steps beside the compute, done),
            # each with a copy of the instruction on the same channel.
            if (site.scope, channel.group(1)) in seen:
                continue
            seen.add((site.scope, channel.group(1)))
        if opcode.endswith("-start") and (kind != "all-reduce" or shape.startswith("((")):
            shape = bracket(shape, 0)[0][1]  # (operands, results, ...); all-reduce-start: results.
        arrays = arrays_of(shape)
        size, dtypes = sum(a.bytes for a in arrays), tuple(dict.fromkeys(a.dtype for a in arrays))
        group_size = devices_in_group(attributes, program)
        bounds = site.count, site.at_least, site.at_most
        op_name, layers = op_name_of(site.instruction), tuple(layers_of(program, site).items())
        groups = device_groups(attributes, program) if axis_sizes else None
        axes = axes_of_groups(groups, axis_sizes) if groups is not None else ()
        source = source_line(source_frames(program, site.instruction))
        dims = tuple(array.dims for array in arrays)
        result.append(Collective(
            kind, size, dtypes, *bounds, group_size, op_name, layers, axes, source, dims, groups
        ))
    return result


def _scattered(site: Site) -> str | None:
    """Returns the result of a TPU's reduce-scatter: a fusion of an all-reduce and its slices."""
    if not site.fused or site.instruction.opcode != "all-reduce":
        return None
    root = root_of(site.computation)
    results = [site.computation[n] for n in root.operands] if root.opcode == "tuple" else [root]
    return root.shape if all(result.opcode == "dynamic-slice" for result in results) else None


def summarise(collectives: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """Returns {kind: (executions, bytes of all executions)} of the kinds that occur."""
    totals = {kind: (0, 0) for kind in KINDS}
    for item in collectives:
        count, size = totals[item.kind]
        totals[item.kind] = count + item.count, size + item.count * item.bytes
    return {kind: total for kind, total in totals.items() if total != (0, 0)}


def by_layer(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """Returns the collectives in groups of a kind and a layer, by kind, most bytes first."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.kind, collective.layer), []).append(collective)
    return sorted(
        groups.values(),
        key=lambda group: (KINDS.index(group[0].kind), -sum(c.count * c.bytes for c in group)),
    )


def collectives_table(collectives: Iterable[Collective]) -> str:
    """Returns a line of text per kind, and below it a line per layer of that kind.

    '>=', '<=' (both: '~') mark what is only a bound.
    """
    collectives, lines = list(collectives), []
    for kind in summarise(collectives):
        same = [collective for collective in collectives if collective.kind == kind]
        lines.append(_row(kind, same))
        lines += [_row(f"  {group[0].layer}", group) for group in by_layer(same)]
    if not lines:
        return "no collectives"
    width = max(21, *(len(name) + 2 for name, *_ in lines))
    lines.insert(0, ("collective", "count", "bytes"))
    return "\n".join(f"{name:<{width}}{count:>10}{size:>14}" for name, count, size in lines)


def _row(name: str, same: Sequence[Collective]) -> tuple[str, str, str]:
    mark, count = bound(same), sum(item.count for item in same)
    return name, f"{mark}{count:,}", mark + format_bytes(sum(c.count * c.bytes for c in same))


def bound(same: Iterable[Collective]) -> str:
    """Returns '>=' or '<=' if a sum over collectives is only that bound, '~' if both, or ''."""
    flags = [(item.at_least, item.at_most) for item in same]
    at_least, at_most = any(least for least, _ in flags), any(most for _, most in flags)
    return "~" if at_least and at_most else ">=" if at_least else "<=" if at_most else ""


def donated_bytes(compiled: "jax.stages.Compiled | str") -> int:
    """Returns the bytes per device of the input arrays in whose buffers outputs lie."""
    return sum(array.bytes for array in _donated(compiled))


def num_donated(compiled: "jax.stages.Compiled | str") -> int:
    """Returns the number of input arrays in whose buffers outputs lie."""
    return len(_donated(compiled))


def _donated(compiled: "jax.stages.Compiled | str") -> list[Array]:
    program = parse(compiled)
    entry = program.computations[program.entry].values()
    shapes = {int(i.operands[0]): i.shape for i in entry if i.opcode == "parameter"}
    # { {output index}: (parameter, {index in it}, may-alias), ... }
    pairs = braced(program.header, "input_output_alias=")
    donated = []
    for parameter, index in re.findall(r": \((\d+), \{([\d, ]*)\}", pairs):
        shape = shapes[int(parameter)]
        for position in re.findall(r"\d+", index):
            shape = bracket(shape, 0)[0][int(position)]
        donated += arrays_of(shape)
    return donated


def memory_per_device(compiled: "jax.stages.Compiled") -> MemoryPerDevice | None:
    """Returns the memory that XLA plans, or None if the backend does not tell."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None

    def sizes(where: str) -> list[int]:
        names = ("argument", "output", "temp", "alias")
        return [getattr(stats, f"{where}{name}_size_in_bytes") for name in names]

    arguments, outputs, temp, aliased = sizes("")
    # Not XLA's peak_memory_in_bytes: on CPU it leaves out temp (jax 0.10 and 0.12).
    peak = arguments + outputs - aliased + temp
    *held, shared = sizes("host_")
    return MemoryPerDevice(arguments, outputs, temp, aliased, peak, sum(held) - shared)
