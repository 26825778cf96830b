"""`praxis serve`: serves a language model through OpenAI's HTTP API."""

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.host.host_names import LOOPBACK_HOSTS, is_loopback
from praxis_lite.host.optional_packages import require_package
from praxis_lite.modes.evaluate import add_step
from praxis_lite.modes.job_from_command import job_on_mesh, recorded_job_of
from praxis_lite.modes.mode import CommandLine, Mode

if TYPE_CHECKING:
    import socket

    from praxis_lite.core.partitioner.partitioner import Partitioner

LOOPBACK = "127.0.0.1"


class Serve(Mode):
    """Serves completions and chats over HTTP until it receives a signal; see docs/serving.md."""

    name = "serve"
    summary = "serves completions and chats through OpenAI's HTTP API"
    argument = "job_log_dir"
    continues_without_output = True

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds the options for the model, the port and the limits."""
        add_step(options)
        options.add_argument(
            "--hf", metavar="DIR", help="Hugging Face model directory to serve instead of a job"
        )
        options.add_argument(
            "--model_name",
            metavar="NAME",
            help="model name in requests; default: the name of the directory",
        )
        options.add_argument(
            "--host",
            metavar="ADDRESS",
            default=LOOPBACK,
            help=f"address to listen on; default: {LOOPBACK}, reachable from this machine only",
        )
        options.add_argument(
            "--port",
            metavar="N",
            type=int,
            default=8000,
            help="port to listen on, or 0 for any free port; default: 8000",
        )
        options.add_argument(
            "--api_key_variable",
            metavar="NAME",
            help="environment variable with the API key that clients must send",
        )
        options.add_argument(
            "--num_rows",
            metavar="N",
            type=int,
            default=8,
            help="number of answers that are decoded at the same time; default: 8",
        )
        options.add_argument(
            "--max_length",
            metavar="N",
            type=int,
            help="maximum total number of tokens in a prompt and its answer; default: the model's "
            "number of positions, at most 4096",
        )
        options.add_argument(
            "--max_queue",
            metavar="N",
            type=int,
            default=256,
            help="maximum number of answers in the queue; default: 256",
        )
        options.add_argument(
            "--request_seconds",
            metavar="S",
            type=float,
            default=600.0,
            help="time limit of a request in seconds; default: 600",
        )
        options.add_argument(
            "--drain_seconds",
            metavar="S",
            type=float,
            default=30.0,
            help="after a signal, seconds to finish the requests in progress; default: 30",
        )

    def run(
        self,
        command: CommandLine,
        *,
        step: int | Literal["best"] | None,
        hf: str | None,
        **options: Any,
    ) -> None:
        """Serves the model; raises ConfigError for invalid options before compiling anything."""
        require_package("starlette", "praxis serve")
        require_package("uvicorn", "praxis serve")
        if (hf is None) == (command.job_log_dir is None):
            raise ConfigError(
                "`praxis serve` requires exactly one of JOB (--job_log_dir=JOB) and --hf=DIR (a "
                "Hugging Face model)."
            )
        for name in ("request_seconds", "drain_seconds"):
            seconds = options[name]
            require(0 < seconds < 1e6, f"--{name}", seconds, "a number of seconds above 0")
        if hf is not None and (step, command.exp) != (None, None):
            option = "--exp" if step is None else "--step"
            raise ConfigError(f"{option} only applies to a job. Remove it, or remove --hf.")
        from praxis_tools.serve.server import bound_socket

        # Bind the port before reading the weights, to fail immediately if the port is in use.
        with bound_socket(options["host"], options.pop("port")) as listening:
            if hf is not None:
                _serve_huggingface(command, hf, listening, **options)
            else:
                _serve_job(command, step, listening, **options)


def _serve_huggingface(
    command: CommandLine, directory: str, listening: "socket.socket", **options: Any
) -> None:
    from praxis_lite.huggingface.model import load_on_devices
    from praxis_lite.trainer.compilation import use_compilation_cache

    use_compilation_cache()
    model = load_on_devices(
        directory,
        "job" if any(s.startswith("mesh.") for s in command.settings) else "attached",
        settings=command.settings,
    )
    _serve(model.partitioner, model.mdl_vars, directory, listening, **options)


def _serve_job(
    command: CommandLine,
    step: int | Literal["best"] | None,
    listening: "socket.socket",
    **options: Any,
) -> None:
    assert command.job_log_dir is not None
    launched = recorded_job_of(command, "decode", has_prompts=True)
    with job_on_mesh(command, launched, "load") as job:
        from praxis_lite.trainer.decoding.user_prompts import check_language_model
        from praxis_lite.trainer.restored_weights import restored_weights

        check_language_model(job.partitioner.task, "praxis serve")
        _, mdl_vars = restored_weights(
            job.partitioner, job.files, step, job.run.decode_use_ema_states
        )
        _serve(job.partitioner, mdl_vars, command.job_log_dir, listening, **options)


def _serve(
    partitioner: "Partitioner",
    mdl_vars: Any,
    directory: str,
    listening: "socket.socket",
    *,
    model_name: str | None,
    host: str,
    api_key_variable: str | None,
    num_rows: int,
    max_length: int | None,
    max_queue: int,
    request_seconds: float,
    drain_seconds: float,
) -> None:
    from praxis_tools.serve.requests import Limits
    from praxis_tools.serve.served_model import create_served_model
    from praxis_tools.serve.server import serve

    api_key = None
    if api_key_variable is not None:
        api_key = os.environ.get(api_key_variable)
        require(
            bool(api_key),
            f"The environment variable {api_key_variable}",
            api_key,
            "the API key",
            "Set it, or remove --api_key_variable.",
        )
    model, engine = create_served_model(
        partitioner,
        mdl_vars,
        model_name or Path(directory).absolute().name,
        max_length=max_length,
        num_rows=num_rows,
        max_waiting=max_queue,
    )
    if not is_loopback(host) and api_key is None:
        _log.warning(
            "--host=%s is reachable from other machines without an API key. Set "
            "--api_key_variable=NAME to require one.",
            host,
        )
    if model.tokenizer.chat is None:
        _log.info("the tokenizer has no chat template: /v1/chat/completions is not available")
    limits = Limits(request_seconds, api_key, LOOPBACK_HOSTS if is_loopback(host) else None)
    serve(model, engine, listening, limits, drain_seconds)


_log = logging.getLogger(__name__)
