"""Parts of a device's memory in a step, and the changes to make where it does not fit."""

import dataclasses
import math
import re

from praxis_lite.core.errors import format_bytes
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.run.trainer.layout_table import bytes_per_device, kind_of
from praxis_lite.tools.explain import hlo
from praxis_lite.tools.explain.hlo_runs import trip_count
from praxis_lite.tools.explain.hlo_text import arrays_of, callees, op_name_of, parse, root_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a device in a step.

    Attributes:
      peak: arguments + outputs - donated + temporaries, as the compiler plans them.
      weights, slots: of the state, padding included; slots with averages of weights.
      batch: all else that a step is handed.
      gradients, activations: of scanned stacks: what the backward pass's loop fills, and what the
        forward pass's keeps for it. Of other layers they are among the temporaries.
      temporaries: all else.
      padding: the part of weights and slots that is padding.
      host: in the host's memory, of the state and what is offloaded to it; no part of `peak`.
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
        """Returns a line per part, the largest first, and the padding."""
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
        if self.padding:
            lines.append(f"  {'(padding, within weights and slots)':<36}"
                         f"{format_bytes(self.padding):>12}")
        if self.host:
            name = "(besides, in the host's memory)"
            lines.append(f"  {name:<36}{format_bytes(self.host):>12}")
        return "\n".join(lines)


def memory_of(layout: StateLayout, planned: hlo.MemoryPerDevice, text: str, step: Step) -> Memory:
    """Returns how the memory that the compiler plans for a step is taken.

    Args:
      step: one that trains holds all of the layout, others weights alone, in their own layout.
      text: of the compiled step.
    """
    held = list(layout.leaves() if step.trains else step.layout.leaves())
    weights, slots = 0, 0
    held = [leaf for leaf in held if not (leaf.is_on_host and planned.host)]
    for leaf in held:
        if step.trains and kind_of(leaf) != "weights":
            slots += leaf.bytes_per_device
        else:
            weights += leaf.bytes_per_device
    padding = sum(leaf.bytes_per_device * leaf.padding_share for leaf in held)
    gradients, activations = bytes_of_stacks(text) if step.trains else (0, 0)
    batch = max(0, planned.arguments - weights - slots)
    rest = planned.peak - weights - slots - batch
    # Buffers are shared: what the stacks hold cannot be more than there is.
    activations = min(activations, max(0, rest))
    gradients = min(gradients, max(0, rest - activations))
    return Memory(
        peak=planned.peak, weights=weights, slots=slots, batch=batch, gradients=gradients,
        activations=activations, temporaries=max(0, rest - gradients - activations),
        padding=int(padding), host=planned.host,
    )


def bytes_of_stacks(text: str) -> tuple[int, int]:
    """Returns the bytes of the arrays, an entry per turn, that backward and forward loops fill."""
    program = parse(text)
    entry = program.computations[program.entry]
    totals = {True: 0, False: 0}
    for loop in entry.values():
        if loop.opcode != "while":
            continue
        trips = trip_count(program, entry, loop)
        body = program.computations[callees(loop, "body")[0]]
        root = root_of(body)
        if not trips or root.opcode != "tuple":
            continue
        # By most names in it: with several slices XLA drops the loop's own.
        names = [name for element in body.values() if (name := op_name_of(element))]
        is_backward = 2 * sum("transpose(" in name for name in names) > len(names)
        for index, name in enumerate(root.operands):
            item = body[name]
            kept = item.opcode == "get-tuple-element" and f"index={index}," in item.attributes + ","
            arrays = arrays_of(item.shape)
            # With several slices XLA takes the last turn out of the loop.
            if not kept and arrays and arrays[0].dims[:1] in ((trips,), (trips + 1,)):
                totals[is_backward] += sum(array.bytes for array in arrays)
    return totals[True], totals[False]


def out_of_memory(error: Exception) -> tuple[int, str] | None:
    """Returns the bytes that a compiler wanted of a device, and its words; None: another error."""
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
    """Returns, for a step that does not fit, what would make it fit, the largest part first.

    Args:
      memory: None where the compiler gave up.
    """
    num_devices = math.prod(layout.axis_sizes.values())
    held = bytes_per_device(layout)
    state = sum(held.values())
    slots = state - held.get("weights", 0)
    changes = []
    if state > available / 2:
        more = -(-2 * state // available)
        changes.append(
            f"a mesh of at least {more * num_devices} devices, over which a preset such as fsdp "
            "splits weights and slots"
        )
        if slots > state / 2:
            changes.append(
                "slots split over the axes that hold copies (Learner.slot_mesh_axes, ZeRO-1), "
                "slots on the host (Learner.host_slots), or smaller ones (adafactor, "
                "low_precision_slots)"
            )
    activations = memory.activations + memory.temporaries if memory else 0
    words = [
        "checkpoint_policy='save_nothing' of the stack, or {'iteration_input': 'offload'}",
        "micro-batches (Learner.gradient_accumulation_steps)", "fewer rows per device",
        "a softmax in chunks (softmax chunk_size)",
    ]
    if memory is None or activations > available / 4 or not changes:
        changes += words
    return "Change one of: " + "; ".join(changes) + "."
