"""tests.support.mutants: what faults are, and which tests of a toy library they fail."""

import ast
import contextlib
import json
from pathlib import Path

import pytest

from tests.support import mutants
from tests.support.planted_mutants import KINDS, plant
from tests.support.reached_faults import ReachedFaults, collect

ROOT = Path(__file__).parents[1]
PARTS = ("praxis_lite/core/collectives", "praxis_lite/layers/moe")
LIBRARY = '''
"""Sums."""

LIMIT = 37


def total(a, b):
    return a + b


def checked(a):
    if a > LIMIT:
        raise ValueError(f"{a + 0} is more than {LIMIT}")
    return a


def in_process(a):
    return -a


def halved(a):
    return a / 2


def nobody_calls(a):
    return a and not a
'''
TESTS = """
import os, subprocess, sys
import pytest
from praxis_lite import sums

def test_total():
    assert sums.total(2, 3) == 5

def test_it_ends_the_process():
    if sums.total(7, 13) != 20:
        subprocess.Popen(["sleep", "3607"], start_new_session=True)
        os._exit(9)

def test_after_it():
    assert sums.total(0, 0) == 0

def test_more_than_the_limit():
    with pytest.raises(ValueError):
        sums.checked(38)

def test_another_process():
    code = "from praxis_lite import sums; assert sums.in_process(7) == -7"
    subprocess.run([sys.executable, "-c", code], check=True)

started = []

def test_starts():
    started.append(True)

def test_after_the_start():
    assert started and sums.halved(14) == 7

def test_after_the_start_too():
    assert started and sums.total(7, 13) == 20

def test_it_always_fails():
    assert sums.total(7, 13) == 21
"""
TEST_FILE = "tests/test_sums.py"


@pytest.fixture(scope="module")
def planted():
    return plant(ROOT, num=60, packages=PARTS)


@pytest.mark.nightly
def test_a_fault_changes_one_place_in_code_that_compiles(planted):
    for mutant in planted:
        source = (ROOT / mutant.file).read_bytes()
        changed = mutant.applied(source)
        compile(changed, mutant.file, "exec")
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant
        end = mutant.start + len(mutant.before.encode())
        assert source[mutant.start : end].decode() == mutant.before != mutant.after
        assert changed[mutant.start + len(mutant.after.encode()) :] == source[end:]
        assert source[: mutant.start].count(b"\n") + 1 == mutant.line


@pytest.mark.nightly
def test_faults_are_the_same_for_the_same_seed_all_different_and_of_every_kind(planted):
    assert plant(ROOT, num=60, packages=PARTS) == planted
    assert plant(ROOT, num=60, seed=7, packages=PARTS) != planted
    assert len({x.name for x in planted}) == 60
    assert {x.kind for x in planted} == KINDS.keys()


@pytest.mark.parametrize("code, kind, expected", [
    ("y = a - b", "sign", "y = a + b"),
    ("y = -a", "sign", "y = a"),
    ("y = a <= b", "comparison", "y = a < b"),
    ("y = a not in b", "comparison", "y = a in b"),
    ("y = range(len(a))", "off_by_one", "y = range((len(a)) - 1)"),
    ("y = jnp.sum(a, axis=-1)", "axis", "y = jnp.sum(a, axis=-2)"),
    ("y = P('data', 'mdl')", "axis", "y = P('mdl', 'data')"),
    ("y = jnp.einsum('btd,dh->bth', a, b)", "axis", "y = jnp.einsum('btd,dh->bht', a, b)"),
    ("y = a.swapaxes(0, 1)", "axis", "y = a"),
    ("y = f(a, b)", "arguments", "y = f(b, a)"),
    ("y = transpose(a, b)", "arguments", "y = transpose(b, a)"),
    ("y = jax.lax.psum(a * b, axes)", "collective", "y = a * b"),
    ("y = jnp.zeros(n, jnp.float32)", "dtype", "y = jnp.zeros(n, jnp.bfloat16)"),
    ("y = a.astype(b.dtype)", "dtype", "y = a"),
    ("require(a, 'a', 7, f'{b + c}')", "check", "pass"),
    ("if a:\n    raise ValueError(b + c)", "check", "if False:\n    raise ValueError(b + c)"),
    ("if a:\n    b = c", "condition", "if not (a):\n    b = c"),
    ("y = a * (b + c)", "term", "y = a * (b)"),
    ("file.flush()", "call", "pass"),
    ("y = f(keepdims=True)", "flag", "y = f(keepdims=False)"),
])  # fmt: skip
def test_each_kind(code, kind, expected, tmp_path):
    (tmp_path / "praxis_lite").mkdir()
    file = tmp_path / "praxis_lite/code.py"
    file.write_text(code)
    actual = {x.applied(code.encode()).decode() for x in plant(tmp_path) if x.kind == kind}
    assert expected in actual


@pytest.mark.parametrize(
    "code",
    [
        '"""A text, 7."""',
        "raise ValueError(7)",
        "logger.info('%s', 7)",
        "if a > 7:\n    shutil.rmtree(b)",
        "os.kill(-pid, 7)",
    ],
)
def test_messages_and_what_deletes_or_kills_have_no_fault(code, tmp_path):
    (tmp_path / "praxis_lite").mkdir()
    (tmp_path / "praxis_lite/code.py").write_text(code)
    assert plant(tmp_path) == []


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A library of one file, its faults, and which tests reach them."""
    folder = tmp_path_factory.mktemp("toy")
    root = folder / "checkout"
    for name, text in {
        "pytest.ini": "[pytest]\n",
        "praxis_lite/__init__.py": "",
        "praxis_lite/sums.py": LIBRARY,
        TEST_FILE: TESTS,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    planted = plant(root)
    assert collect(root, folder / "reached", planted, [TEST_FILE], workers=1) == 1
    return root, ReachedFaults(root, folder / "reached"), planted


@pytest.fixture(scope="module")
def records(toy, tmp_path_factory):
    """The records of five faults, the faults, and the file of the records."""
    root, reached, planted = toy
    planted = {(x.kind, x.after): x for x in planted}
    kinds = (
        ("sign", " - "),
        ("off_by_one", "38"),
        ("sign", "a"),
        ("condition", " or "),
        ("off_by_one", "3"),
    )
    faults = [planted[kind] for kind in kinds]
    out = tmp_path_factory.mktemp("records") / "records.jsonl"
    mutants.run(root, faults, reached, out, limit=60)
    return mutants.read_records(out), faults, out


def failed(records, number):
    found, faults, _ = records
    return [x.removeprefix(f"{TEST_FILE}::") for x in found[faults[number].name]["failed"]]


@pytest.mark.nightly
def test_every_test_that_fails_is_recorded_even_if_one_ends_the_process(records):
    assert failed(records, 0) == ["test_it_ends_the_process", "test_total"]
    record = records[0][records[1][0].name]
    assert record["passed"] == [f"{TEST_FILE}::test_after_it"]
    # Without the test that starts, it fails without the fault, too.
    assert record["unreliable"] == [f"{TEST_FILE}::test_after_the_start_too"]


@pytest.mark.nightly
def test_a_test_that_needs_another_one_is_run_with_it_at_last(records):
    assert failed(records, 4) == ["test_after_the_start"]


@pytest.mark.nightly
def test_a_process_that_a_test_leaves_is_ended(records):
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_bytes())
    assert b"sleep\0" + b"3607\0" not in commands


@pytest.mark.nightly
def test_a_constant_is_tested_by_what_reaches_its_file(records):
    assert failed(records, 1) == ["test_more_than_the_limit"]


@pytest.mark.nightly
def test_what_only_a_launched_process_reaches_is_caught(records):
    assert failed(records, 2) == ["test_another_process"]


@pytest.mark.nightly
def test_what_no_test_reaches_escapes(records):
    assert failed(records, 3) == [] and not records[0][records[1][3].name]["is_reached"]


@pytest.mark.nightly
def test_the_checkout_stays_as_it_is(toy, records):
    assert (toy[0] / "praxis_lite/sums.py").read_text() == LIBRARY


@pytest.mark.nightly
def test_a_run_that_was_stopped_plants_only_what_is_left(toy, records, tmp_path, monkeypatch):
    root, reached, _ = toy
    _, faults, path = records
    lines, out = path.read_text().splitlines(), tmp_path / "records.jsonl"
    out.write_text("".join(f"{line}\n" for line in lines[:4]))
    planted = []
    monkeypatch.setattr(
        mutants,
        "_record",
        lambda tree, mutant, *_: (
            planted.append(mutant)
            or {
                "failed": [],
                "passed": [],
            }
        ),
    )
    mutants.run(root, faults, reached, out, limit=60)
    assert [x.name for x in planted] == [json.loads(lines[4])["name"]]


def test_a_fault_that_escaped_with_tests_left_out_is_planted_again_with_more_time():
    record = {"failed": [], "left_out": 7, "limit": 60.0}
    assert mutants._is_done(record, 60.0) and not mutants._is_done(record, 61.0)
    assert mutants._is_done({**record, "failed": ["test"]}, 61.0)


@pytest.mark.nightly
def test_tables(toy, records):
    lines = [line.split() for line in mutants.tables([*records[0].values()], toy[1].measures)]
    rows = {line[0]: line[1:] for line in lines if line}
    assert rows["all"] == ["5", "4", "4", "1", "0", "1"]
    assert rows["praxis_tools"] == ["0"] * 6
    alone = {line[1].partition("::")[2] for line in lines if line[:1] == ["1"]}
    assert alone == {"test_more_than_the_limit", "test_another_process", "test_after_the_start"}
    # All but one of nine ran; five fail, three of them alone; four of them catch everything.
    assert rows[TEST_FILE][0] == "9" and rows[TEST_FILE][2:] == ["8", "5", "3", "4"]
    assert [f"{TEST_FILE}::test_after_the_start_too"] in lines
