"""Real processes of which one hangs: named within a minute, with stack, step and collective.

All jobs of this file are launched one after the other by a fixture. What they mostly do is wait to
be found stuck, so each waits while the next one starts.
"""

import concurrent.futures
import contextlib
import json
import re

import pytest

from tests.support.stuck_jobs import OUTSIDE, Case, begun, elastic_lines, watched

pytestmark = pytest.mark.slow

LONG = ("run.stopping.watchdog_seconds=600",)
# The longest ones first. The nightly ones are those of other processes or places.
ELASTIC = [
    Case(1, "INPUT", hows, settings=LONG, flags=("--elastic",))
    for hows in (("keeps the lock", "is stopped"), ("sleeps",))
]
HANGS = [
    Case(2, "HOOK", ("sleeps",), is_slow_before=True),
    Case(1, "INPUT", ("keeps the lock",)),
    Case(0, "INPUT", ("sleeps",)),
    Case(0, "HOOK", ("keeps the lock",)),
]
STOPPED = [Case(culprit, "ANYWHERE", (OUTSIDE,), settings=LONG) for culprit in (0, 1)]
NIGHTLY = (ELASTIC[1], *HANGS[1:], *STOPPED)


@pytest.fixture(scope="module")
def seen_of(request, tmp_path_factory):
    """Yields a function from a case to what was seen of its job."""
    chosen = {
        item.callspec.params["case"]
        for item in request.session.items
        if item.module is request.module
    }
    seen = {}
    with concurrent.futures.ThreadPoolExecutor(len(chosen)) as pool, contextlib.ExitStack() as left:
        for case in [case for case in (*ELASTIC, *HANGS, *STOPPED) if case in chosen]:
            folder = tmp_path_factory.mktemp("stuck")
            try:
                # Here and not in the thread: signals are for the main thread.
                processes = begun(case, folder)
            except AssertionError as error:
                seen[case] = concurrent.futures.Future()
                seen[case].set_exception(error)
            else:
                for process in processes:
                    left.callback(process.kill)
                seen[case] = pool.submit(watched, case, folder, processes)
        yield lambda case: seen[case].result()


def each(*cases):
    """Returns the mark of a test with a case for each of these jobs."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case,
                id=f"{case.where}-{case.hows[0]}-{case.culprit}",
                marks=pytest.mark.nightly if case in NIGHTLY else (),
            )
            for case in cases
        ],
    )


@each(*STOPPED)
def test_a_stopped_process_is_named_and_the_others_end(seen_of, case):
    seen, stopped = seen_of(case), case.culprit
    print(f"stopped process {stopped}: named after {seen.seconds:.0f} s")
    for k, text in enumerate(seen.texts):
        if k != stopped:
            assert seen.codes[k] == 1
            assert re.search(
                rf"process {stopped} \(.+\) has sent no heartbeat for 2\d s: it is "
                r"stopped by a signal \(state T\)",
                text,
            ), text
            # It says so every two seconds, in which it may have made all of its steps.
            last = r"last report, it has completed (no step yet|step \d+) and (is in|waits)"
            assert re.search(last, text), text


@each(*HANGS)
def test_a_process_that_hangs_is_named_with_its_stack_and_what_the_others_wait_in(seen_of, case):
    # Where an evaluation was slow before, none was: it would have ended then, in step 9.
    seen, culprit, (how,), where = seen_of(case), case.culprit, case.hows, case.where
    texts = seen.texts
    print(f"{where} {how} in process {culprit}: named after {seen.seconds:.0f} s")
    assert [seen.codes[k] for k in range(3) if k != culprit] == [1, 1]
    line = {"INPUT": 'hang("INPUT")', "HOOK": 'hang("HOOK")'}[where]
    if how == "sleeps":
        report = (seen.job / "stacks.txt").read_text()
        assert report.split(" ", 2)[2].strip() in texts[0]
        assert re.search(rf"stuck: process {culprit} \(.+\) is stuck: no sign of life", report)
        assert f"Stacks of process {culprit} (" in report and line in report
        assert texts[1 if culprit != 1 else 2].count("is stuck, as reported above") == 1
        words = report.splitlines()[0]
        doing = "input wait" if where == "INPUT" else "hook HangingHook"
        assert re.search(rf"it has completed step 1[0-3] and is in: {doing}", words), words
    else:
        # Its own standard error has its stack, that of the others its name.
        assert "experiments.py" in texts[culprit] and " in hang" in texts[culprit]
        words = texts[1 if culprit != 1 else 2]
        assert re.search(rf"process {culprit} \(.+\) has sent no heartbeat for 2\d s: it ", words)
        assert re.search(r"last report, it has completed step \d+ and (is in|waits)", words)
        assert re.search(
            r"process [012] \(.+\): it has completed step 1[1-3] and waits for its own "
            r"devices to finish step 1[2-4]",
            words,
        ), words
    step = "a step" if how != "sleeps" else "step 1[23]"
    collective = r"[a-z-]+ of \d+ \w+ over data, in "
    assert re.search(rf"{step}'s first collective that needs [^:]+: {collective}", words), words


@each(*ELASTIC)
def test_the_stuck_worker_of_an_elastic_job_is_named_ended_and_replaced(seen_of, case):
    seen = seen_of(case)
    lines = [
        line
        for line in map(json.loads, elastic_lines(seen.job).splitlines())
        if line["kind"] == "stuck"
    ]
    print(f"elastic: {seen.seconds:.0f} s; {[line['seconds'] for line in lines]}")
    assert [(line["who"], line["members"]) for line in lines] == [([1], [0, 1, 2])] * len(case.hows)
    begin = re.compile(r"^(?=\d{4}-\d\d-\d\d \S+ stuck: )", re.MULTILINE)
    reports = begin.split((seen.job / "stacks.txt").read_text())[1:]
    assert len(reports) == len(case.hows)
    for how, report in zip(case.hows, reports, strict=True):
        assert re.search(r"stuck: process 1 \(.+\) is stuck: ", report), report
        assert "The worker is killed and replaced." in report
        assert report.splitlines()[0][20:] in seen.texts[1]
        if how == "is stopped":
            assert "stopped by a signal (state T)" in report
            assert "Its stacks are not available" in report
        else:
            assert re.search(r'experiments.py", line \d+,? in hang', report), report
            pattern = r"first collective that needs (its|the stuck process's) devices: "
            assert re.search(pattern, report), report
