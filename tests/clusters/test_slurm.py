"""The sbatch scripts: their options are SLURM's, and with processes for hosts they do as told."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from praxis_lite.job.processes.start import find_others
from praxis_lite.main import MODES
from praxis_lite.modes.options import parse_command_line
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.clusters.recipes import (
    CLUSTERS,
    ROOT,
    calls,
    check_flags,
    check_shell,
    environment,
    our_options,
    program,
)
from tests.support.job_runs import home
from tests.support.process_pairs import free_port

SCRIPT = CLUSTERS / "slurm.sbatch"
SWEEP = CLUSTERS / "sweep.sbatch"
SCRIPTS = pytest.mark.parametrize("path", [SCRIPT, SWEEP], ids=lambda path: path.stem)
# Options of sbatch(1) and the forms of their values, as SLURM 22.05 has them.
SBATCH = {
    "account": r"\S+",
    "chdir": r"\S+",
    "constraint": r"\S+",
    "cpus-per-task": r"\d+",
    "error": r"\S+",
    "exclude": r"\S+",
    "exclusive": "|user|mcs",
    "gpus-per-node": r"(\w+:)?\d+",
    "gres": r"\S+",
    "job-name": r"\S+",
    "mail-type": r"[A-Z_0-9,]+",
    "mail-user": r"\S+",
    "mem": r"\d+[KMGT]?",
    "nice": r"(-?\d+)?",
    "no-kill": "|off",
    "nodes": r"\d+(-\d+)?",
    "no-requeue": "",
    "ntasks": r"\d+",
    "ntasks-per-node": r"\d+",
    "open-mode": "append|truncate",
    "output": r"\S+",
    "partition": r"\S+",
    "qos": r"\S+",
    "requeue": "",
    "reservation": r"\S+",
    "signal": r"([RB]{1,2}:)?([A-Z]+\d?|\d+)(@\d{1,5})?",
    "time": r"\d+|(\d+-)?\d+(:\d\d){0,2}",
    "wait-all-nodes": "[01]",
}
# And of srun(1).
SRUN = {
    "nodes": r"\d+(-\d+)?",
    "ntasks": r"\d+",
    "nodelist": r"\S+",
    "no-kill": "|off",
    "cpus-per-task": r"\d+",
    "kill-on-bad-exit": "|[01]",
}


def directives(path: Path) -> dict[str, str]:
    """Returns the options of a script's lines that begin with #SBATCH, by name."""
    lines = path.read_text().splitlines()
    words = [line.split()[1] for line in lines if line.startswith("#SBATCH")]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def cluster(folder, srun):
    """Makes a cluster of three hosts, which are all this machine."""
    program(folder, "srun", srun)
    program(folder, "scontrol", '[[ $1 == show ]] && printf "127.0.0.1\\n%.0s" $3; exit 0')
    program(folder, "scancel", f'kill -TERM $(cat "{folder}/pids") 2>/dev/null; exit 0')


def script(folder, *argv, hosts, **env):
    """Starts the script as sbatch does."""
    return subprocess.Popen(
        ["bash", SCRIPT, *argv],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(
            folder, SLURM_JOB_ID="4711", SLURM_JOB_NODELIST=" ".join("x" * hosts), **env
        ),
    )


@SCRIPTS
def test_shell(path):
    check_shell(path)


@SCRIPTS
def test_the_options_are_those_of_sbatch_and_come_before_the_first_command(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(k for k, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(k < first for k, line in enumerate(lines) if line.startswith("#SBATCH"))
    check_flags([f"--{name}={value}" for name, value in directives(path).items()], SBATCH)
    assert {"requeue", "signal"} <= set(directives(path))
    assert path == SWEEP or "no-kill" in directives(path)


@pytest.mark.parametrize("word", ["--no-kil", "--signal=B:USR1@5m", "--time=24h", "--open-mode=a"])
def test_an_option_that_is_not_is_found(word):
    with pytest.raises(AssertionError):
        check_flags([word], SBATCH)


def test_each_host_has_a_step_whose_command_line_is_ours(tmp_path):
    cluster(tmp_path / "bin", "exit 0")
    run = script(tmp_path / "bin", "--exp=lm.PyDocs", "--job_log_dir=/d", hosts=3, PYTHON="py")
    assert run.communicate(timeout=60)[0] == "" and run.returncode == 0
    steps = sorted(calls(tmp_path / "bin", "srun"), key=lambda step: step[-4:])
    assert len(steps) == 3
    for number, step in enumerate(steps):
        at = step.index("py")
        check_flags(step[:at], SRUN)
        assert step[at + 1] == "main.py"
        command, options = our_options(step[at + 2 :])
        assert command.elastic and command.min_processes == 2
        settings, _ = find_others(
            command.coordinator,
            command.num_processes,
            command.process_id,
            {
                "SLURM_JOB_ID": "4711",
                "SLURM_STEP_NODELIST": "x",
                "SLURM_LOCALID": "0",
                "SLURM_NTASKS": "1",
                "SLURM_PROCID": "0",
            },
        )
        assert settings["coordinator_address"] == "127.0.0.1:8476"
        assert (settings["num_processes"], settings["process_id"]) == (3, number)
        # SLURM's signal comes as many seconds before the limit as the program counts on.
        assert directives(SCRIPT)["signal"].endswith(f"@{options['grace_seconds']}")
    assert ["requeue", "4711"] not in calls(tmp_path / "bin", "scontrol")


@pytest.mark.parametrize(
    ("status", "num_tries"), [(0, 1), (1, 3), (2, 1), (3, 1), (127, 1), (137, 3)]
)
def test_a_step_that_fails_is_tried_again_unless_the_user_has_to_mend_it(
    tmp_path, status, num_tries
):
    program(tmp_path / "bin", "sleep", "exit 0")
    cluster(tmp_path / "bin", f"exit {status}")
    run = script(tmp_path / "bin", "--exp=a", hosts=1, PYTHON="py", TRIES="3")
    run.communicate(timeout=60)
    assert run.returncode == status
    assert len(calls(tmp_path / "bin", "srun")) == num_tries


@pytest.mark.parametrize(("failures", "status", "num_steps"), [(0, 0, 2), (5, 0, 2), (100, 1, 0)])
def test_the_hosts_are_asked_for_again_and_never_none(tmp_path, failures, status, num_steps):
    folder = tmp_path / "bin"
    program(folder, "sleep", "exit 0")
    cluster(folder, "exit 0")
    program(
        folder,
        "scontrol",
        f"""
[[ $(grep -ao END "{folder}/scontrol.calls" | wc -l) -gt {failures} ]] || exit 1
printf "127.0.0.1\\n%.0s" $3""",
    )
    run = script(folder, "--exp=a", hosts=2, PYTHON="py")
    run.communicate(timeout=60)
    assert run.returncode == status and len(calls(folder, "srun")) == num_steps


@pytest.mark.parametrize(("status", "is_put_back"), [(0, True), (2, False), (143, True)])
def test_before_the_limit_a_job_is_put_back_unless_it_would_fail_again(
    tmp_path, status, is_put_back
):
    folder = tmp_path / "bin"
    cluster(
        folder,
        f"touch {folder}/runs; while [[ ! -e {folder}/asked ]]; do sleep 0.05; done; exit {status}",
    )
    # Busy at first: both are asked again.
    busy = "[[ -e $0.busy ]] || { touch $0.busy; exit 1; }"
    program(folder, "scancel", f"{busy}; touch {folder}/asked")
    program(folder, "scontrol", f"[[ $1 == show ]] && echo 127.0.0.1 && exit; {busy}")
    program(folder, "sleep", 'exec /bin/sleep "${1/5/0.05}"')
    run = script(folder, "--exp=a", hosts=1, PYTHON="py")
    wait_for(lambda: (folder / "runs").exists(), run)
    run.send_signal(signal.SIGUSR1)
    run.communicate(timeout=60)
    assert run.returncode == status
    assert calls(folder, "scontrol").count(["requeue", "4711"]) == 2 * is_put_back


# As srun: the task is a process that scancel can signal.
RUN = """
while [[ $1 == --* ]]; do shift; done
echo $$ >> "$(dirname "$0")/pids"
exec env SLURM_STEP_NODELIST=x SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_PROCID=0 "$@"
"""


def wait_for(is_so, run):
    deadline = time.monotonic() + 300
    while not is_so():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def folder(tmp_path):
    """A folder with the programs of a cluster; no task of its outlives the test."""
    cluster(tmp_path / "bin", RUN)
    yield tmp_path / "bin"
    for pid in (tmp_path / "bin/pids").read_text().split():
        with contextlib.suppress(OSError):
            if str(tmp_path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


def job_of_lines(folder, **env):
    """Returns the command line of a job that trains until it is stopped, and its environment."""
    import tests.support.line_jobs  # noqa: F401  Makes the experiment.

    env = {
        "PORT": str(free_port()),
        "PYTHONPATH": f"{ROOT}:{home()}",
        "JAX_NUM_CPU_DEVICES": "2",
        "XDG_CACHE_HOME": str(home() / "cache"),
        **env,
    }
    return [
        "--exp=jobzoo.lines.Line",
        "--packages=jobzoo",
        f"--job_log_dir={folder}",
        "--set",
        "run.checkpoints.every_steps=None",
        "run.loss_spikes.action='report'",
        "run.num_train_steps=1000000",
    ], env


def lines(path):
    return read_json_lines(path) if path.exists() else []


def changes_of(job):
    path = job / "elastic.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_before_the_limit_the_job_is_saved_and_put_back_and_then_goes_on(tmp_path, folder):
    job = tmp_path / "job"
    argv, env = job_of_lines(job, ELASTIC="")
    run = script(folder, *argv, hosts=2, **env)
    wait_for(lambda: len(lines(job / "metrics.jsonl")) > 7, run)
    run.send_signal(signal.SIGUSR1)
    out = run.communicate(timeout=120)[0]
    assert run.returncode == 0, out
    assert ["requeue", "4711"] in calls(folder, "scontrol")
    (saved,) = [int(path.name) for path in (job / "checkpoints").iterdir()]
    assert f"stopped by SIGTERM: step {saved} is saved" in out
    # SLURM starts the same script again.
    (folder / "scontrol.calls").unlink()
    run = script(folder, *argv[:-1], f"run.num_train_steps={saved + 5}", hosts=2, **env)
    out = run.communicate(timeout=300)[0]
    assert run.returncode == 0, out
    assert f"restored the checkpoint of step {saved}" in out
    assert f"trained to step {saved + 5}" in out
    assert ["requeue", "4711"] not in calls(folder, "scontrol")
    steps = [line["step"] for line in lines(job / "metrics.jsonl")]
    assert steps == list(range(1, saved + 6))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_host_whose_supervisor_died_is_started_again_and_joins(tmp_path, folder):
    job = tmp_path / "job"
    argv, env = job_of_lines(job, ELASTIC="--elastic")
    run = script(folder, *argv, "run.peer_save_every_steps=50", hosts=2, **env)
    wait_for(lambda: len(changes_of(job)) == 1, run)
    (victim,) = [member["pid"] for member in members(job) if member["member"] == 1]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(changes_of(job)) == 3, run)
    run.send_signal(signal.SIGUSR1)
    out = run.communicate(timeout=120)[0]
    assert run.returncode == 0, out
    start, died, came = changes_of(job)
    assert (start["members"], died["members"], came["members"]) == ([0, 1], [0], [0, 1])
    assert (died["kind"], died["who"], came["kind"], came["who"]) == ("died", [1], "came", [1])
    # Steps take a millisecond: the newest save may be on its way, and some steps in flight. The
    # save after it waits for it.
    assert died["source"] == "peers" and died["from_step"] % 50 == 0 and died["lost_steps"] < 150
    assert "host 1 (127.0.0.1) ended with status 137, try 1 of 20" in out
    assert ["requeue", "4711"] in calls(folder, "scontrol")
    saved = max(int(path.name) for path in (job / "checkpoints").iterdir())
    assert [line["step"] for line in lines(job / "metrics.jsonl")] == list(range(1, saved + 1))


def members(job):
    return [json.loads(path.read_text()) for path in (job / "elastic/members").glob("*.json")]


@pytest.mark.parametrize("is_at_limit", [False, True])
def test_a_task_of_an_array_is_a_worker_that_is_requeued_at_the_time_limit(tmp_path, is_at_limit):
    folder = tmp_path / "bin"
    program(folder, "scontrol", "exit 0")
    program(folder, "py", "trap 'exit 0' TERM\nfor _ in {1..300}; do sleep 0.1; done; exit 7")
    if not is_at_limit:
        program(folder, "py", "exit 3")
    argv = ["--exp=lm.PyDocs", "--job_log_dir=/d", "--set", "run.seed=1,2"]
    run = subprocess.Popen(
        ["bash", SWEEP, *argv],
        cwd=ROOT,
        env=environment(folder, PYTHON="py", SLURM_ARRAY_JOB_ID="4711", SLURM_ARRAY_TASK_ID="2"),
    )
    if is_at_limit:
        while not calls(folder, "py"):
            time.sleep(0.05)
        time.sleep(0.2)  # The trap is set after the worker has started.
        run.send_signal(signal.SIGUSR1)
    assert run.wait(timeout=60) == (0 if is_at_limit else 3)
    expected = [["requeue", "4711_2"]] if is_at_limit else []
    assert calls(folder, "scontrol") == expected
    ((script_name, *words),) = calls(folder, "py")
    command, mode, options = parse_command_line(words, MODES)
    assert (script_name, mode) == ("main.py", MODES["sweep"])
    assert options["is_worker"] and command.settings == ["run.seed=1,2"]
