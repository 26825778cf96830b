"""Models of Hugging Face as jobs, and jobs as models of Hugging Face.

    python -m praxis_lite.tools.huggingface import HF_DIR JOB_LOG_DIR [--set path=value ...]
    python -m praxis_lite.tools.huggingface export JOB_LOG_DIR OUT_DIR [--step N] [--dtype NAME]
        [--adapters merge|peft]
"""

import sys
from collections.abc import Sequence

from praxis_lite.run.command import Parser, run
from praxis_lite.run.job.processes.standard_output import print_log


def main(argv: Sequence[str] | None = None) -> None:
    """Begins a job with a model of Hugging Face, or exports a job's model as such a model."""
    run(lambda: _convert(argv), goes_on=True)


def _convert(argv: Sequence[str] | None) -> None:
    print_log()
    args = _parser().parse_args(argv)
    # Imported here: a signal may come while jax is.
    from praxis_lite.tools.foreign_checkpoints.begin_job import how_to_go_on
    from praxis_lite.tools.huggingface.jobs import begin_job, export_job, hf_dir_setting
    from praxis_lite.tools.huggingface.model import EXPERIMENT

    if args.command == "import":
        job = begin_job(args.hf_dir, args.job_log_dir, settings=args.settings, note=_say)
        print(how_to_go_on(job, EXPERIMENT, [hf_dir_setting(job), *args.settings]))
        return
    export_job(
        args.job_log_dir, args.out_dir, step=args.step, dtype=args.dtype, adapters=args.adapters,
        note=_say,
    )
    print(f"wrote {args.out_dir}")


def _parser() -> Parser:
    parser = Parser(prog="python -m praxis_lite.tools.huggingface", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{import,export}")
    taking = commands.add_parser("import", help="begin a job with the model in a directory")
    taking.add_argument("hf_dir", metavar="HF_DIR", help="config.json and safetensors files")
    taking.add_argument("job_log_dir", metavar="JOB_LOG_DIR", help="a new directory")
    taking.add_argument("--set", dest="settings", metavar="path=value", nargs="+",
                        action="extend", default=[], help="as of main.py")
    giving = commands.add_parser("export", help="export a job's model in Hugging Face format")
    giving.add_argument("job_log_dir", metavar="JOB_LOG_DIR", help="a job that began with one")
    giving.add_argument("out_dir", metavar="OUT_DIR", help="a new directory")
    giving.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    giving.add_argument("--dtype", help="float32, bfloat16 or float16; default: as it was")
    giving.add_argument(
        "--adapters", choices=("merge", "peft"),
        help="of a model with LoRA: fold them into its weights, or write them alone, as PEFT does",
    )
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
