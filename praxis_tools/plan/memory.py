"""The parts of a device's memory in a step, and what to change if the step does not fit."""

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
    """Bytes on a device in a step.

    Attributes:
      peak: arguments + outputs - donated + temporaries, as the compiler plans them.
      weights, slots: of the state, with padding; moving averages of weights count as slots.
      batch: all other arguments.
      gradients, activations: of scanned layers: arrays that the loop of the backward pass fills,
        and those that the forward pass saves for it. Those of other layers are temporaries.
      temporaries: everything else.
      padding: the padding within weights and slots.
      host: bytes in host memory (offloaded state and activations), not part of `peak`.
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
        """Returns a line per part, the largest first, then padding and host memory."""
        parts = {
            "weights": self.weights, "optimizer slots": self.slots, "batch": self.batch,
            "gradients of scanned layers": self.gradients,
            "activations kept of scanned layers": self.activations,
            "temporaries": self.temporaries,
        }
        lines = [
            f"  {name:<36}{format_bytes(size):>12}  {size / max(self.peak, 1):>6.1%}"
            for name, size in sorted(parts.items(), key=lambda part: -part[1])
        ]
        others = {
            "(padding, within weights and slots)": self.padding,
            "(besides, in the host's memory)": self.host,
        }
        lines += [
            f"  {name:<36}{format_bytes(size):>12}" for name, size in others.items() if size
        ]
        return "\n".join(lines)


def memory_of(layout: StateLayout, planned: hlo.MemoryPerDevice, text: str, step: Step) -> Memory:
    """Divides the memory that the compiler plans for a step into its parts.

    Args:
      layout: the layout of the train state, which a training step takes. Other steps take weights
        only, in the step's own layout.
      text: the compiled step.
    """
    leaves = layout.leaves() if step.trains else step.layout.leaves()
    leaves = [leaf for leaf in leaves if not (leaf.is_on_host and planned.host)]
    weights, slots = 0, 0
    for leaf in leaves:
        if step.trains and kind_of(leaf) != "weights":
            slots += leaf.bytes_per_device
        else:
            weights += leaf.bytes_per_device
    padding = sum(leaf.bytes_per_device * leaf.padding_share for leaf in leaves)
    gradients, activations = bytes_of_stacks(text) if step.trains else (0, 0)
    batch = max(0, planned.arguments - weights - slots)
    rest = planned.peak - weights - slots - batch
    # Arrays can share buffers, so the sum over stacks may exceed the memory that is left.
    activations = min(activations, max(0, rest))
    gradients = min(gradients, max(0, rest - activations))
    return Memory(
        peak=planned.peak, weights=weights, slots=slots, batch=batch, gradients=gradients,
        activations=activations, temporaries=max(0, rest - gradients - activations),
        padding=int(padding), host=planned.host,
    )


def bytes_of_stacks(text: str) -> tuple[int, int]:
    """Returns the bytes of stacked arrays, one entry per layer, that loops over layers fill.

    Returns:
      Bytes filled by backward loops (gradients), and by forward loops (saved activations).
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
        # A majority of names decides: with several slices XLA drops the name of the loop itself.
        names = [name for instruction in body.values() if (name := op_name_of(instruction))]
        is_backward = 2 * sum("transpose(" in name for name in names) > len(names)
        filled = 0
        for index, name in enumerate(root.operands):
            output = body[name]
            is_unchanged = output.opcode == "get-tuple-element" and (
                f"index={index}," in output.attributes + ","
            )
            arrays = arrays_of(output.shape)
            # With several slices XLA peels off the last iteration of the loop.
            if not is_unchanged and arrays and arrays[0].dims[:1] in ((trips,), (trips + 1,)):
                filled += sum(array.bytes for array in arrays)
        if is_backward:
            gradients += filled
        else:
            activations += filled
    return gradients, activations


def out_of_memory(error: Exception) -> tuple[int, str] | None:
    """Returns the bytes per device that an out-of-memory error asks for, and its message.

    Returns None for any other error.
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


def what_to_change(memory: Memory | None, layout: StateLayout, available: int) -> str:
    """Returns advice for a step that does not fit, about the largest part of its memory first.

    Args:
      memory: None if the compiler ran out of memory.
      available: bytes of a device.
    """
    num_devices = math.prod(layout.axis_sizes.values())
    bytes_by_kind = bytes_per_device(layout)
    state = sum(bytes_by_kind.values())
    slots = state - bytes_by_kind.get("weights", 0)
    changes = []
    if state > available / 2:
        factor = -(-2 * state // available)
        changes.append(
            f"a mesh of at least {factor * num_devices} devices, over which a preset such as fsdp "
            "splits weights and slots"
        )
        if slots > state / 2:
            changes.append(
                "slots split over the axes that hold copies (Learner.slot_mesh_axes, ZeRO-1), "
                "slots on the host (Learner.host_slots), or smaller ones (adafactor, "
                "low_precision_slots)"
            )
    activations = memory.activations + memory.temporaries if memory else 0
    for_activations = [
        "checkpoint_policy='save_nothing' of the stack, or {'iteration_input': 'offload'}",
        "micro-batches (Learner.gradient_accumulation_steps)", "fewer rows per device",
        "a softmax in chunks (softmax chunk_size)",
    ]
    if memory is None or activations > available / 4 or not changes:
        changes += for_activations
    return "Change one of: " + "; ".join(changes) + "."
