"""Decodes prompt datasets with restored weights, and returns records."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from praxis_lite.core.errors import require
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.batch_sharding import check_ids, global_batch
from praxis_lite.decode.continuous_batching import ContinuousBatching, NewTokens, Prompt
from praxis_lite.decode.loop import sample_keys
from praxis_lite.decode.sampling import Greedy
from praxis_lite.decode.stop_strings import ContinuationText
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.inputs.pipeline_checks import checked_batches
from praxis_lite.trainer.compilation import compile_step

# Number of steps after which the host reads the new tokens. Each read waits for the devices, but a
# row that has produced a stop string is only ended at the next read.
STEPS_BETWEEN_READS = 8
# Maximum number of rows to decode at a time if tokens are streamed.
MAX_STREAMED_ROWS = 8

OnTokens = Callable[[NewTokens], None]
# Compiled functions for continuous batching, keyed by (num_rows, prompt_length).
Batchings = dict[tuple[int, int], ContinuousBatching]


@runtime_checkable
class DecodesByRow(Protocol):
    """A task whose prompts can be decoded independently by continuous batching."""

    def row_keys(self, key: jax.Array, num_rows: int) -> jax.Array:
        """Returns a random key for each row of a batch."""

    def per_row_settings(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the decoder arguments with a separate value for each row, keyed by name."""


@dataclasses.dataclass(frozen=True)
class PromptDecoder:
    """Decodes prompt datasets with a checkpoint's weights.

    Attributes:
      partitioner: Partitioner of the task, with its mesh.
      mdl_vars: The weights on the mesh, as returned by `Partitioner.for_decoding`.
      step: The checkpoint's step.
      seed: Seed for sampling; the step and the batch index are folded in.
      batchings: Compiled functions for continuous batching. Decoders for different checkpoints may
        share these functions.
      first_batch: Index of the pipeline's first batch, used for random keys. Nonzero if the
        pipeline contains only a part of a larger dataset, for example one turn of a chat.
    """

    partitioner: Partitioner
    mdl_vars: Any
    step: int
    seed: int
    batchings: Batchings = dataclasses.field(default_factory=dict, repr=False)
    first_batch: int = 0

    def records(
        self, name: str, pipeline: InputPipeline, on_tokens: OnTokens | None = None
    ) -> list[dict[str, Any]]:
        """Decodes all prompts in a dataset.

        Args:
          name: Name of the dataset.
          pipeline: The dataset.
          on_tokens: Called with new tokens as they are decoded. `NewTokens.index` counts the
            hypotheses for all prompts, excluding padding rows. Not called for beam search, or if
            there are several processes.

        Returns:
          The task's records, in the order of the prompts.

        Raises:
          ConfigError: A batch contains ids outside the model's vocabulary, or the decoder requires
            a single process but there are several.
        """
        task = self.partitioner.task
        decoder = task.decoder
        if not isinstance(decoder, Greedy) or jax.process_count() > 1:
            on_tokens = None
        if on_tokens is not None or (isinstance(decoder, Greedy) and decoder.num_cache_slots):
            decoded = self._continuously(name, pipeline, on_tokens)
        else:
            decoded = self._batch_by_batch(name, pipeline)
        return [
            record
            for inputs, outputs in decoded
            for record in task.decode_to_records(inputs, jax.device_get(outputs))
        ]

    def _batches(self, name: str, pipeline: InputPipeline) -> Iterator[tuple[Any, jax.Array]]:
        """Yields (rows with validated ids, random key) for each batch."""
        num_ids = self.partitioner.task.num_ids()
        for index, inputs in checked_batches(pipeline, f"decode_datasets.{name}"):
            check_ids(inputs, num_ids, f"decode_datasets.{name}, batch {index}")
            index += self.first_batch
            yield inputs, self.partitioner.batch_key(self.seed, self.step, index)

    def _batch_by_batch(self, name: str, pipeline: InputPipeline) -> Iterator[tuple[Any, Any]]:
        """Yields (inputs, outputs) for each batch.

        Every process gets all rows, because records are built from the complete batch.
        """
        num_rows = pipeline.batch_size
        rows = self.partitioner.process_rows(num_rows)
        compile_step(self.partitioner.decode_step, pipeline, f"decode_datasets.{name}")
        for inputs, key in self._batches(name, pipeline):
            local_rows = jax.tree.map(lambda x: x[rows] if x.ndim else x, inputs)
            batch = global_batch(local_rows, self.partitioner.mesh, num_rows)
            yield inputs, self.partitioner.decode_step(self.mdl_vars, batch, key)

    def _continuously(
        self, name: str, pipeline: InputPipeline, on_tokens: OnTokens | None
    ) -> Iterator[tuple[Any, Any]]:
        """Yields (inputs, outputs) for each batch, decoded by continuous batching.

        The tokens are the same as in `_batch_by_batch`. Every hypothesis for every prompt is a
        separate `Prompt` in the stream. The tokens generated for the `Prompt` are written to the
        output arrays in `batches`, at the row in `positions`.
        """
        require(
            jax.process_count() == 1,
            "The number of processes",
            jax.process_count(),
            "1",
            "decoder.num_cache_slots needs all prompts in one process. Set it to 0, or decode in "
            "one process.",
        )
        task, prompt_length = self.partitioner.task, pipeline.element_spec()["ids"].shape[1]
        assert isinstance(task, DecodesByRow)
        decoder = task.decoder
        max_streamed = min(pipeline.batch_size * decoder.num_hyps, MAX_STREAMED_ROWS)
        num_slots = decoder.num_cache_slots or max_streamed
        batching = self._batching(num_slots, prompt_length)
        batches: list[tuple[Any, dict[str, np.ndarray]]] = []
        positions: list[tuple[int, int]] = []  # (batch, output row) for each prompt.

        def prompts() -> Iterator[Prompt]:
            for inputs, key in self._batches(name, pipeline):
                num_rows, shape = len(inputs["ids"]), (decoder.max_decode_steps,)
                num_hyps = num_rows * decoder.num_hyps
                empty = {
                    "output_ids": np.zeros((num_hyps, *shape), np.int32),
                    "logprobs": np.zeros((num_hyps, *shape), np.float32),
                    "decode_lengths": np.zeros((num_hyps,), np.int32),
                }
                batches.append((inputs, empty))
                keys = sample_keys(task.row_keys(key, num_rows), decoder.num_hyps)
                settings = task.per_row_settings(inputs)
                for hyp in range(num_hyps):
                    row = hyp // decoder.num_hyps
                    # Rows with weight 0 are padding.
                    if inputs["weights"][row] > 0:
                        positions.append((len(batches) - 1, hyp))
                        yield Prompt(
                            inputs["ids"][row],
                            inputs["prefix_lengths"][row],
                            keys[hyp],
                            **{setting: x[row] for setting, x in settings.items()},
                        )

        # If tokens are streamed, they are read after every step.
        stream_settings: dict[str, Any] = {} if on_tokens is None else {"num_steps": 1}
        if decoder.stop_strings:
            # Compare text, because different tokens can spell the same stop string.
            def text_of(prompt: Prompt) -> ContinuationText:
                ids = prompt.ids[: prompt.length]
                return ContinuationText(task.tokenizer, ids, decoder.stop_strings)

            stream_settings = {
                "num_steps": STEPS_BETWEEN_READS,
                "text_of": text_of,
            } | stream_settings
        for new in batching.stream(self.mdl_vars, prompts(), **stream_settings):
            if on_tokens is not None:
                on_tokens(new)
            index, hyp = positions[new.index]
            outputs = batches[index][1]
            start = outputs["decode_lengths"][hyp]
            outputs["output_ids"][hyp, start : start + len(new.ids)] = new.ids
            outputs["logprobs"][hyp, start : start + len(new.ids)] = new.logprobs
            outputs["decode_lengths"][hyp] += len(new.ids)
        if on_tokens is None:
            assert batching.latest is not None
            _log.info(batching.latest.summary(f"rows of {name}"))
        for inputs, outputs in batches:
            yield inputs, decoder.outputs_of(outputs)

    def _batching(self, num_rows: int, prompt_length: int) -> ContinuousBatching:
        """Returns the cached functions for this number of rows and prompt length."""
        if (num_rows, prompt_length) not in self.batchings:
            task = self.partitioner.task
            self.batchings[num_rows, prompt_length] = ContinuousBatching(
                task.decoder,
                task.module,
                num_rows,
                prompt_length,
                wrap=functools.partial(self.partitioner.with_mdl_vars, has_splits=True),
                compiler_options=self.partitioner.decode_options,
            )
        return self.batchings[num_rows, prompt_length]


_log = logging.getLogger(__name__)
