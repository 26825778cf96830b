"""What JAX's own types confirm of a layout: weights after a step, and arrays at layers' borders.

JAX infers the type of each result from those of its arguments, operation by operation, while a step
is traced over Explicit axes. Nothing is compiled or run, and XLA has no part in it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import PartitionSpec

from praxis_lite.core.errors import few
from praxis_lite.core.jaxprs import all_eqns, open_jaxpr
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.devices.axis_types import RESHARD_SCOPE, explicit_axes_of
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.check import Check
from praxis_tools.check.runs.on_mesh import TaskRunner, on_mesh, structs
from praxis_tools.explain.hlo_layers import GRADIENT_OF, layers_of_name

PyTree = Any
# What comes behind a typed result: it leaves the types, and is padded and laid out.
_LEAVING = ("reshard", "sharding_constraint", "pad")


@dataclasses.dataclass(frozen=True)
class TypeWitness:
    """Arrays of a traced training step by what JAX's types say of them.

    Attributes:
      confirmed: paths of the state's leaves whose new value has, by JAX's rules, the layout's type.
      others: of leaves that have not: "PATH is PartitionSpec(...), declared is ...".
      as_declared: activations that arrive at a constraint with the type that it states.
      moved: of those that do not: "LAYER: float32[16, 12, 32] from ... to ...".
      untyped: by path of a layer why JAX has no types of its inside.
    """

    confirmed: tuple[str, ...]
    others: tuple[str, ...]
    as_declared: int
    moved: tuple[str, ...]
    untyped: dict[str, str]

    def lines(self) -> list[str]:
        """Returns the lines of a report."""
        num = len(self.confirmed) + len(self.others)
        lines = [
            f"JAX's types confirm the layout of {len(self.confirmed)} of {num} arrays of the state "
            f"after a step{_more(self.others)}",
            f"They confirm {self.as_declared} of {self.as_declared + len(self.moved)} activations "
            f"as they reach a constraint; it moves the others{_more(self.moved)}",
        ]
        if self.untyped:
            reasons = [f"{path} ({reason})" for path, reason in self.untyped.items()]
            lines.append(f"They say nothing of the inside of {few(reasons, 2, '; ')}")
        return [f"{line}." for line in lines]


def type_witness(partitioner: Partitioner, element_spec: PyTree) -> TypeWitness:
    """Returns the witness of a training step for batches of `element_spec`.

    Args:
      partitioner: on a mesh that has Explicit axes.

    Raises:
      ConfigError: JAX has no types of the model; names the line, or what is not divided.
    """
    step = partitioner.train_step
    jaxpr = open_jaxpr(step.trace(element_spec).jaxpr)
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    confirmed, others = [], []
    for leaf, var in zip(partitioner.layout.leaves(), jaxpr.outvars, strict=False):
        actual = _type_of(var, made_by)
        if actual == leaf.spec:
            confirmed.append(leaf.path)
        else:
            others.append(f"{leaf.path} is {actual}, declared is {leaf.spec}")
    borders = list(_borders(jaxpr))
    return TypeWitness(
        tuple(confirmed), tuple(others), sum(not text for text in borders),
        tuple(dict.fromkeys(text for text in borders if text)), dict(step.untyped),
    )


def _type_of(var: Any, made_by: dict[Any, Any]) -> PartitionSpec | None:
    """Returns the spec of a result's type, or None if it has none."""
    while (eqn := made_by.get(var)) is not None and eqn.primitive.name in _LEAVING:
        (var, *_) = eqn.invars
        if explicit_axes_of(var.aval.sharding.mesh):
            return _spec_of(var.aval)
    return None


def _spec_of(aval: Any) -> PartitionSpec:
    """Returns the spec of a type, extended to its rank."""
    spec = aval.sharding.spec
    return PartitionSpec(*spec, *(None,) * (aval.ndim - len(spec)))


def _borders(jaxpr: Any) -> Iterator[str]:
    """Yields "" for an array that reaches a constraint as it states, else where it is moved."""
    for eqn in all_eqns(jaxpr.eqns):
        name = str(eqn.source_info.name_stack)
        if eqn.primitive.name != "reshard" or name.rpartition("/")[2] != RESHARD_SCOPE:
            continue
        (layer, *_) = layers_of_name(f"{name.removesuffix(RESHARD_SCOPE)}operation") or [""]
        if layer.startswith(GRADIENT_OF):
            continue
        x, result = eqn.invars[0].aval, eqn.outvars[0].aval
        old, new = _spec_of(x), _spec_of(result)
        is_same = old == new
        yield "" if is_same else f"{layer or 'the step'}: {x.dtype}{list(x.shape)} {old} to {new}"


def _more(texts: tuple[str, ...]) -> str:
    return f" ({few(texts, 3, '; ')})" if texts else ""


def types_of(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Notes in a check's certificate what JAX's types confirm; it compares no numbers."""
    shape = tuple(runner.mesh.shape.values())
    try:
        typed = on_mesh(check.job, check.task, shape, axis_types="explicit")
        witness = type_witness(typed.partitioner, structs(check.batches[0]))
    except ValueError as error:
        check.remark(f"JAX's types confirm nothing. {error}")
        return
    for line in witness.lines():
        check.remark(line)
    yield []
