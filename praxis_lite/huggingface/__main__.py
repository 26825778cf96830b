"""Command-line program that imports Hugging Face models as jobs, and exports jobs.

python -m praxis_lite.huggingface import HF_DIR JOB_LOG_DIR [--set path=value ...]
python -m praxis_lite.huggingface export JOB_LOG_DIR OUT_DIR [--step N] [--dtype NAME]
    [--adapters merge|peft]
"""

import logging
from collections.abc import Sequence

from praxis_lite.job.command import Parser, run


def main(argv: Sequence[str] | None = None) -> None:
    """Creates a job from a Hugging Face model, or exports a job in Hugging Face format."""
    run(lambda: _convert(argv), continues_without_output=True)


def _convert(argv: Sequence[str] | None) -> None:
    args = _parser().parse_args(argv)
    # Import slow modules here, so that Ctrl-C during the import prints no traceback.
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


def _parser() -> Parser:
    parser = Parser(prog="python -m praxis_lite.huggingface", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{import,export}")
    importing = commands.add_parser("import", help="create a job from a Hugging Face model")
    importing.add_argument(
        "hf_dir",
        metavar="HF_DIR",
        help="directory with config.json and safetensors files, or hf:// URL",
    )
    importing.add_argument("job_log_dir", metavar="JOB_LOG_DIR", help="new directory for the job")
    importing.add_argument(
        "--set",
        dest="settings",
        metavar="path=value",
        nargs="+",
        action="extend",
        default=[],
        help="settings of the job, as for main.py",
    )
    exporting = commands.add_parser("export", help="export a job's model in Hugging Face format")
    exporting.add_argument(
        "job_log_dir", metavar="JOB_LOG_DIR", help="job that started from a Hugging Face model"
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
    return parser


if __name__ == "__main__":
    main()


_log = logging.getLogger(__name__)
