"""Signals to a job of two real processes while it saves, restores, compiles or evaluates."""

import signal

import pytest

from tests.support.interrupted_jobs import Pair, numbers_of, steps_in, uninterrupted

WHO = pytest.mark.parametrize("who", ["01", "1"])


def first_of(pair):
    """Returns how the first process ended; both have ended well."""
    first, second = pair.ended()
    assert (first.code, second.code) == (0, 0), (first, second)
    return first


def goes_on(folder, words):
    """Runs the same command again, and compares its numbers with those of no interruption."""
    pair = Pair(folder)
    first = first_of(pair)
    assert words in first.out, first
    assert numbers_of(pair.job) == uninterrupted()
    assert steps_in(pair.job)[-1] == "29"


@pytest.mark.slow
@WHO
def test_a_signal_while_a_step_is_saved_ends_both_with_a_later_step(tmp_path, who):
    pair = Pair(tmp_path, "write of 14")
    pair.reaches("write of 14")
    pair.signal(signal.SIGINT, who)
    assert all(line.startswith("SIGINT: ending when") for line in pair.answer(who))
    pair.opens("write of 14")
    first = first_of(pair)
    # The step after that in which both agree; a save of step 21 may have been waited for.
    last = max(map(int, steps_in(pair.job)))
    assert 14 < last < 29 and f"step {last} is saved, and the same command" in first.out
    goes_on(tmp_path, f"restored the checkpoint of step {last}")


@pytest.mark.slow
@WHO
def test_a_second_signal_ends_both_though_a_write_hangs(tmp_path, who):
    pair = Pair(tmp_path, "write of 14")
    pair.reaches("write of 14")
    pair.signal(signal.SIGTERM, who)
    pair.answer(who)
    pair.signal(signal.SIGINT, who)
    done = pair.ended()
    assert [process.code for process in done] == [130, 130], done
    newest = "SIGINT, the second signal{}; the newest checkpoint is of step 7"
    for k, process in enumerate(done):
        if str(k) in who:
            assert newest.format(": ended at once") in process.err, done
        else:
            assert f"error: process {1 - k} (" in process.err, done
            assert "was ended by " + newest.format("") in process.err, done
    assert steps_in(pair.job) == ["7"]
    goes_on(tmp_path, "restored the checkpoint of step 7")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "newest"),
    [
        ("restore", "the newest checkpoint is of step 7"), ("compile", "no step had been made"),
        ("evaluation", "the newest checkpoint is of step 7"),
        ("digests of 14", "the newest checkpoint is of step 7"),
        ("write of 29", "the newest checkpoint is of step 28"),
    ],
)
def test_wherever_one_is_ended_at_once_the_other_hears_of_it(tmp_path, place, newest):
    if place == "restore":
        pair = Pair(tmp_path, "write of 14")
        pair.reaches("write of 14")
        pair.signal(signal.SIGKILL, "01")
        pair.ended()
    # The save of step 14 would else be whole before the signal, or not.
    pair = Pair(tmp_path, place, *(["write of 14"] if place == "evaluation" else []))
    pair.reaches(place, "0" if place.startswith("digests") else "01")
    pair.signal(signal.SIGTERM, "1")
    assert pair.answer("1")[0].startswith("SIGTERM: ending after")
    pair.signal(signal.SIGINT, "1")
    first, second = pair.ended()
    assert (first.code, second.code) == (130, 130), (first, second)
    assert f"was ended by SIGINT, the second signal; {newest}; so this process" in first.err
    assert second.err.endswith(f"ended at once; {newest}\n")
    assert steps_in(pair.job)[-1:] == [s for s in [newest.split()[-1]] if s.isdecimal()]


@pytest.mark.slow
@WHO
def test_a_second_signal_in_python_cancels_the_save_and_the_process_goes_on(tmp_path, who):
    pair = Pair(tmp_path, "write of 14", "wait for 14", in_python=True)
    pair.reaches("write of 14")
    pair.reaches("wait for 14")  # Before, one might wait for the other on its devices.
    pair.signal(signal.SIGTERM, who)
    pair.answer(who)
    pair.signal(signal.SIGINT, who)
    assert all("the second signal: the step is not saved" in line for line in pair.answer(who))
    if who != "01":
        pair.opens("write of 14")  # The other process writes its part to the end.
    done = pair.ended()
    for k, process in enumerate(done):
        if str(k) in who:
            assert "The save of step 14 was cancelled. The newest checkpoint is of step 7" in (
                process.out
            ), done
            assert "raised KeyboardInterrupt: SIGINT" in process.out, done
        else:
            assert "raised FailedSave: The checkpoint of step 14 could not be saved" in process.out
            assert f"process {1 - k}: it was cancelled by a signal" in process.out, done
    assert sorted(path.name for path in pair.job.checkpoints.iterdir()) == ["7"]
