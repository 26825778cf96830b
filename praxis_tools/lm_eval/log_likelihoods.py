"""Computes log-likelihoods of continuations, for lm_eval's `loglikelihood` requests."""

import inspect
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.host_memory import FirstRuns
from praxis_lite.inputs.text.length_classes import batches_by_length
from praxis_tools.lm_eval.evaluated_model import EvaluatedModel
from praxis_tools.lm_eval.progress import Progress

# B batch, T time, V vocabulary.
Pair = tuple[Sequence[int], Sequence[int]]
_log = logging.getLogger(__name__)


class Score(NamedTuple):
    """The score of a continuation.

    Attributes:
      log_likelihood: Sum of the log-probabilities of the continuation's ids, in nats.
      is_greedy: Whether every id is the most likely id at its position.
    """

    log_likelihood: float
    is_greedy: bool


class LogLikelihoods:
    """Scores continuations on the model's mesh, with one compiled function per length class.

    Args:
      model: The evaluated model.
      num_rows: Number of rows in a batch.
    """

    def __init__(self, model: EvaluatedModel, num_rows: int):
        self._model, self._num_rows = model, num_rows
        partitioner, task = model.partitioner, model.partitioner.task

        def scores(mdl_vars: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            return _scores(task.module(mdl_vars), batch)

        self._compiled = jax.jit(
            partitioner.with_mdl_vars(scores), out_shardings=partitioner.replicated
        )
        self._runs = FirstRuns("Scoring continuations", "Lower batch_size or max_length.")

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """Returns the score of the continuation in each (context, continuation) pair.

        If a pair has more than max_length + 1 ids, its first ids are removed, with a warning.

        Raises:
          ConfigError: A context or continuation is empty, a continuation has more than max_length
            ids, or an id is not in the model's vocabulary.
        """
        rows = [self._truncate(*pair) for pair in pairs]
        lengths = [len(row) - 1 for row, _ in rows]  # The last id is only a label, not an input.
        scores: dict[int, Score] = {}
        progress = Progress("scored", len(rows))
        for indices, length in batches_by_length(lengths, self._num_rows, self._model.max_length):
            batch = self._batch([rows[index] for index in indices], length)
            log_likelihoods, is_greedy = jax.device_get(
                self._runs.run(self._compiled, self._model.mdl_vars, batch, key=length)
            )
            for row, index in enumerate(indices):
                scores[index] = Score(float(log_likelihoods[row]), bool(is_greedy[row]))
            progress.add(len(indices))
        return [scores[index] for index in range(len(rows))]

    def _truncate(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[Any, int]:
        """Returns the last max_length + 1 ids of a request and the number of scored ids."""
        max_length, num_scored = self._model.max_length, len(continuation)
        if not context or not continuation:
            raise ConfigError(
                f"A request has {len(context)} ids of context and {num_scored} of continuation; "
                "expected at least one of each. Fix the task: the continuation must not be empty, "
                "and its tokens must not belong to the context."
            )
        if num_scored > max_length:
            raise ConfigError(
                f"A continuation has {num_scored} ids, but max_length is {max_length}. Raise "
                "max_length, or remove such requests from the task."
            )
        row = [*context, *continuation]
        if len(row) > max_length + 1:
            _log.warning(
                "a context of %d ids and a continuation of %d exceed max_length, %d: the first %d "
                "ids are removed",
                len(context),
                num_scored,
                max_length,
                len(row) - max_length - 1,
            )
        return row[-(max_length + 1) :], num_scored

    def _batch(self, rows: Sequence[tuple[Sequence[int], int]], length: int) -> Any:
        shape = self._num_rows, length
        arrays = {
            "ids": np.zeros(shape, np.int32),
            "labels": np.zeros(shape, np.int32),
            "weights": np.zeros(shape, np.float32),
            "paddings": np.ones(shape, np.float32),
        }
        for i, (row, num_scored) in enumerate(rows):
            end = len(row) - 1
            arrays["ids"][i, :end], arrays["labels"][i, :end] = row[:-1], row[1:]
            # Label j follows id j, so the continuation's labels are at the end of the row.
            arrays["weights"][i, end - num_scored : end] = 1.0
            arrays["paddings"][i, :end] = 0.0
        return self._model.partitioner.global_batch(arrays)


def _scores(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the log-likelihood of each row's scored labels, and whether all are most likely."""
    takes_paddings = "paddings" in inspect.signature(type(model).__call__).parameters
    paddings = {"paddings": batch["paddings"]} if takes_paddings else {}
    logits_BTV = model(batch["ids"], **paddings)[0].astype(jnp.float32)
    labels_BT1, is_scored_BT = batch["labels"][:, :, None], batch["weights"] > 0
    log_prob_BT = jnp.take_along_axis(logits_BTV, labels_BT1, axis=-1)[:, :, 0] - jax.nn.logsumexp(
        logits_BTV, axis=-1
    )
    is_likeliest_BT = jnp.argmax(logits_BTV, axis=-1) == batch["labels"]
    return (
        jnp.sum(jnp.where(is_scored_BT, log_prob_BT, 0.0), axis=1),
        jnp.all(is_likeliest_BT | ~is_scored_BT, axis=1),
    )
