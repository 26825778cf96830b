"""Every golden is read by a test, and can be found."""

from pathlib import Path

from tests.support.goldens import GOLDENS, pax_cases

TESTS = Path(__file__).parent
# A test takes its cases of these kinds from cases.json, all of them.
TESTED_BY_KIND = {"decode", "language_model", "layer", "learner"}
# Tests take all that lies in these folders.
TESTED_WHOLE = {"configs", "hf", "own_checkpoints", "tokenizers"}
TESTED_BY_NAME = {"function": "masks", "init": "weight_init", "schedules": "schedules_"}


def test_a_case_of_pax_has_its_arrays_and_a_test():
    actual = {path.stem for path in GOLDENS.glob("pax/**/*.npz")}
    assert actual == set(pax_cases())
    for name, case in pax_cases().items():
        assert case["kind"] in TESTED_BY_KIND or TESTED_BY_NAME[case["kind"]] == name


def test_every_other_file_is_read_by_a_test():
    sources = "\n".join(path.read_text() for path in TESTS.rglob("*.py"))
    for path in GOLDENS.rglob("*.*"):
        folder = path.relative_to(GOLDENS).parts[0]
        is_case = folder == "pax" and path.suffix == ".npz"
        if not is_case and folder not in TESTED_WHOLE and path.suffix != ".md":
            stem = path.stem.removeprefix("pax_optimizers_")
            names = f'"{stem}"', f'"{path.name}"', f"/{path.name}"
            assert any(name in sources for name in names), path
