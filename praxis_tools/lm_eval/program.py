"""`praxis lm_eval`: the command line of lm_eval with `--model praxis_lite` registered.

praxis lm_eval --model praxis_lite --model_args job=DIR --tasks hellaswag
"""

import argparse
import sys
from collections.abc import Sequence

from praxis_lite.host.optional_packages import optional_module
from praxis_lite.programs.program import Program

NAME, CLASS = "praxis_lite", "praxis_tools.lm_eval.lm:HarnessModel"


class LmEval(Program):
    """Runs lm_eval with `--model praxis_lite` registered; lm_eval parses all options."""

    name = "lm_eval"
    summary = "evaluates a job with lm-evaluation-harness; takes the options of lm_eval"
    continues_without_output = True

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Returns all arguments, for lm_eval."""
        return argparse.Namespace(arguments=argv)

    def run(self, args: argparse.Namespace) -> None:
        """Runs lm_eval's command line. Raises ConfigError if lm_eval is not installed."""
        registry = optional_module("lm_eval.api.registry", "praxis lm_eval")
        command_line = optional_module("lm_eval.__main__", "praxis lm_eval")
        if NAME not in registry.model_registry:
            registry.model_registry.register(NAME, target=CLASS)
        # cli_evaluate has no parameter for arguments and always parses sys.argv.
        sys.argv[:] = ["lm_eval", *args.arguments]
        command_line.cli_evaluate()
