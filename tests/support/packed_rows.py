"""Compares the loss and gradients of packed documents with those of one document per row."""

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
Lengths = Sequence[Sequence[int]]  # Lengths of the documents in each row.


@dataclasses.dataclass(frozen=True)
class Packing:
    """The positions of documents in rows; each array is int [B, T].

    Attributes:
      document: Index of the token's document among the documents of all rows, or PADDING.
      segment_ids: Index of the document in its row, from 1, or 0 for padding.
      positions: Index of the token in its document.
    """

    document: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray

    def filled(self, filler: np.ndarray, of_documents: Sequence[np.ndarray]) -> np.ndarray:
        """Returns a copy of `filler` [B, T, ...] that contains the documents at their positions.

        Args:
          filler: Values for padding. Its dtype is used for the result.
          of_documents: An array [length, ...] for each document.
        """
        actual = filler.copy()
        for number, x in enumerate(of_documents):
            actual[self.document == number] = x
        return actual


def packing(lengths: Lengths, length: int) -> Packing:
    """Packs documents into rows; adds empty rows until there are as many rows as documents."""
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
    """Returns a packing of the same documents with one document per row."""
    return packing([[n] for in_row in lengths for n in in_row], length)


def of_each_document(
    batch: Mapping[str, np.ndarray], packing: Packing
) -> list[dict[str, np.ndarray]]:
    """Returns the batch, followed by a copy per document in which only it has weights."""
    masks = [packing.document == item for item in range(packing.document.max() + 1)]
    return [{**batch, "weights": batch["weights"] * mask} for mask in (sum(masks), *masks)]


def nats_and_gradients(
    task: Task, batch: Mapping[str, np.ndarray], packing: Packing, mesh: Mesh | None = None
) -> list[NatsAndGradients]:
    """Returns (total loss in nats, gradients) for all documents together, then for each document.

    Args:
      task: The task.
      batch: The batch.
      packing: Packing of the predicted tokens.
      mesh: Mesh over which weights and batch are sharded, or None for one device.
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
    """Returns the rows of an embedding table that only this document uses."""
    return slice(document * ids_per_document, (document + 1) * ids_per_document)


def check(
    actual: list[NatsAndGradients],
    wanted: list[NatsAndGradients],
    tables: Mapping[str, int],
    tolerance: float = 1e-6,
) -> None:
    """Checks losses and gradients of packed rows against those with one document per row.

    Args:
      actual: Results for packed rows.
      wanted: Results for one document per row.
      tables: Number of ids that each document uses exclusively, by name of the embedding table.
      tolerance: Tolerance of gradients, relative to the largest gradient.
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
    # Relative to all weights: the gradient of the keys' bias is 0 except for rounding errors.
    near = tolerance * max(np.abs(x).max() for x in sums)
    for item, total in zip(of_packed, sums, strict=True):
        np.testing.assert_allclose(item, total, rtol=0, atol=near)
