"""Implements `praxis decode`: decodes prompt datasets, command-line prompts, or a chat."""

import dataclasses
import functools
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from praxis_lite.checkpoints.steps.verified_steps import Step
from praxis_lite.core.errors import ConfigError
from praxis_lite.decode.continuous_batching import NewTokens
from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.stop_strings import ContinuationText
from praxis_lite.inputs.base import IndexedPipeline
from praxis_lite.inputs.pipeline_checks import checked_spec
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.job import processes
from praxis_lite.job.job_dir import COMMAND_LINE
from praxis_lite.trainer.checks.datasets import check_reads
from praxis_lite.trainer.compilation import compile_together
from praxis_lite.trainer.decoding.prompt_decoder import Batchings, PromptDecoder
from praxis_lite.trainer.decoding.user_prompts import (
    Message,
    Prompt,
    continues_prompts,
    prompt_batch,
    title,
)
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.records import add_records, write_records
from praxis_lite.trainer.restored_weights import restored_weights


def decode(
    job: JobOnMesh,
    step: Step,
    prompts: Sequence[Prompt] | None = None,
    batchings: Batchings | None = None,
) -> None:
    """Decodes every decode dataset with a checkpoint's weights, and writes records.

    Args:
      job: The job, placed on its mesh.
      step: The checkpoint's step, "best", or None for the newest checkpoint.
      prompts: Prompts from the command line; the job must contain them as its only decode dataset.
        Their continuations are printed as they are decoded. If None, the experiment's decode
        datasets are decoded.
      batchings: Compiled functions to reuse for other checkpoints; updated in place.

    Raises:
      ConfigError: There is no decode dataset, the checkpoint does not exist, or a prompt contains
        ids outside the vocabulary.
    """
    if not job.decode_datasets:
        advice = "Give the experiment a decode_datasets() method that returns pipelines by name."
        if continues_prompts(job.partitioner.task):
            advice = (
                "Pass --prompt TEXT, or give the experiment a decode_datasets() method that "
                'returns {"prompts": fdl.Config(TextPrompts, ...)}.'
            )
        raise ConfigError(f"The job has no decode datasets. {advice}")
    compile_together(
        (job.partitioner.decode_step, pipeline, f"decode_datasets.{name}")
        for name, pipeline in job.decode_datasets.items()
    )
    decoder = _restore_decoder(job, step, batchings)
    for name, pipeline in job.decode_datasets.items():
        path = job.files.decode_jsonl(name, decoder.step)
        if prompts is None:
            records = decoder.records(name, pipeline)
            write_records(path, records)
        else:
            assert isinstance(pipeline, IndexedPipeline), "`with_prompts` created it."
            records = _decode_and_print(decoder, pipeline, prompts)
            add_records(path, records)
        count = "1 record" if len(records) == 1 else f"{len(records)} records"
        print(
            f"decoded {count} of {name} with the weights of step {decoder.step}: "
            f"{job.files.shown(path)}"
        )


def chat(job: JobOnMesh, step: Step, lines: Iterable[str]) -> None:
    """Answers a user's messages in a conversation, with a checkpoint's weights.

    Each prompt is the conversation so far, formatted by the tokenizer's chat template.

    Args:
      job: The job, placed on its mesh.
      step: The checkpoint's step, "best", or None for the newest checkpoint.
      lines: The user's messages; an empty line starts a new conversation.

    Raises:
      ConfigError: There are several processes, or the task has no chat template.
    """
    if processes.count() != 1:
        raise ConfigError(
            f"--chat requires a single process, but there are {processes.count()}. Pass prompts "
            "with --prompt, or in a file with --prompts."
        )
    task, messages = job.partitioner.task, list[Message]()
    if isinstance(lines, io.TextIOWrapper):
        # Accept invalid UTF-8 here; `prompt_batch` rejects it with a clear error.
        lines.reconfigure(errors="surrogateescape")
    # Check that the task can chat before its weights are restored.
    prompt_batch(task, [[{"role": "user", "content": "?"}]], "--chat")
    decoder = _restore_decoder(job, step)
    print("Enter a message. An empty line starts a new conversation; Ctrl-D exits.", flush=True)
    for number, line in enumerate(lines):
        if not line.strip():
            messages.clear()
            print("(a new conversation)", flush=True)
            continue
        messages.append({"role": "user", "content": line.strip()})
        batch = prompt_batch(task, [messages], "--chat")
        check_reads(job.partitioner.decode_step, checked_spec(batch, "--chat"), "--chat")
        # A separate batch index gives each turn different random keys.
        turn = dataclasses.replace(decoder, first_batch=number)
        answer = _decode_and_print(turn, batch, [messages])[0]["continuation"]
        messages.append({"role": "assistant", "content": answer})


def _restore_decoder(
    job: JobOnMesh, step: Step, batchings: Batchings | None = None
) -> PromptDecoder:
    step, mdl_vars = restored_weights(
        job.partitioner, job.files, step, job.run.decode_use_ema_states
    )
    batchings = {} if batchings is None else batchings
    mdl_vars = job.partitioner.for_decoding(mdl_vars, donates=True)
    return PromptDecoder(job.partitioner, mdl_vars, step, job.run.seed, batchings=batchings)


def _decode_and_print(
    decoder: PromptDecoder, pipeline: IndexedPipeline, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """Decodes prompts, prints continuations as they are decoded, and returns records."""
    task = decoder.partitioner.task
    titles = [title(prompt, task.tokenizer) for prompt in prompts]
    batch = pipeline.rows(0, slice(0, pipeline.batch_size))
    ids = [row[:n] for row, n in zip(batch["ids"], batch["prefix_lengths"], strict=True)]
    write = functools.partial(print, end="", flush=True)
    printer = ContinuationPrinter(titles, ids, task.tokenizer, task.decoder, write)
    records = decoder.records(COMMAND_LINE, pipeline, printer.add)
    printer.add_rest(records)
    return records


class ContinuationPrinter:
    """Prints continuations as they are decoded, in the order of their prompts.

    Args:
      titles: Title of each prompt, printed before the prompt's continuation if there are several
        prompts.
      prompts: Token ids of each prompt.
      tokenizer: The task's tokenizer.
      decoder: The task's decoder.
      write: Function that prints a piece of text.
    """

    def __init__(
        self,
        titles: Sequence[str],
        prompts: Sequence[np.ndarray],
        tokenizer: Tokenizer,
        decoder: Decoder,
        write: Callable[[str], None],
    ):
        self._titles, self._num_hyps, self._write = titles, decoder.num_hyps, write
        self._texts = [
            ContinuationText(tokenizer, prompt, decoder.stop_strings)
            for prompt in prompts
            for _ in range(decoder.num_hyps)
        ]
        self._is_done = [False] * len(self._texts)
        self._next, self._has_heading = 0, False

    def add(self, new: NewTokens) -> None:
        """Adds new tokens; `new.index` counts the hypotheses for all prompts."""
        text = self._texts[new.index]
        for token in new.ids.tolist():
            text.push(token)
        if new.done:
            text.end()
            self._is_done[new.index] = True
        self._print()

    def add_rest(self, records: Sequence[dict[str, Any]]) -> None:
        """Prints the rest of unfinished continuations, whose complete texts are in `records`."""
        for index, (text, record) in enumerate(zip(self._texts, records, strict=True)):
            if not self._is_done[index]:
                text.replace(record["continuation"])
                self._is_done[index] = True
        self._print()

    def _print(self) -> None:
        # Continuations are printed in order, so one that is not done blocks all later ones.
        while self._next < len(self._texts):
            text, is_done = self._texts[self._next], self._is_done[self._next]
            if not self._has_heading and (text.waiting or is_done):
                self._write(self._heading(self._next))
                self._has_heading = True
            self._write(text.take())
            if not is_done:
                return
            self._write("\n")
            self._next, self._has_heading = self._next + 1, False

    def _heading(self, index: int) -> str:
        if len(self._texts) == 1:
            return ""
        row, hyp = divmod(index, self._num_hyps)
        sample = f", sample {hyp}" if self._num_hyps > 1 else ""
        return f"\nprompt {row + 1} of {len(self._titles)}{sample}: {self._titles[row]}\n"


_log = logging.getLogger(__name__)
