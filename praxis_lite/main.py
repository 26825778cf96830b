"""From a command line to a job: experiment, config, mesh, then what --mode says."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.run.command import print_error, run
from praxis_lite.run.experiment import registry
from praxis_lite.run.job import processes
from praxis_lite.run.job.job_dir import JobDir, open_for_reading, open_for_training
from praxis_lite.run.job.processes.same_everywhere import check_same, versions
from praxis_lite.run.job.processes.standard_output import (
    open_what_is_closed,
    print_log,
    without_lines_of_gloo,
)
from praxis_lite.run.job.processes.start import start
from praxis_lite.run.job.shared_job_dir import open_shared
from praxis_lite.run.options import check_goes_with_mode, file_path, parser

if TYPE_CHECKING:
    import fiddle as fdl

    from praxis_lite.run.trainer.decoding.user_prompts import Prompt


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; exits 2, with a paragraph, for errors that the user can mend.

    It exits 3 if training has ended, and is saved, but its last step was skipped, and 1 if
    --mode=check found a difference.
    """
    open_what_is_closed()
    try:
        args = parser().parse_args(argv)
    except ConfigError as error:
        print_error(error)
        sys.exit(2)
    args.opened = None  # The job's directory, once it is known to be this job's.

    def traceback_txt() -> Path | None:
        is_open = args.opened is not None and processes.is_first()
        return args.opened.traceback_txt if is_open else None

    run(
        lambda: _main(args),
        goes_on=args.mode in ("train", "eval", "decode") and not args.list,
        traceback_txt=traceback_txt,
        wraps=True,
    )


def _main(args: argparse.Namespace) -> None:
    print_log()
    if args.list:
        listed = registry.list_experiments(args.packages)
        width = max(map(len, listed), default=0)
        for name, summary in listed.items():
            print(f"{name:<{width}}  {summary}")
        return
    start(args.coordinator, args.num_processes, args.process_id, args.start_seconds)
    if processes.count() > 1:
        without_lines_of_gloo()
    _run(args)


def _run(args: argparse.Namespace) -> None:
    check_goes_with_mode(args)
    if args.html:
        file_path(args, "--html", "explain.html")
    require(
        args.mode not in ("explain", "plan", "summary", "check") or processes.count() == 1,
        f"The number of processes of --mode={args.mode}", processes.count(), "1",
        "Start it once, without --coordinator.",
    )
    if args.mode == "summary":
        from praxis_lite.run.trainer.summary import summary

        print(summary(open_for_reading(_job_log_dir(args), writes=False)))
        return
    recorded = args.mode in ("eval", "decode")
    config, experiment, job_dir = (_recorded_job if recorded else _job_of_experiment)(args)
    args.opened = job_dir
    print(f"{experiment}, {args.mode}" + (f", in {job_dir.path}" if job_dir else ""), flush=True)

    from praxis_lite.run.config.overrides import check_required
    from praxis_lite.run.experiment.recorded_job import check_tokenizers, keep_only
    from praxis_lite.run.experiment.setting_of import naming_settings

    check_required(config)
    prompts = _prompts(args)
    is_conversation = args.chat and not prompts
    if recorded:
        keep_only(config, args.mode, has_prompts=bool(prompts) or is_conversation)
    check_tokenizers(config)
    if args.mode == "check":
        from praxis_lite.tools.testing.command import check

        check(args, config, experiment)
        return
    if args.mode == "plan":
        from praxis_lite.tools.plan.command import plan

        plan(args, config, experiment)
        return
    _check_same_command(args, experiment, config)
    with naming_settings(config):
        _run_job(args, config, experiment, job_dir, prompts)


def _run_job(
    args: argparse.Namespace, config: "fdl.Config", experiment: str, job_dir: "JobDir | None",
    prompts: "list[Prompt]",
) -> None:
    """Builds a job and trains it, evaluates, decodes or explains it."""
    from praxis_lite.run.config.build import build

    html = args.html and file_path(args, "--html", "explain.html")
    is_conversation = args.chat and not prompts
    job = build(config)
    if prompts:
        from praxis_lite.run.trainer.decoding.user_prompts import with_prompts

        job = with_prompts(job, prompts)

    from praxis_lite.run.trainer.job_on_mesh import JobOnMesh, partitioner_of

    partitioner = partitioner_of(job, "load" if is_conversation else args.mode)
    from praxis_lite.run.trainer.checks.memory import (
        saying_what_is_large,
        saying_what_this_cpu_lacks,
    )

    with saying_what_is_large(partitioner.layout), saying_what_this_cpu_lacks():
        # Imported after the checks, so that an error need not wait for Orbax.
        if args.mode == "explain":
            from praxis_lite.tools.explain.explain import explain
            from praxis_lite.tools.plan.attached import figures_of_attached

            explain(
                partitioner, job.datasets, job.decode_datasets, print, title=experiment, html=html,
                figures_of=figures_of_attached(partitioner),
            )
            return

        from praxis_lite.run.trainer import launch
        from praxis_lite.run.trainer.decoding import decode

        on_mesh = JobOnMesh(partitioner, job.datasets, job.decode_datasets, job.run, job_dir)
        if args.mode == "train":
            packages = registry.allowed_packages(args.packages)
            launch.train(
                on_mesh, launch.LaunchedConfig(config, experiment, args.settings, packages)
            )
        elif args.mode == "eval":
            launch.evaluate(on_mesh, args.step)
        elif is_conversation:
            decode.chat(on_mesh, args.step, sys.stdin or ())
        else:
            decode.decode(on_mesh, args.step, prompts or None)


def _prompts(args: argparse.Namespace) -> "list[Prompt]":
    """Returns the prompts of --prompt and --prompts; none if neither is given."""
    if not args.prompt and args.prompts is None:
        return []
    from praxis_lite.run.trainer.decoding.user_prompts import as_conversations, read_prompts

    prompts = list(args.prompt or ())
    if args.prompts is not None:
        prompts += read_prompts(Path(args.prompts).expanduser())
    return as_conversations(prompts) if args.chat else prompts


def _job_log_dir(args: argparse.Namespace) -> str:
    if args.job_log_dir is None:
        raise ConfigError(f"--mode={args.mode} needs --job_log_dir=DIR, the job's directory.")
    if not args.job_log_dir:
        raise ConfigError(
            "--job_log_dir is empty, as where a variable of the shell is not set. Name a directory."
        )
    return args.job_log_dir


def _job_of_experiment(args: argparse.Namespace) -> "tuple[fdl.Config, str, JobDir | None]":
    """Returns the config that --exp and --set give, the experiment's full name, and the directory.

    There is a directory only if the job is to be trained.
    """
    if args.exp is None:
        raise ConfigError(
            f"--mode={args.mode} needs --exp=NAME; --list shows the names there are."
        )
    found = registry.get_experiment(args.exp, args.packages)

    from praxis_lite.run.config.class_attributes import configured

    config = configured(found, args.settings, registry.allowed_packages(args.packages))
    experiment, job_dir = registry.full_name(found), None
    if args.mode == "train":
        path = _job_log_dir(args)
        job_dir = open_shared(path, lambda: open_for_training(path, experiment))
    return config, experiment, job_dir


def _recorded_job(args: argparse.Namespace) -> "tuple[fdl.Config, str, JobDir]":
    """Returns a trained job's recorded config, --set applied, and its directory."""
    path = _job_log_dir(args)
    job_dir = open_shared(path, lambda: open_for_reading(path))

    from praxis_lite.run.config.overrides import apply_overrides
    from praxis_lite.run.experiment.recorded_job import recorded_config

    packages = registry.allowed_packages(args.packages)
    loaded = recorded_config(job_dir, packages)
    if args.exp is not None:
        named = registry.full_name(registry.get_experiment(args.exp, args.packages))
        if named != loaded.experiment:
            raise ConfigError(
                f"{job_dir.path} belongs to {loaded.experiment}, but --exp names {named}. Leave "
                "--exp out, or name that experiment's directory."
            )
    apply_overrides(loaded.config, args.settings, packages)
    return loaded.config, loaded.experiment, job_dir


def _check_same_command(args: argparse.Namespace, experiment: str, config: "fdl.Config") -> None:
    """Checks, before JAX makes a device, that all processes are about to do the same."""
    if processes.count() > 1:
        from praxis_lite.run.config.text import config_lines

        lines = dict(line.partition("=")[::2] for line in config_lines(config))
        command = {"--mode": args.mode, "--step": args.step, "experiment": experiment}
        check_same("The processes differ", {**versions(), **command, **lines})


if __name__ == "__main__":
    main()
