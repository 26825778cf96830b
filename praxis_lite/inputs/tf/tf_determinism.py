"""Whether a tf.data.Dataset yields the same elements again, as far as its graph tells."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any


def why_nondeterministic(tf: ModuleType, dataset: Any) -> str | None:
    """Returns the operation that makes a dataset's order or numbers differ between runs, or None.

    tf.data keeps the order of parallel operations unless told otherwise. Random operations draw
    from a state: if several calls run at a time, chance decides which draws first.
    """
    if dataset.options().deterministic is False:
        return "its options have deterministic=False"
    variant = tf.data.experimental.to_variant(dataset)
    ignore_state = 1  # ExternalStatePolicy: counters and tables may be in the graph.
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant, external_state_policy=ignore_state, strip_device_assignment=True
    )
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    functions = {item.signature.name: list(item.node_def) for item in graph.library.function}
    for node in [*graph.node, *(node for nodes in functions.values() for node in nodes)]:
        if node.attr["deterministic"].s == b"false":
            return f"{node.op} has deterministic=False"
        if "Parallel" in node.op:
            for called in _called(node, functions, set()):
                if _draws(called):
                    return f"{called.op} runs in a function that {node.op} calls in parallel"
        elif _draws(node) and not (node.attr["seed"].i or node.attr["seed2"].i):
            return f"{node.op} has no seed"
    return None


def _called(node: Any, functions: dict[str, list[Any]], seen: set[str]) -> Iterator[Any]:
    """Yields the nodes of all functions that a node calls, and those call."""
    for attribute in node.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name in functions and function.name not in seen:
                seen.add(function.name)
                for inner in functions[function.name]:
                    yield inner
                    yield from _called(inner, functions, seen)


def _draws(node: Any) -> bool:
    """Returns True if a node draws random numbers from a state."""
    # Datasets (shuffle) have their own seeds, and one draws at a time.
    return "seed2" in node.attr and "Dataset" not in node.op
