"""The decode loop over datasets of prompts: restored weights in, JSON lines out."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from praxis_lite.inputs import InputPipeline
from praxis_lite.job_dir import JobDir
from praxis_lite.partitioner import Partitioner
from praxis_lite.trainer import host_of


def decode(
    partitioner: Partitioner,
    decode_datasets: Mapping[str, InputPipeline],
    mdl_vars: Any,
    step: int,
    seed: int,
    job: JobDir,
    note: Callable[[str], None],
) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of each dataset, written to decode/<dataset>/<step>.jsonl.

    Args:
      mdl_vars: weights of `step`, on the mesh.
      seed: of the sampling; the batch's index is folded in.
      note: told where each file is.
    """
    base_key = partitioner.key(seed)
    records_of = {}
    for name, pipeline in decode_datasets.items():
        records: list[dict[str, Any]] = []
        for index, inputs in enumerate(pipeline.batches(**host_of())):
            key = jax.device_put(jax.random.fold_in(base_key, index), partitioner.replicated)
            outputs = partitioner.decode_step(mdl_vars, partitioner.global_batch(inputs), key)
            records += partitioner.task.decode_to_records(inputs, jax.device_get(outputs))
        path = job.decode_jsonl(name, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: a reader never sees half a decode.
        partial = path.with_suffix(".partial")
        partial.write_text(
            "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
            encoding="utf-8",
        )
        os.replace(partial, path)
        note(f"decoded {len(records)} prompts of {name} with the weights of step {step}: {path}")
        records_of[name] = records
    return records_of
