"""The options of the command line, and which modes they go with."""

import argparse
import re
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.command import Parser
from praxis_lite.run.job.processes.start import START_SECONDS

# Options and modes of Pax, and what is there for them here.
PAX_OPTIONS = {
    "fdl_config": "--exp=NAME with --set path=value", "fdl_flags_override": "--set path=value",
    "tfds_data_dir": "the path of a Tfds source", "eval_on_test": "a dataset of that name",
    "job_log_dir_override": "--job_log_dir=DIR", "restore_checkpoint_step": "--step=N",
    "exit_after_ondemand_checkpoint": "nothing: SIGTERM saves and ends",
}
PAX_MODES = {
    "decode_once": "decode", "decode_batches": "decode", "eval_once": "eval", "infer": "decode",
}
MODES = ("train", "eval", "decode", "explain", "plan", "check", "summary")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = Parser(
        prog="main.py",
        description="Trains, evaluates, decodes, explains, plans or checks an experiment.",
    )
    found.add_argument("--exp", metavar="NAME", help="experiment: lm.PyDocs, mypackage.mod.MyLm")
    found.add_argument(
        "--packages", metavar="NAME,...", type=_names, action="extend", default=[],
        help="packages of your own, in which --exp is looked up besides praxis_lite.experiments",
    )
    found.add_argument(
        "--job_log_dir", metavar="DIR", action=_Once, help="where the job keeps its files"
    )
    found.former = {
        name: f"That is an option of Pax's; here it is {here}: docs/coming_from_pax.md."
        for name, here in PAX_OPTIONS.items()
    }
    found.add_argument(
        "--mode", choices=MODES, type=_mode, default="train", help="default: train"
    )
    found.add_argument(
        "--step", metavar="N|best", type=_step,
        help="the checkpoint to evaluate or decode from; default: the newest",
    )
    found.add_argument(
        "--set", dest="settings", metavar="path=value", nargs="+", action="extend", default=[],
        help="set any field of the config, for instance run.num_train_steps=200, or an attribute "
        "of the experiment's class",
    )
    found.add_argument(
        "--prompt", dest="prompt", metavar="TEXT", nargs="+", action="extend", default=None,
        help="with --mode=decode: texts to continue, printed as they come, instead of the "
        "experiment's decode datasets",
    )
    found.add_argument(
        "--prompts", metavar="FILE",
        help='the same from a file: a text in each line, or of FILE.jsonl {"prompt": TEXT} or '
        '{"messages": [...]} in each',
    )
    found.add_argument(
        "--chat", action="store_true",
        help="with --mode=decode: the prompts are what a user says, by the tokenizer's chat "
        "template; without prompts: read from the terminal, one after the other",
    )
    found.add_argument(
        "--html", metavar="FILE",
        help="with --mode=explain or plan: where to write it as a page as well",
    )
    found.add_argument(
        "--json", metavar="FILE",
        help="with --mode=check or plan: where to write the certificate, or the plan, as well",
    )
    found.add_argument(
        "--meshes", metavar="1x4x2,...",
        help="with --mode=check: the meshes to check on; default: the experiment's own, each axis "
        "alone, all axes, and one that divides as little as possible",
    )
    found.add_argument(
        "--steps", metavar="N|NAMES", type=_steps, default=None,
        help="with --mode=check: the steps of training on the experiment's own mesh; default: 20. "
        "With --mode=plan: which steps, of train,eval,decode; default: train",
    )
    found.add_argument(
        "--topology", metavar="CHIP:SHAPE",
        help="with --mode=plan: the devices to plan for, such as v5e:16x16, cpu:8, gpu:h100:4x8",
    )
    found.add_argument(
        "--num_slices", metavar="N", type=int, default=None,
        help="with --mode=plan: so many slices of that topology; default: 1",
    )
    found.add_argument(
        "--search", action="store_true",
        help="with --mode=plan: look for the fastest mesh, preset, remat and micro-batches",
    )
    found.add_argument(
        "--search_minutes", metavar="M", type=float, default=None,
        help="with --search: for how long; default: 10",
    )
    found.add_argument(
        "--measure", action="store_true",
        help="with --mode=plan: run ten steps on the attached devices, and compare",
    )
    found.add_argument(
        "--shrink", action="store_true",
        help="with --mode=check: a smaller model of the same kind, for one device to hold",
    )
    found.add_argument(
        "--coordinator", metavar="HOST:PORT",
        help="of several processes: where the first one can be reached. Under SLURM, Open MPI, "
        "Kubernetes and on TPU slices none of these flags is needed",
    )
    found.add_argument("--num_processes", metavar="N", type=int, help="how many there are")
    found.add_argument("--process_id", metavar="K", type=int, help="which this is, from 0")
    found.add_argument(
        "--start_seconds", metavar="S", type=int, default=START_SECONDS,
        help=f"how long they wait for each other at the start; default: {START_SECONDS}",
    )
    found.add_argument("--list", action="store_true", help="list the experiments and stop")
    return found


class _Once(argparse.Action):
    """Stores an option that may be given once: of two directories the first would be forgotten."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is not None and before != values:
            raise argparse.ArgumentError(
                self, f"it is given twice, as {before} and as {values}; give it once"
            )
        setattr(namespace, self.dest, values)


def _mode(text: str) -> str:
    if text in PAX_MODES:
        raise argparse.ArgumentTypeError(
            f"{text} is a mode of Pax's; here it is {PAX_MODES[text]}: docs/coming_from_pax.md"
        )
    return text


def _step(word: str) -> int | str:
    if word != "best" and not word.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{word!r} is no checkpoint: wanted is a step's number, or best; without --step it is "
            "the newest"
        )
    return word if word == "best" else int(word)


def _steps(words: str) -> int | list[str]:
    if re.fullmatch(r"-?\d+", words):
        return int(words)
    names = _names(words)
    if not set(names) <= {"train", "eval", "decode"}:
        raise argparse.ArgumentTypeError(
            f"{words!r} is neither a number nor names of steps: train, eval, decode"
        )
    return names


def _names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",")]


# The options that belong to some modes alone, what they say, and what to do in the others.
_OF_MODES = {
    "step": (("eval", "decode"), "names the checkpoint"),
    "prompt": (("decode",), "gives texts to continue"),
    "prompts": (("decode",), "names a file of prompts"),
    "chat": (("decode",), "says how prompts are read"),
    "html": (("explain", "plan"), "names the page to write"),
    "json": (("check", "plan"), "names the file to write"),
    "meshes": (("check",), "names the meshes to check on"),
    "steps": (("check", "plan"), "says how long to train, or which steps to plan"),
    "topology": (("plan",), "names the devices to plan for"),
    "num_slices": (("plan",), "says how many slices to plan for"),
    "search": (("plan",), "looks for the fastest configuration"),
    "search_minutes": (("plan",), "limits the search"),
    "measure": (("plan",), "runs the steps"),
    "shrink": (("check",), "checks a smaller model"),
}


def check_goes_with_mode(args: argparse.Namespace) -> None:
    """Raises ConfigError if an option was given that the mode has no use for."""
    for name, (modes, what) in _OF_MODES.items():
        if getattr(args, name) not in (None, False) and args.mode not in modes:
            named = " and ".join(f"--mode={one}" for one in modes)
            also = "; it takes the newest checkpoint" if name == "step" else ""
            raise ConfigError(
                f"--{name} {what} for {named}; --mode={args.mode} has no use for it{also}. Leave "
                "it out."
            )
    is_number = isinstance(args.steps, int)
    if args.steps is not None and is_number != (args.mode == "check"):
        wanted = "a number" if args.mode == "check" else "names, such as train,eval"
        raise ConfigError(f"--steps={args.steps} with --mode={args.mode}; wanted is {wanted}.")


def file_path(args: argparse.Namespace, option: str, example: str) -> Path:
    """Returns the file that an option names, such as "--html".

    Raises:
      ConfigError: it is a directory, or there is no directory for it.
    """
    given = getattr(args, option.lstrip("-"))
    path = Path(given)
    if path.is_dir() or not path.name:
        said = f"is a directory; wanted is a file, such as {path / example}"
    elif not path.parent.is_dir():
        said = f"cannot be written: there is no directory {path.parent}. Make it"
    else:
        return path
    raise ConfigError(f"{option}={given} {said}.")
