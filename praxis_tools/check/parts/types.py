"""Compares a layout with the shardings in the array types that JAX infers.

If mesh axes are Explicit (sharding in types), JAX infers the sharding of each result from its
operands while a step is being traced. Nothing is compiled or run, so the comparison is independent
of XLA.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import PartitionSpec

from praxis_lite.core.errors import first_few
from praxis_lite.core.jaxprs import all_eqns, open_jaxpr
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.devices.axis_types import RESHARD_SCOPE, explicit_axes_of
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.check import Check
from praxis_tools.check.runs.on_mesh import TaskRunner, on_mesh, structs
from praxis_tools.explain.hlo_layers import GRADIENT_OF, layers_of_name

PyTree = Any
# Operations after the typed results of a step, which convert them to Auto axes and pad them.
_FINAL_OPERATIONS = ("reshard", "sharding_constraint", "pad")


@dataclasses.dataclass(frozen=True)
class TypeWitness:
    """The sharding types that JAX infers in a traced training step.

    Attributes:
      confirmed: Paths of the leaves whose inferred spec equals the spec in the layout.
      others: Messages for all other leaves, such as "PATH is PartitionSpec(...), but its
        layout is ...".
      as_declared: Number of activations whose inferred sharding equals their sharding constraint.
      moved: Messages for all other activations with a sharding constraint, such as
        "LAYER: float32[16, 12, 32] ... to ...".
      untyped: Maps the path of a layer to the reason why JAX cannot infer types inside this layer.
    """

    confirmed: tuple[str, ...]
    others: tuple[str, ...]
    as_declared: int
    moved: tuple[str, ...]
    untyped: dict[str, str]

    def lines(self) -> list[str]:
        """Formats the report, one sentence per line."""
        num = len(self.confirmed) + len(self.others)
        lines = [
            f"JAX's types confirm the layout of {len(self.confirmed)} of {num} arrays in the state "
            f"after a step{_more(self.others)}",
            f"JAX's types confirm {self.as_declared} of {self.as_declared + len(self.moved)} "
            f"sharding constraints on activations; the others reshard them{_more(self.moved)}",
        ]
        if self.untyped:
            reasons = [f"{path} ({reason})" for path, reason in self.untyped.items()]
            lines.append(
                f"JAX's types do not cover operations inside {first_few(reasons, 2, '; ')}"
            )
        return [f"{line}." for line in lines]


def type_witness(partitioner: Partitioner, element_spec: PyTree) -> TypeWitness:
    """Traces a training step and compares the types that JAX infers with the layout.

    Args:
      partitioner: Partitioner on a mesh with Explicit axes.
      element_spec: Shapes and types of a batch.

    Raises:
      ConfigError: JAX cannot infer types for the model. The message contains the source line or the
        dim that is not divisible.
    """
    step = partitioner.train_step
    jaxpr = open_jaxpr(step.trace(element_spec).jaxpr)
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    confirmed, others = [], []
    # The first outputs of a train step are the leaves of the new state.
    for leaf, var in zip(partitioner.layout.leaves(), jaxpr.outvars, strict=False):
        actual = _inferred_spec(var, producers)
        if actual == leaf.spec:
            confirmed.append(leaf.path)
        else:
            others.append(f"{leaf.path} is {actual}, but its layout is {leaf.spec}")
    changes = list(_constraint_changes(jaxpr))
    return TypeWitness(
        tuple(confirmed),
        tuple(others),
        sum(not text for text in changes),
        tuple(dict.fromkeys(text for text in changes if text)),
        dict(step.untyped),
    )


def _inferred_spec(var: Any, producers: dict[Any, Any]) -> PartitionSpec | None:
    """Returns the spec in the inferred type of a result, or None if no axis is Explicit."""
    while (eqn := producers.get(var)) is not None and eqn.primitive.name in _FINAL_OPERATIONS:
        (var, *_) = eqn.invars
        if explicit_axes_of(var.aval.sharding.mesh):
            return _spec_of(var.aval)
    return None


def _spec_of(aval: Any) -> PartitionSpec:
    """Returns the spec in an array type, extended to the array's rank."""
    spec = aval.sharding.spec
    return PartitionSpec(*spec, *(None,) * (aval.ndim - len(spec)))


def _constraint_changes(jaxpr: Any) -> Iterator[str]:
    """Describes the sharding change at each activation constraint; yields "" for no change."""
    for eqn in all_eqns(jaxpr.eqns):
        name = str(eqn.source_info.name_stack)
        if eqn.primitive.name != "reshard" or name.rpartition("/")[2] != RESHARD_SCOPE:
            continue
        (layer, *_) = layers_of_name(f"{name.removesuffix(RESHARD_SCOPE)}operation") or [""]
        if layer.startswith(GRADIENT_OF):
            continue
        x: Any = eqn.invars[0].aval
        old, new = _spec_of(x), _spec_of(eqn.outvars[0].aval)
        layer = layer or "the step"
        yield "" if old == new else f"{layer}: {x.dtype}{list(x.shape)} {old} to {new}"


def _more(texts: tuple[str, ...]) -> str:
    return f" ({first_few(texts, 3, '; ')})" if texts else ""


def types_of(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Adds notes to the certificate about the types that JAX infers; compares no values."""
    shape = tuple(runner.mesh.shape.values())
    try:
        typed = on_mesh(check.job, check.task, shape, axis_types="explicit")
        witness = type_witness(typed.partitioner, structs(check.batches[0]))
    except ValueError as error:
        check.add_note(f"The layout was not compared with JAX's types. {error}")
        return
    for line in witness.lines():
        check.add_note(line)
    yield []
