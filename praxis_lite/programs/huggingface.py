"""`praxis hf`: creates jobs from Hugging Face models, and exports jobs as Hugging Face models."""

import argparse
import logging

from praxis_lite.job.command import Parser
from praxis_lite.modes.options import add_settings
from praxis_lite.programs.program import Program


class HuggingFace(Program):
    """Creates a job from a Hugging Face model, or exports a job in Hugging Face format."""

    name = "hf"
    summary = "creates a job from a Hugging Face model, or exports a job as one"
    continues_without_output = True

    def add_arguments(self, parser: Parser) -> None:
        """Adds the subcommands import and export."""
        commands = parser.add_subparsers(dest="command", required=True, metavar="{import,export}")
        importing = commands.add_parser("import", help="create a job from a Hugging Face model")
        importing.add_argument(
            "hf_dir",
            metavar="HF_DIR",
            help="directory with config.json and safetensors files, or hf:// URL",
        )
        importing.add_argument("job_log_dir", metavar="JOB", help="new directory for the job")
        add_settings(importing)
        exporting = commands.add_parser(
            "export", help="export a job's model in Hugging Face format"
        )
        exporting.add_argument(
            "job_log_dir", metavar="JOB", help="job that started from a Hugging Face model"
        )
        exporting.add_argument(
            "out_dir",
            metavar="OUT_DIR",
            help="new directory, or hf://org/name[@branch] to upload the export",
        )
        exporting.add_argument(
            "--step", type=int, help="step of the checkpoint to export; default: the latest"
        )
        exporting.add_argument("--dtype", help="float32, bfloat16 or float16; default: unchanged")
        exporting.add_argument(
            "--adapters",
            choices=("merge", "peft"),
            help="for models with LoRA adapters: merge them into the weights, or write only the "
            "adapters, in PEFT's format",
        )

    def run(self, args: argparse.Namespace) -> None:
        """Imports or exports; raises ConfigError if a directory or a setting is invalid."""
        from praxis_lite.huggingface.jobs import begin_job, export_job, hf_dir_setting
        from praxis_lite.huggingface.model import EXPERIMENT
        from praxis_lite.trainer.create_job import next_command

        if args.command == "import":
            job = begin_job(args.hf_dir, args.job_log_dir, settings=args.settings, note=_log.info)
            print(next_command(job, EXPERIMENT, [hf_dir_setting(job), *args.settings]))
            return
        export_job(
            args.job_log_dir,
            args.out_dir,
            step=args.step,
            dtype=args.dtype,
            adapters=args.adapters,
            note=_log.info,
        )
        print(f"wrote {args.out_dir}")


_log = logging.getLogger(__name__)
