"""Breaks down the memory used by a step, and gives advice if the step does not fit in memory."""

import dataclasses
import math
import re

from praxis_lite.core.errors import format_bytes
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.trainer.layout_table import bytes_per_device, kind_of
from praxis_tools.explain import hlo
from praxis_tools.explain.hlo_runs import trip_count
from praxis_tools.explain.hlo_text import arrays_of, callees, op_name_of, parse, root_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """A breakdown of a step's memory on one device, in bytes.

    Attributes:
      peak: arguments + outputs - donated + temporaries, according to the compiler.
      weights: Weights of the train state, including padding.
      slots: Optimizer slots and moving averages of weights, including padding.
      batch: All other arguments.
      gradients: Gradients of scanned layers, that is, arrays that the backward loop fills. The
        gradients of other layers are included in `temporaries`.
      activations: Activations of scanned layers that the forward pass saves for the backward pass.
        The activations of other layers are included in `temporaries`.
      temporaries: Everything else.
      padding: Padding in weights and slots.
      host: Bytes in host memory (offloaded state and activations), not included in `peak`.
    """

    peak: int
    weights: int
    slots: int
    batch: int
    gradients: int
    activations: int
    temporaries: int
    padding: int
    host: int = 0

    def table(self) -> str:
        """Returns a text table of the breakdown, largest first, then padding and host memory."""
        parts = {
            "weights": self.weights,
            "optimizer slots": self.slots,
            "batch": self.batch,
            "gradients of scanned layers": self.gradients,
            "saved activations of scanned layers": self.activations,
            "temporaries": self.temporaries,
        }
        lines = [
            f"  {name:<36}{format_bytes(size):>12}  {size / max(self.peak, 1):>6.1%}"
            for name, size in sorted(parts.items(), key=lambda part: -part[1])
        ]
        others = {
            "(padding, within weights and slots)": self.padding,
            "(in addition, in host memory)": self.host,
        }
        lines += [f"  {name:<36}{format_bytes(size):>12}" for name, size in others.items() if size]
        return "\n".join(lines)


def memory_breakdown(
    layout: StateLayout, planned: hlo.MemoryPerDevice, text: str, step: Step
) -> Memory:
    """Breaks down the memory that the compiler plans for a step.

    Args:
      layout: Layout of the train state, which a training step takes as its argument. Other steps
        only take weights, with the layout `step.layout`.
      planned: The compiler's totals, in bytes per device.
      text: HLO text of the compiled step.
      step: The step.
    """
    all_leaves = layout.leaves() if step.trains else step.layout.leaves()
    leaves = [leaf for leaf in all_leaves if not (leaf.is_on_host and planned.host)]
    weights, slots = 0, 0
    for leaf in leaves:
        if step.trains and kind_of(leaf) != "weights":
            slots += leaf.bytes_per_device
        else:
            weights += leaf.bytes_per_device
    padding = sum(leaf.bytes_per_device * leaf.padding_share for leaf in leaves)
    gradients, activations = stacked_array_bytes(text) if step.trains else (0, 0)
    batch = max(0, planned.arguments - weights - slots)
    remaining = planned.peak - weights - slots - batch
    # Arrays can share buffers, so the stacked arrays may sum to more than the remaining memory.
    activations = min(activations, max(0, remaining))
    gradients = min(gradients, max(0, remaining - activations))
    return Memory(
        peak=planned.peak,
        weights=weights,
        slots=slots,
        batch=batch,
        gradients=gradients,
        activations=activations,
        temporaries=max(0, remaining - gradients - activations),
        padding=int(padding),
        host=planned.host,
    )


def stacked_array_bytes(text: str) -> tuple[int, int]:
    """Returns the bytes of arrays filled by loops over layers, one entry per iteration.

    Args:
      text: HLO text of a compiled training step.

    Returns:
      (gradients, activations): Bytes filled by backward loops, and bytes filled by forward loops.
    """
    program = parse(text)
    entry = program.computations[program.entry]
    gradients = activations = 0
    for loop in entry.values():
        if loop.opcode != "while":
            continue
        trips = trip_count(program, entry, loop)
        body = program.computations[callees(loop, "body")[0]]
        root = root_of(body)
        if not trips or root.opcode != "tuple":
            continue
        # Use the majority of the op names in the body, because XLA drops the name of the loop
        # itself if there are several slices.
        names = [name for instruction in body.values() if (name := op_name_of(instruction))]
        is_backward = 2 * sum("transpose(" in name for name in names) > len(names)
        filled = 0
        for index, name in enumerate(root.operands):
            output = body[name]
            is_unchanged = output.opcode == "get-tuple-element" and (
                f"index={index}," in output.attributes + ","
            )
            arrays = arrays_of(output.shape)
            # With several slices, XLA peels off the last iteration of the loop.
            if not is_unchanged and arrays and arrays[0].dims[:1] in ((trips,), (trips + 1,)):
                filled += sum(array.bytes for array in arrays)
        if is_backward:
            gradients += filled
        else:
            activations += filled
    return gradients, activations


def parse_out_of_memory(error: Exception) -> tuple[int, str] | None:
    """Parses the error that XLA raises if a program does not fit in memory.

    Returns:
      (bytes needed per device, first line of the message), or None for any other error.
    """
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    sizes = [
        float(number) * 1024 ** " KMGT".index(unit or " ")
        for number, unit in re.findall(r"([\d.]+)([KMGT])?(?:iB|B)?\b(?= of|\))", message)
    ]
    first = message.strip().partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
    return (int(max(sizes)) if sizes else 0), first[:300]


def memory_advice(memory: Memory | None, layout: StateLayout, available: int) -> str:
    """Returns advice on how to make a step fit, starting with the largest use of memory.

    Args:
      memory: Memory of the step; None if the compiler ran out of memory.
      layout: Layout of the train state.
      available: Memory of a device, in bytes.
    """
    num_devices = math.prod(layout.axis_sizes.values())
    bytes_by_kind = bytes_per_device(layout)
    state = sum(bytes_by_kind.values())
    slots = state - bytes_by_kind.get("weights", 0)
    changes = []
    if state > available / 2:
        # The state should use at most half of each device; the rest is for activations.
        factor = -(-2 * state // available)
        changes.append(
            f"use a mesh of at least {factor * num_devices} devices, and shard weights and slots "
            "over it, for instance with the preset fsdp"
        )
        if slots > state / 2:
            changes.append(
                "shard the optimizer slots over the axes that replicate weights "
                "(Learner.slot_mesh_axes, ZeRO-1), move them to host memory "
                "(Learner.host_slots), or use smaller slots (adafactor, low_precision_slots)"
            )
    activations = memory.activations + memory.temporaries if memory else 0
    if memory is None or activations > available / 4 or not changes:
        changes += [
            "set the stack's checkpoint_policy to 'save_nothing' or {'iteration_input': 'offload'}",
            "use microbatches (Learner.gradient_accumulation_steps)",
            "use fewer rows per device",
            "use a chunked softmax (softmax chunk_size)",
        ]
    return "Try one of the following: " + "; ".join(changes) + "."
