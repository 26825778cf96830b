"""`praxis decode`: continues prompts with a job's checkpoint."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from praxis_lite.core.errors import ConfigError
from praxis_lite.modes.evaluate import add_step
from praxis_lite.modes.following import add_follow, each_checkpoint
from praxis_lite.modes.job_from_command import job_on_mesh, recorded_job_of
from praxis_lite.modes.mode import CommandLine, Mode

if TYPE_CHECKING:
    from praxis_lite.checkpoints.steps.verified_steps import Step
    from praxis_lite.trainer.decoding.prompt_decoder import Batchings
    from praxis_lite.trainer.decoding.user_prompts import Prompt


class Decode(Mode):
    """Continues prompts from the experiment or the command line, or a conversation."""

    name = "decode"
    summary = "continues prompts with a checkpoint of a job"
    argument = "job_log_dir"
    continues_without_output = True
    is_of_many_processes = True

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds --step, --follow, --prompt, --prompts and --chat."""
        add_step(options)
        add_follow(options)
        options.add_argument(
            "--prompt",
            metavar="TEXT",
            nargs="+",
            action="extend",
            default=None,
            help="texts to continue instead of the experiment's decode datasets; the continuations "
            "are printed as they are generated",
        )
        options.add_argument(
            "--prompts",
            metavar="FILE",
            help='file of prompts: one text per line, or in FILE.jsonl one {"prompt": TEXT} or '
            '{"messages": [...]} per line',
        )
        options.add_argument(
            "--chat",
            action="store_true",
            help="treat prompts as messages of a user, formatted by the tokenizer's chat template; "
            "without prompts, read messages from the terminal",
        )

    def run(
        self,
        command: CommandLine,
        *,
        step: "Step",
        follow: bool,
        follow_seconds: int,
        prompt: Sequence[str] | None,
        prompts: str | None,
        chat: bool,
    ) -> None:
        """Decodes the prompts. Raises ConfigError like `decode.decode`."""
        if follow and chat:
            raise ConfigError(
                "--chat cannot be combined with --follow, because a conversation uses a single "
                "checkpoint. Remove one of them."
            )
        texts = _prompts(prompt or (), prompts, chat=chat)
        checkpoints = each_checkpoint(command, step, follow_seconds if follow else None)
        is_conversation = chat and not texts
        launched = recorded_job_of(command, "decode", has_prompts=bool(texts) or is_conversation)
        checked_for = "load" if is_conversation else "decode"
        with job_on_mesh(
            command, launched, checked_for, prompts=texts, same={"--step": step}
        ) as job:
            from praxis_lite.trainer.decoding import decode

            if is_conversation:
                decode.chat(job, step, sys.stdin or ())
            else:
                batchings: Batchings = {}
                checkpoints(lambda step: decode.decode(job, step, texts or None, batchings))


def _prompts(texts: Sequence[str], file: str | None, *, chat: bool) -> "list[Prompt]":
    """Returns the prompts from --prompt and --prompts. With --chat, strings are user messages."""
    if not texts and file is None:
        return []
    from praxis_lite.host.places import local_file
    from praxis_lite.trainer.decoding.user_prompts import read_prompts

    prompts = [*texts, *(read_prompts(local_file(file)) if file is not None else ())]
    return [
        [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
