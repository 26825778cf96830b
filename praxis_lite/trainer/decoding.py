"""The decode loop over datasets of prompts: restored weights in, JSON lines out."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.decode import Greedy
from praxis_lite.decode.continuous_batching import ContinuousBatching, Prompt
from praxis_lite.decode.loop import sample_keys
from praxis_lite.decode.stop_strings import stops_in_text
from praxis_lite.errors import ConfigError
from praxis_lite.inputs import InputPipeline
from praxis_lite.inputs.batches import check_ids, checked_batches
from praxis_lite.job.job_dir import JobDir
from praxis_lite.partitioner import Partitioner
from praxis_lite.trainer.metrics.records import write_records

# A look at the tokens waits for the devices; a row that should have ended goes on until then.
STEPS_BETWEEN_LOOKS = 8


def decode(
    partitioner: Partitioner,
    decode_datasets: Mapping[str, InputPipeline],
    mdl_vars: Any,
    step: int,
    seed: int,
    job: JobDir | None,
    note: Callable[[str], None],
) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of each dataset, written to decode/<dataset>/<step>.jsonl.

    Args:
      mdl_vars: weights of `step`, on the mesh.
      seed: of the sampling; the step and the batch's index are folded in.
      job: where; None: nothing is written.
      note: told where each file is.
    """
    records_of = {}
    for name, pipeline in decode_datasets.items():
        if num_cache_slots(partitioner):
            decoded = _continuously(partitioner, pipeline, mdl_vars, step, seed, name, note)
        else:
            decoded = _batch_by_batch(partitioner, pipeline, mdl_vars, step, seed, name)
        records: list[dict[str, Any]] = []
        for inputs, outputs in decoded:
            records += partitioner.task.decode_to_records(inputs, jax.device_get(outputs))
        records_of[name] = records
        if job is None:
            continue
        path = job.decode_jsonl(name, step)
        write_records(path, records, note)
        note(f"decoded {len(records)} records of {name} with the weights of step {step}: {path}")
    return records_of


def num_cache_slots(partitioner: Partitioner) -> int:
    """Returns how many rows continuous batching has; 0: the task decodes batch by batch."""
    decoder = getattr(partitioner.task, "decoder", None)
    return decoder.num_cache_slots if isinstance(decoder, Greedy) else 0


def _batches(
    partitioner: Partitioner, pipeline: InputPipeline, name: str
) -> Iterator[tuple[int, Any]]:
    """Yields the index and the rows of each batch, its ids checked."""
    num_ids = partitioner.task.num_ids()
    for index, inputs in checked_batches(pipeline, f"decode_datasets.{name}"):
        check_ids(inputs, num_ids, f"decode_datasets.{name}, batch {index}")
        yield index, inputs


def _batch_by_batch(
    partitioner: Partitioner,
    pipeline: InputPipeline,
    mdl_vars: Any,
    step: int,
    seed: int,
    name: str,
) -> Iterator[tuple[Any, Any]]:
    """Yields inputs and outputs of each batch, whole in every process: records need all of it."""
    num_rows = pipeline.batch_size
    rows = partitioner.process_rows(num_rows)
    for index, inputs in _batches(partitioner, pipeline, name):
        own_rows = jax.tree.map(lambda x: x[rows] if x.ndim else x, inputs)
        batch = partitioner.global_batch(own_rows, num_rows)
        key = partitioner.batch_key(seed, step, index)
        yield inputs, partitioner.decode_step(mdl_vars, batch, key)


def _continuously(
    partitioner: Partitioner,
    pipeline: InputPipeline,
    mdl_vars: Any,
    step: int,
    seed: int,
    name: str,
    note: Callable[[str], None],
) -> Iterator[tuple[Any, Any]]:
    """Yields inputs and outputs of each batch, with the tokens that batches would give."""
    if jax.process_count() > 1:
        raise ConfigError(
            "decoder.num_cache_slots needs all prompts in one process, but there are "
            f"{jax.process_count()} processes. Set it to 0, or decode in one process."
        )
    task, prompt_length = partitioner.task, pipeline.element_spec()["ids"].shape[1]
    decoder, module = task.decoder, task.module
    batching = ContinuousBatching(
        decoder, module, decoder.num_cache_slots, prompt_length, wrap=partitioner.with_mdl_vars
    )
    batches: list[tuple[Any, dict[str, np.ndarray]]] = []
    places: list[tuple[int, int]] = []  # Of each prompt: its batch, and its row in the outputs.

    def prompts() -> Iterator[Prompt]:
        for index, inputs in _batches(partitioner, pipeline, name):
            num_rows, shape = len(inputs["ids"]), (decoder.max_decode_steps,)
            num_hyps = num_rows * decoder.num_hyps
            empty = {
                "output_ids": np.zeros((num_hyps, *shape), np.int32),
                "logprobs": np.zeros((num_hyps, *shape), np.float32),
                "decode_lengths": np.zeros((num_hyps,), np.int32),
            }
            batches.append((inputs, empty))
            keys = sample_keys(
                task.row_keys(partitioner.batch_key(seed, step, index), num_rows), decoder.num_hyps
            )
            for hyp in range(num_hyps):
                row = hyp // decoder.num_hyps
                if inputs["weights"][row] > 0:
                    places.append((index, hyp))
                    settings = {key: x[row] for key, x in task.per_row_settings(inputs).items()}
                    yield Prompt(
                        inputs["ids"][row], inputs["prefix_lengths"][row], keys[hyp], **settings
                    )

    looks: dict[str, Any] = {}
    if decoder.stop_strings:
        # Those that came about by other tokens than the encoded ones, only the text shows.
        should_stop = stops_in_text(task.tokenizer, decoder.stop_strings)
        looks = {"num_steps": STEPS_BETWEEN_LOOKS, "should_stop": should_stop}
    for new in batching.stream(mdl_vars, prompts(), **looks):
        index, hyp = places[new.index]
        outputs = batches[index][1]
        start = outputs["decode_lengths"][hyp]
        outputs["output_ids"][hyp, start : start + len(new.ids)] = new.ids
        outputs["logprobs"][hyp, start : start + len(new.ids)] = new.logprobs
        outputs["decode_lengths"][hyp] += len(new.ids)
    note(
        f"{batching.num_prefills} rows of {name} took {batching.num_steps} model steps, "
        f"{decoder.num_cache_slots} rows at a time"
    )
    for inputs, outputs in batches:
        yield inputs, decoder.outputs_of(outputs)
