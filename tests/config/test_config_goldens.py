"""The configs of the registered experiments are what tests/goldens/configs has."""

import difflib

from tests.support.config_goldens import CONFIGS, config_texts


def test_no_experiment_has_changed_unseen():
    kept = {path.stem: path.read_text(encoding="utf-8") for path in CONFIGS.glob("*.txt")}
    actual = config_texts()
    assert kept.keys() == actual.keys(), "run python -m tests.support.config_goldens"
    for module, text in actual.items():
        difference = difflib.unified_diff(
            kept[module].splitlines(), text.splitlines(), f"{module}.txt", "now", lineterm="", n=0
        )
        assert "\n".join(difference) == "", (
            "If the change is meant, run python -m tests.support.config_goldens and commit it."
        )
