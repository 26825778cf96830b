"""A worker stops for its supervisor alone, whatever a cluster sends to the processes of a host."""

import os
import signal
import subprocess
import sys

from praxis_lite.job.processes.signals import SIGNALS, STOPS_WORKER
from praxis_lite.job.processes.stacks import request_stacks
from tests.support.job_runs import CHECKOUT

WORKER = """
import os, signal, subprocess, sys, time
from praxis_lite.job.processes import signals
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.job.processes import stacks

with signals.EndsBySignal():
    signals.listen_to_supervisor_only()
    if sys.argv[1] == "starts":
        print("there", flush=True)
        time.sleep(60)
    forked = os.fork()
    if not forked:
        time.sleep(60)
        os._exit(0)
    started = subprocess.Popen(["sleep", "60"])
    time.sleep(0.2)
    os.kill(forked, signal.SIGTERM)  # A pool ends its workers so.
    started.terminate()
    print(os.waitpid(forked, 0)[1], started.wait(), flush=True)
    with StopRequest(num_processes=2) as stop:
        stop.step_ended()
        print("there", stacks.install_stacks_handler(), flush=True)
        while not stop.reason:
            time.sleep(0.02)
os.kill(os.getpid(), signal.SIGINT)  # A late signal.
print("saved:", stop.reason)
"""


def start(where):
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, where],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    lines = []
    while not lines or not lines[-1].startswith("there"):
        lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()[1]
    return process, lines


def test_signals_to_a_whole_host_do_not_end_a_worker_before_it_has_saved():
    process, lines = start("trains")
    assert lines[0] == f"{signal.SIGTERM} {-signal.SIGTERM}\n"
    # A stuck worker is asked for its stacks, which stops none.
    assert "<module>" in request_stacks(process.pid, lines[-1].split()[1])
    for item in (*SIGNALS, signal.SIGTERM):
        process.send_signal(item)
    process.send_signal(STOPS_WORKER)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "saved: its supervisor\n")
    # Python 3.12 warns of the fork of this test before that.
    assert "\nits supervisor: ending after the current step is saved" in f"\n{err}"


def test_a_worker_that_has_nothing_to_save_ends_at_once():
    process, _ = start("starts")
    process.send_signal(signal.SIGTERM)
    process.send_signal(STOPS_WORKER)
    assert process.communicate(timeout=30)[1] == "ended by its supervisor\n"
    assert process.returncode == 128 + STOPS_WORKER
