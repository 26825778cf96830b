"""The record of examples, and its proof: of a run that was killed, moved and rolled back.

That of two processes: trainer/test_loss_spikes.py.
"""

import contextlib
import io
import json
import os
import shutil
import struct
from unittest import mock

import numpy as np
import pytest
import xxhash

from praxis_lite.inputs.processes.row_digests import row_digests, total
from praxis_lite.job.examples.history import history_of
from praxis_lite.job.examples.lines import (
    Record,
    RowSpan,
    Start,
    line_of,
    next_start,
    read_record,
)
from praxis_lite.job.job_dir import JobDir
from tests.support.commands import praxis
from tests.support.job_runs import home, launch, succeed
from tests.support.line_jobs import LINE

_START = dict(
    is_new=True,
    time=1.0,
    launch=1.0,
    generation=None,
    num_processes=1,
    host="a",
    mesh={"data": 1},
    batch_size=7,
    rows=((0, 7),),
    skipped=(),
    data="d",
    versions={},
)


def proven(*argv):
    """Returns the exit status of `digest`, its output, and its errors in a line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = praxis("inputs", "digest", *argv, "--packages=jobzoo")
    return status, out.getvalue(), " ".join(err.getvalue().split())


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job that ended in batch 12, and went on from step 7 on twice the devices, over a spike."""
    path = tmp_path_factory.mktemp("examples") / "job"
    with mock.patch.dict(os.environ, {"LINES_RAISE_AT": "12"}):
        assert launch(LINE, f"--job_log_dir={path}").code == 1
    succeed(LINE, f"--job_log_dir={path}", "--set", "mesh.ici_mesh_shape=(1, 4, 1)")
    return JobDir(path)


@pytest.fixture
def copy(job, tmp_path):
    return JobDir(shutil.copytree(job.path, tmp_path / "job"))


def lines(job):
    return [json.loads(text) for text in (job.examples / "0.jsonl").read_text().splitlines()]


def write(job, items):
    (job.examples / "0.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


def digest_by_hand(indices, batch_size=13):
    """Returns the digest of these batches of `Line`, row by row with struct."""
    home()
    from jobzoo.lines import Lines

    pipeline, whole = Lines(batch_size, poisoned=(15,)), 0
    seed = xxhash.xxh3_64_intdigest(b"inputs float32 [5]\nlabels float32 []\n")
    for index in indices:
        batch = pipeline.rows(index, slice(0, batch_size))
        for row in range(batch_size):
            text = struct.pack("<QQ", index, row)
            text += batch["inputs"][row].tobytes() + batch["labels"][row].tobytes()
            whole += xxhash.xxh3_64_intdigest(text, seed)
    return f"{whole % 2**64:016x}"


def test_a_run_through_a_kill_another_mesh_and_a_roll_back_used_every_example_once(job):
    status, out, err = proven(f"--job={job.path}")
    assert (status, err) == (0, "")
    assert "steps 1 to 29: batches 0 to 29, without 15; relaunches: 1, " in out
    assert "roll-backs: 1, recomputed steps: 6" in out  # 8 to 11; 15, 16.
    assert f"digest {digest_by_hand([*range(15), *range(16, 30)])}" in out
    assert "every example exactly once, in order: the record is complete, and it matches" in out
    assert [item["mesh"]["data"] for item in lines(job) if "mesh" in item] == [2, 4, 4]


def test_without_the_data_the_record_alone_is_looked_at_and_it_is_said(copy):
    status, out, _ = proven(f"--job={copy.path}", "--recorded-only")
    assert status == 0 and "the record is complete; it was not compared with the data" in out
    items = lines(copy)
    items[1]["digest"] = f"{int(items[1]['digest'], 16) ^ 1:016x}"
    write(copy, items)
    assert proven(f"--job={copy.path}", "--recorded-only")[0] == 0


def flipped(items):
    item = next(item for item in items if item.get("steps") == [22, 28])
    item["digest"] = f"{int(item['digest'], 16) ^ 16:016x}"


def removed(items):
    items.remove(next(item for item in items if item.get("steps") == [15, 21]))


def removed_last(items):
    items.pop()


def removed_start(items):
    items.remove(next(item for item in items if item.get("skipped") == [15] and "mesh" in item))


def made_twice(items):
    items.append(next(item for item in items if item.get("steps") == [22, 28]))


def fewer_rows(items):
    for item in items:
        if "mesh" in item:
            item["rows"] = [[0, 12]]


def unsaid(items):
    for item in items:
        item["skipped"] = []


def other_batches(items):
    item = next(item for item in items if item.get("steps") == [1, 7])
    item["batches"] = [1, 7]


@pytest.mark.parametrize(
    "tamper, words",
    [
        (flipped, "steps 22 to 28 (start 3, process 0): the recorded digest is"),
        (removed, "steps 15 to 21 are not on record"),
        (removed_last, "steps 29 to 29 are not on record, but step 29 is saved"),
        (removed_start, "the record has no line for start 3"),
        (made_twice, "steps 22 to 28 are on record twice"),
        (fewer_rows, "rows 12 to 12 of each batch were not fed by any process"),
        (unsaid, "steps 15 to 21 were fed the batches 14 to 21; expected 14 to 20"),
        (other_batches, "steps 1 to 7 were fed the batches 1 to 7; expected 0 to 6"),
    ],
)
def test_a_record_that_was_changed_is_caught(copy, tamper, words):
    items = lines(copy)
    tamper(items)
    write(copy, items)
    status, out, _ = proven(f"--job={copy.path}")
    assert status == 1 and any(
        words in line for line in out.splitlines() if line.startswith("WRONG: ")
    )
    assert "exactly once" not in out


def test_other_data_than_those_that_were_fed_are_caught(job):
    status, out, _ = proven(f"--job={job.path}", "--set", "datasets.train.poisoned=(16,)")
    assert status == 1
    # Batch 15 was left out; batch 16 is another now.
    (fault,) = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert "steps 15 to 21" in fault and "but the data has the digest" in fault


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--job={job}", "--dataset=train"], "--dataset cannot be combined with --job"),
        (["--recorded-only", "jobzoo.lines.Line"], "--recorded-only requires --job"),
        ([], "The experiment is missing"),
        (["--job={job}/nowhere"], "does not exist"),
    ],
)
def test_errors_say_what_to_change(job, argv, words):
    status, _, err = proven(*(item.format(job=job.path) for item in argv))
    assert status == 2 and words in err


def test_a_job_without_a_record_is_an_error_that_says_so(copy):
    shutil.rmtree(copy.examples)
    status, _, err = proven(f"--job={copy.path}")
    assert status == 2 and "has no record of its examples" in err


def test_the_sum_of_row_digests_does_not_depend_on_who_feeds_which_rows():
    rng = np.random.default_rng(7)
    batch = {
        "b": rng.integers(0, 9, (13, 3), np.int32),
        "a": rng.random((13, 2, 5), np.float32),
        "c": np.array(rng.random(13) > 0.5),
        "empty": np.zeros((13, 0), np.float32),
    }
    whole = total(row_digests(batch, 5))
    parts = [
        row_digests({name: leaf[rows] for name, leaf in batch.items()}, 5, rows.start)
        for rows in (slice(0, 3), slice(3, 3), slice(3, 12), slice(12, 13))
    ]
    assert sum(map(total, parts)) % 2**64 == whole
    assert len(set(np.concatenate(parts).tolist())) == 13
    swapped = {name: leaf[::-1] for name, leaf in batch.items()}
    assert whole not in (total(row_digests(swapped, 5)), total(row_digests(batch, 6)))
    renamed = {**batch, "d": batch["b"]}
    del renamed["b"]
    assert total(row_digests(renamed, 5)) != whole


def starts(*steps, processes=1, rows=(((0, 7),),), **others):
    return [
        Start(
            start=number,
            step=step,
            process=process,
            **{
                **_START,
                "is_new": number == 1,
                "launch": float(number),
                "num_processes": processes,
                "rows": rows[process],
                **others,
            },
        )
        for number, step in enumerate(steps, 1)
        for process in range(processes)
    ]


def stretch(start, first, last, process=0):
    return RowSpan(
        start=start,
        process=process,
        steps=(first, last),
        batches=(first - 1, last - 1),
        skipped=(),
        digest=f"{1:016x}",
    )


def test_each_step_counts_by_the_start_that_made_it_for_good():
    # Start 2 went on from 4; start 3, from disk, from 2; start 4 from what peers kept of start 2.
    record = Record(
        starts(0, 4, 2, 6),
        [
            stretch(1, 1, 2),
            stretch(1, 3, 4),
            stretch(1, 5, 8),
            stretch(2, 5, 6),
            stretch(3, 3, 4),
            stretch(4, 7, 9),
        ],
        0,
    )
    history = history_of(record, 9)
    assert [(part.number, part.first_step, part.last_step) for part in history.segments] == [
        (1, 1, 4),
        (2, 5, 6),
        (4, 7, 9),
    ]
    assert list(history.faults) == [] and history.num_lost_steps == 4 + 2
    assert history.digest == f"{2 + 1 + 1:016x}"


@pytest.mark.parametrize(
    "rows, fault",
    [
        ((((0, 3),), ((3, 7),)), None),
        ((((0, 1), (2, 7)), ((1, 2),)), None),
        ((((0, 3),), ((4, 7),)), "rows 3 to 3 of each batch were not fed by any process"),
        ((((0, 4),), ((3, 7),)), "rows 3 to 3 were fed twice"),
    ],
)
def test_rows_of_two_processes_must_be_all_rows_and_none_twice(rows, fault):
    stretches = [stretch(1, 1, 5, 0), stretch(1, 1, 5, 1)]
    faults = history_of(Record(starts(0, processes=2, rows=rows), stretches, 0), 5).faults
    assert (fault is None) == (not faults) and (fault or "") in " ".join(faults)


def test_a_process_whose_file_is_gone_is_missed():
    rows = (((0, 3),), ((3, 7),))
    record = Record(starts(0, processes=2, rows=rows)[:1], [stretch(1, 1, 5, 0)], 0)
    faults = " ".join(history_of(record, 5).faults)
    assert "lines of the processes [0], but had 2" in faults
    assert "rows 3 to 6 of each batch were not fed by any process" in faults


def test_a_job_that_trained_before_there_was_a_record_proves_only_the_rest():
    record = Record(starts(5, is_new=False), [stretch(1, 6, 9)], 0)
    assert list(history_of(record, 9).faults) == ["steps 1 to 5 are not on record"]
    begun = history_of(Record(starts(5), [stretch(1, 6, 9)], 0), 9)
    assert list(begun.faults) == [] and "started from the state of step 5" in begun.notes[0]


def test_the_next_start_is_found_at_the_end_of_the_files(tmp_path):
    assert next_start(tmp_path / "nowhere") == next_start(tmp_path) == 1
    for name, last in (("0", 3), ("1", 2)):
        lines = [line_of(item) for item in starts(*range(last))]
        lines += [line_of(stretch(last, step, step)) for step in range(1, 999)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines) + '{"start": 9, "st')
    assert next_start(tmp_path) == 4 and read_record(tmp_path).last_start == 3


def test_starts_are_read_in_their_order_from_the_files_of_all_processes(tmp_path):
    record = starts(0, 4, processes=2, rows=(((0, 3),), ((4, 7),)))
    for process in (0, 1):
        lines = [line_of(start) for start in record if start.process == process]
        (tmp_path / f"{process}.jsonl").write_text("".join(lines))
    assert read_record(tmp_path).starts == record


def test_lines_of_nonsense_are_left_out_and_counted(tmp_path):
    (tmp_path / "0.jsonl").write_text('{"start": 1}\n[]\n{"digest": 1}\nnull\n\x00\n{"sta')
    record = read_record(tmp_path)
    assert (record.starts, record.spans, record.num_unreadable) == ([], [], 6)
