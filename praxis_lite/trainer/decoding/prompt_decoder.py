"""The decode loop over a dataset of prompts: restored weights in, records out."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

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
from praxis_lite.inputs.batches import checked_batches
from praxis_lite.trainer.compilation import compile_step

# Reading the tokens waits for the devices. Until they are read, rows that should end continue.
STEPS_BETWEEN_LOOKS = 8
# Most rows that are decoded at a time for a watcher.
MOST_WATCHED_ROWS = 8

Watch = Callable[[NewTokens], None]
Batchings = dict[tuple[int, int], ContinuousBatching]


@dataclasses.dataclass(frozen=True)
class PromptDecoder:
    """Decodes datasets of prompts with the weights of a checkpoint.

    Attributes:
      mdl_vars: weights of `step`, on the mesh, as `Partitioner.for_decoding` returns them.
      seed: of the sampling; the step and the batch's index are folded in.
      first_batch: index of a pipeline's first batch in the keys, where several pipelines are parts
        of one dataset, such as the turns of a chat.
      batchings: the compiled programs of continuous batching, by rows and length of a prompt;
        decoders of other checkpoints may share them.
    """

    partitioner: Partitioner
    mdl_vars: Any
    step: int
    seed: int
    batchings: Batchings = dataclasses.field(default_factory=dict, repr=False)
    first_batch: int = 0

    def records(
        self, name: str, pipeline: InputPipeline, watch: Watch | None = None
    ) -> list[dict[str, Any]]:
        """Returns the task's records of all prompts of a dataset, in their order.

        `watch` is called with new tokens as they come, if the decoder makes them one after the
        other and there is one process. Their index counts real rows x hypotheses.

        Raises ConfigError if a batch has ids that the model has no row for, or if the decoder needs
        all prompts in one process and there are several.
        """
        task = self.partitioner.task
        decoder = task.decoder
        if not isinstance(decoder, Greedy) or jax.process_count() > 1:
            watch = None
        if watch is not None or (isinstance(decoder, Greedy) and decoder.num_cache_slots):
            decoded = self._continuously(name, pipeline, watch)
        else:
            decoded = self._batch_by_batch(name, pipeline)
        return [
            record for inputs, outputs in decoded
            for record in task.decode_to_records(inputs, jax.device_get(outputs))
        ]

    def _batches(self, name: str, pipeline: InputPipeline) -> Iterator[tuple[Any, jax.Array]]:
        """Yields the rows of each batch, its ids checked, and its key."""
        num_ids = self.partitioner.task.num_ids()
        for index, inputs in checked_batches(pipeline, f"decode_datasets.{name}"):
            check_ids(inputs, num_ids, f"decode_datasets.{name}, batch {index}")
            index += self.first_batch
            yield inputs, self.partitioner.batch_key(self.seed, self.step, index)

    def _batch_by_batch(self, name: str, pipeline: InputPipeline) -> Iterator[tuple[Any, Any]]:
        """Yields inputs and outputs of each batch.

        Both are complete in every process, because records need all of a batch.
        """
        num_rows = pipeline.batch_size
        rows = self.partitioner.process_rows(num_rows)
        compile_step(self.partitioner.decode_step, pipeline, f"decode_datasets.{name}")
        for inputs, key in self._batches(name, pipeline):
            own_rows = jax.tree.map(lambda x: x[rows] if x.ndim else x, inputs)
            batch = global_batch(own_rows, self.partitioner.mesh, num_rows)
            yield inputs, self.partitioner.decode_step(self.mdl_vars, batch, key)

    def _continuously(
        self, name: str, pipeline: InputPipeline, watch: Watch | None
    ) -> Iterator[tuple[Any, Any]]:
        """Yields inputs and outputs of each batch, with the tokens that batches would give."""
        require(
            jax.process_count() == 1, "The number of processes", jax.process_count(), "1",
            "decoder.num_cache_slots needs all prompts in one process. Set it to 0, or decode in "
            "one process.",
        )
        task, prompt_length = self.partitioner.task, pipeline.element_spec()["ids"].shape[1]
        decoder = task.decoder
        most_watched = min(pipeline.batch_size * decoder.num_hyps, MOST_WATCHED_ROWS)
        num_slots = decoder.num_cache_slots or most_watched
        batching = self._batching(num_slots, prompt_length)
        batches: list[tuple[Any, dict[str, np.ndarray]]] = []
        places: list[tuple[int, int]] = []  # Of each prompt: its batch, and its row in the outputs.

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
                    if inputs["weights"][row] > 0:
                        places.append((len(batches) - 1, hyp))
                        yield Prompt(
                            inputs["ids"][row], inputs["prefix_lengths"][row], keys[hyp],
                            **{setting: x[row] for setting, x in settings.items()},
                        )

        looks: dict[str, Any] = {} if watch is None else {"num_steps": 1}
        if decoder.stop_strings:
            # Other tokens than the encoded ones may spell a stop string; only the text shows it.
            def text_of(prompt: Prompt) -> ContinuationText:
                ids = prompt.ids[: prompt.length]
                return ContinuationText(task.tokenizer, ids, decoder.stop_strings)

            looks = {"num_steps": STEPS_BETWEEN_LOOKS, "text_of": text_of} | looks
        for new in batching.stream(self.mdl_vars, prompts(), **looks):
            if watch is not None:
                watch(new)
            index, hyp = places[new.index]
            outputs = batches[index][1]
            start = outputs["decode_lengths"][hyp]
            outputs["output_ids"][hyp, start : start + len(new.ids)] = new.ids
            outputs["logprobs"][hyp, start : start + len(new.ids)] = new.logprobs
            outputs["decode_lengths"][hyp] += len(new.ids)
        if watch is None:
            print(batching.latest.summary(f"rows of {name}"))
        for inputs, outputs in batches:
            yield inputs, decoder.outputs_of(outputs)

    def _batching(self, num_rows: int, prompt_length: int) -> ContinuousBatching:
        """Returns the decoder of prompts of this length, compiled once."""
        if (num_rows, prompt_length) not in self.batchings:
            task = self.partitioner.task
            self.batchings[num_rows, prompt_length] = ContinuousBatching(
                task.decoder, task.module, num_rows, prompt_length,
                wrap=functools.partial(self.partitioner.with_mdl_vars, has_splits=True),
                compiler_options=self.partitioner.decode_options,
            )
        return self.batchings[num_rows, prompt_length]
