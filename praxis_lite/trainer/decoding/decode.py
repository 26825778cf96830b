"""--mode=decode: a job's datasets of prompts, the prompts of a user, or a conversation."""

import dataclasses
import functools
import io
from collections.abc import Iterable, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.inputs.batches import checked_spec
from praxis_lite.job import processes
from praxis_lite.job.job_dir import COMMAND_LINE
from praxis_lite.trainer.checks.datasets import check_reads
from praxis_lite.trainer.compilation import compile_together
from praxis_lite.trainer.decoding.prompt_decoder import Batchings, PromptDecoder
from praxis_lite.trainer.decoding.streaming import Continuations
from praxis_lite.trainer.decoding.user_prompts import Message, Prompt, prompt_batch, title
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.records import add_records, write_records
from praxis_lite.trainer.restored_weights import restored_weights


def decode(
    job: JobOnMesh, step: int | str | None, prompts: Sequence[Prompt] | None = None,
    batchings: Batchings | None = None,
) -> None:
    """Decodes every decode dataset with the weights of a checkpoint; `step` as `evaluate`.

    Where these are the `prompts` of a command line, their continuations are printed as they come.
    `batchings` are filled and used again for the next checkpoint.
    """
    if not job.decode_datasets:
        raise ConfigError(
            "The job has no decode datasets. Give --prompt TEXT, or add a method decode_datasets() "
            'to the experiment: return {"prompts": fdl.Config(TextPrompts, ...)}.'
        )
    compile_together(
        (job.partitioner.decode_step, pipeline, f"decode_datasets.{name}")
        for name, pipeline in job.decode_datasets.items()
    )
    decoder = _restored(job, step, batchings)
    for name, pipeline in job.decode_datasets.items():
        path = job.files.decode_jsonl(name, decoder.step)
        if prompts is None:
            records = decoder.records(name, pipeline)
            write_records(path, records, print)
        else:
            records = _decoded_aloud(decoder, pipeline, prompts)
            add_records(path, records)
        count = "1 record" if len(records) == 1 else f"{len(records)} records"
        print(f"decoded {count} of {name} with the weights of step {decoder.step}: {path}")


def chat(job: JobOnMesh, step: int | str | None, lines: Iterable[str]) -> None:
    """Answers line after line of a conversation with the weights of a checkpoint.

    Each prompt contains the conversation so far, by the tokenizer's chat template.

    Raises ConfigError if there are several processes, or as `prompt_batch`.
    """
    require(
        processes.count() == 1, "--chat: the number of processes", processes.count(), "1",
        "Give the prompts with --prompt, or in a file with --prompts.",
    )
    task, messages = job.partitioner.task, list[Message]()
    if isinstance(lines, io.TextIOWrapper):
        lines.reconfigure(errors="surrogateescape")  # Prompts are checked, and refused by name.
    prompt_batch(task, [[{"role": "user", "content": "?"}]], "--chat")
    decoder = _restored(job, step)
    print("Say something; an empty line begins a new conversation, Ctrl-D ends it.", flush=True)
    for number, line in enumerate(lines):
        if not line.strip():
            messages.clear()
            print("(a new conversation)", flush=True)
            continue
        messages.append({"role": "user", "content": line.strip()})
        batch = prompt_batch(task, [messages], "--chat")
        check_reads(job.partitioner.decode_step, checked_spec(batch, "--chat"), "--chat")
        turn = dataclasses.replace(decoder, first_batch=number)  # With its own draws.
        answer = _decoded_aloud(turn, batch, [messages])[0]["continuation"]
        messages.append({"role": "assistant", "content": answer})


def _restored(
    job: JobOnMesh, step: int | str | None, batchings: Batchings | None = None
) -> PromptDecoder:
    step, mdl_vars = restored_weights(
        job.partitioner, job.files, step, job.run.decode_use_ema_states
    )
    batchings = {} if batchings is None else batchings
    mdl_vars = job.partitioner.for_decoding(mdl_vars, donates=True)
    return PromptDecoder(job.partitioner, mdl_vars, step, job.run.seed, batchings=batchings)


def _decoded_aloud(
    decoder: PromptDecoder, pipeline: InputPipeline, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """Returns the records of prompts, whose continuations are printed as they come."""
    task = decoder.partitioner.task
    titles = [title(prompt, task.tokenizer) for prompt in prompts]
    batch = pipeline.rows(0, slice(0, pipeline.batch_size))
    ids = [row[:n] for row, n in zip(batch["ids"], batch["prefix_lengths"], strict=True)]
    write = functools.partial(print, end="", flush=True)
    aloud = Continuations(titles, ids, task.tokenizer, task.decoder, write)
    records = decoder.records(COMMAND_LINE, pipeline, aloud.add)
    aloud.add_rest(records)
    return records
