"""Command line of lm_eval with `--model praxis_lite` registered.

python -m praxis_tools.lm_eval --model praxis_lite --model_args job=DIR --tasks hellaswag
"""

import sys
from collections.abc import Sequence

from praxis_lite.host.optional_packages import optional_module
from praxis_lite.job.command import run

NAME, CLASS = "praxis_lite", "praxis_tools.lm_eval.lm:HarnessModel"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs lm_eval with `--model praxis_lite` registered."""
    arguments = sys.argv[1:] if argv is None else argv
    run(lambda: evaluate(arguments), continues_without_output=True)


def evaluate(argv: Sequence[str]) -> None:
    """Runs lm_eval's command line.

    Raises:
      ConfigError: lm_eval is not installed.
    """
    registry = optional_module("lm_eval.api.registry", "python -m praxis_tools.lm_eval")
    command_line = optional_module("lm_eval.__main__", "python -m praxis_tools.lm_eval")
    if NAME not in registry.model_registry:
        registry.model_registry.register(NAME, target=CLASS)
    # cli_evaluate has no parameter for arguments and always parses sys.argv.
    sys.argv[:] = ["lm_eval", *argv]
    command_line.cli_evaluate()


if __name__ == "__main__":
    main()
