"""Documents one after the other in rows, or each in a row of its own; what a task makes of them."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite import Task
from praxis_lite.core import constrain
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_tools.check.asserts.layers import drawn

PADDING = -1
NatsAndGradients = tuple[float, Any]
Lengths = Sequence[Sequence[int]]  # Of the documents in each row.


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where documents lie in rows, each int [B, T].

    Attributes:
      document: which one a token is of, counted over all rows; or PADDING.
      segment_ids: its place among those of the row, from 1; 0: padding.
      positions: of the token in its document.
    """

    document: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray

    def filled(self, filler: np.ndarray, of_documents: Sequence[np.ndarray]) -> np.ndarray:
        """Returns `filler` [B, T, ...] with the arrays [length, ...] of documents in their places.

        They are cast to the filler's dtype.
        """
        actual = filler.copy()
        for number, x in enumerate(of_documents):
            actual[self.document == number] = x
        return actual


def packing(lengths: Lengths, length: int) -> Packing:
    """Returns documents in rows of a length; as many rows as documents, the last ones empty."""
    shape = sum(map(len, lengths)), length
    segment_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    document, counter = np.full(shape, PADDING), itertools.count()
    for row, in_row in enumerate(lengths):
        start = 0
        for segment, n in enumerate(in_row, 1):
            place = row, slice(start, start + n)
            segment_ids[place], positions[place] = segment, np.arange(n)
            document[place], start = next(counter), start + n
    return Packing(document, segment_ids, positions)


def apart(lengths: Lengths, length: int) -> Packing:
    """Returns the same documents, each in a row of its own."""
    return packing([[n] for in_row in lengths for n in in_row], length)


def of_each_document(
    batch: Mapping[str, np.ndarray], packing: Packing
) -> list[dict[str, np.ndarray]]:
    """Returns the batch, and for each document the batch in which it alone has weights."""
    masks = [packing.document == item for item in range(packing.document.max() + 1)]
    return [{**batch, "weights": batch["weights"] * mask} for mask in (sum(masks), *masks)]


def nats_and_gradients(
    task: Task, batch: Mapping[str, np.ndarray], packing: Packing, mesh: Mesh | None = None
) -> list[NatsAndGradients]:
    """Returns the sum of the loss's nats, and its gradients: of all documents, and of each.

    Args:
      packing: of the tokens that are predicted.
      mesh: on which the task splits, its batch as its inputs_split_mapping; None: one device.
    """
    model, mdl_vars = task.model, drawn(task.model)
    split = (task.inputs_split_mapping or {}).get("map_2d")

    def laid_out(mdl_vars: Any) -> Any:
        if mesh is None:
            return mdl_vars
        specs = [s.partition_spec(mesh.axis_names, p) for p, s in spec_leaves(model.weight_specs())]
        leaves, treedef = jax.tree.flatten(mdl_vars)
        return jax.tree.unflatten(treedef, map(jax.lax.with_sharding_constraint, leaves, specs))

    @jax.jit
    @without_xla_errors
    def run(mdl_vars: Any, batch: Mapping[str, jax.Array]) -> NatsAndGradients:
        mdl_vars = laid_out(mdl_vars)
        batch = {name: constrain(x, split) for name, x in batch.items()}

        def objective(params: Any) -> jax.Array:
            module = model.module({**mdl_vars, "params": params})
            nats, num_tokens = task.compute_loss(module, batch, None)["loss"]
            return nats * num_tokens

        return jax.value_and_grad(objective)(mdl_vars["params"])

    with jax.set_mesh(mesh) if mesh else jax.default_device(jax.devices()[0]):
        return [jax.device_get(run(mdl_vars, item)) for item in of_each_document(batch, packing)]


def table_rows(document: int, ids_per_document: int) -> slice:
    """Returns the rows of a table of embeddings that are a document's own."""
    return slice(document * ids_per_document, (document + 1) * ids_per_document)


def check(
    actual: list[NatsAndGradients],
    wanted: list[NatsAndGradients],
    tables: Mapping[str, int],
    tolerance: float = 1e-6,
) -> None:
    """Checks nats and gradients of packed rows against those of rows apart.

    Args:
      tables: of embeddings, by name: how many ids each document has for itself.
      tolerance: of gradients, relative to the largest one.
    """
    nats, nats_apart = ([element for element, _ in runs] for runs in (actual, wanted))
    np.testing.assert_allclose(nats, nats_apart, rtol=1e-6)
    for document, (_, grads) in enumerate(actual[1:]):
        for name, ids_per_document in tables.items():
            table, local = grads[name]["emb_var"], table_rows(document, ids_per_document)
            has_any = np.any(wanted[1 + document][1][name]["emb_var"][local] != 0.0)
            assert np.any(table[local] != 0.0) == has_any
            others = np.delete(table, local, axis=0)
            np.testing.assert_array_equal(others, 0.0, err_msg=f"{document} sees another: {name}")
    of_packed = jax.tree.leaves(actual[0][1])
    sums = jax.tree.leaves(jax.tree.map(lambda *x: np.sum(x, axis=0), *[g for _, g in wanted[1:]]))
    # Of all weights: the gradient of a key's bias is 0 but for what rounding leaves.
    near = tolerance * max(np.abs(x).max() for x in sums)
    for item, total in zip(of_packed, sums, strict=True):
        np.testing.assert_allclose(item, total, rtol=0, atol=near)
