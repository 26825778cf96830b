"""Writes the configs of registered experiments to tests/goldens/configs.

    python -m tests.support.config_goldens

Each file contains the sorted lines of config.txt, so that the diff shows changes to the defaults of
an experiment or of any class that it uses. `benchmarks/published.py` covers the experiments in
`published`, whose configs repeat the defaults of the same classes.
"""

import importlib.util
import sysconfig

from praxis_lite.config.config_json import config_lines
from praxis_lite.experiment.registry import HOME, get_experiment, list_experiments
from tests.support.goldens import GOLDENS

CONFIGS = GOLDENS / "configs"


def config_texts() -> dict[str, str]:
    """Returns the `path=value` lines of each experiment, by module in experiments/.

    STDLIB stands for the directory of Python's standard library, which some experiments read as
    text.
    """
    stdlib = sysconfig.get_path("stdlib")
    texts: dict[str, str] = {}
    for name in list_experiments():
        if name.startswith("published."):
            continue
        module = name.partition(".")[0]
        if importlib.util.find_spec(f"{HOME}.{module}") is None:
            continue  # In a package of another test.
        lines = sorted(config_lines(get_experiment(name)().config()))
        section = "".join(f"{line}\n" for line in [f"[{name}]", *lines])
        section = section.replace(stdlib, "STDLIB")
        texts[module] = f"{texts[module]}\n{section}" if module in texts else section
    return texts


def main() -> None:
    CONFIGS.mkdir(exist_ok=True)
    for path in CONFIGS.glob("*.txt"):
        path.unlink()
    for module, text in config_texts().items():
        (CONFIGS / f"{module}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
