"""The script of TPU slices: flags that gcloud has, a start-up script that trains, lost slices."""

import subprocess

import pytest

from tests.clusters.recipes import (
    CLUSTERS,
    calls,
    check_flags,
    check_shell,
    environment,
    our_options,
    program,
)

SCRIPT = CLUSTERS / "queued_resources.sh"
# Of Google Cloud SDK 528: gcloud compute tpus ...
_OF_ALL = {
    "zone": r"[a-z]+-[a-z]+\d-[a-z]",
    "quiet": "",
    "format": r"value\([\w.]+\)",
    "project": ".+",
}
GCLOUD = {
    ("queued-resources", "create"): {
        "node-id": r"[a-z][-a-z0-9]*",
        "accelerator-type": r"v\w+-\d+",
        "runtime-version": r"[\w.-]+",
        "spot": "",
        "metadata-from-file": r"startup-script=/.+",
        "reserved": "",
        "network": r".+",
        "internal-ips": "",
        "valid-until-duration": r"\d+[smhd]",
    },
    ("queued-resources", "delete"): {"force": "", "async": ""},
    ("queued-resources", "describe"): {},
    ("tpu-vm", "ssh"): {"worker": r"all|\d+", "command": r".+"},
}
# Of docker run(1).
DOCKER = {
    "name": r"\w+",
    "init": "",
    "stop-timeout": r"\d+",
    "user": r"\w+",
    "privileged": "",
    "network": "host",
    "ipc": "host",
    "volume": r"/[^:]+:/[^:]+",
}


def run(folder, *argv, gcloud="exit 0", **env):
    """Runs the script with a program in place of gcloud."""
    program(folder, "gcloud", gcloud)
    return subprocess.run(
        ["bash", SCRIPT, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(
            folder,
            NAME="train",
            ZONE="us-west4-a",
            IMAGE="eu/praxis_lite:1",
            **{"SHARE": "10.0.0.2:/s", "POLL_SECONDS": "0"} | env,
        ),
    )


def check_gcloud(call):
    """Checks a call of gcloud; returns the command's name and its flags."""
    assert call[:2] == ["compute", "tpus"]
    flags = [word for word in call[4:] if word.startswith("--")]
    assert [word for word in call[4:] if not word.startswith("--")] == ["train"]
    check_flags(flags, GCLOUD[tuple(call[2:4])] | _OF_ALL)
    return call[3], flags


def test_shell():
    check_shell(SCRIPT)


@pytest.mark.parametrize(
    ("share", "job"), [("10.0.0.2:/s", "/job"), ("gs://bucket/jobs", "gs://bucket/jobs/train")]
)
def test_create_asks_for_a_slice_whose_hosts_train(tmp_path, share, job):
    folder = tmp_path / "bin"
    kept = tmp_path / "startup.sh"
    gcloud = f'for w in "$@"; do [[ $w == *startup-script=* ]] && cp "${{w##*=}}" {kept}; done'
    settings = ("--set", "task.name=it's")
    done = run(folder, "create", "--exp=lm.PyDocs", *settings, gcloud=gcloud, SHARE=share)
    assert done.returncode == 0, done.stderr
    ((name, flags),) = [check_gcloud(call) for call in calls(folder, "gcloud")]
    assert name == "create"
    assert {"--node-id=train", "--spot", "--zone=us-west4-a"} <= set(flags)
    check_shell(kept)
    # A host runs it: it mounts the share, unless it is a bucket, and starts the image.
    for other in ("mkdir", "mountpoint", "mount"):
        program(folder, other, "exit 1" if other == "mountpoint" else "exit 0")
    program(folder, "docker", "exit 0")
    subprocess.run(["bash", kept], env=environment(folder), check=True, timeout=60)
    mounts = [["-t", "nfs", "-o", "hard", "10.0.0.2:/s", "/mnt/share"]] if job == "/job" else []
    assert calls(folder, "mount") == mounts
    removed, started = calls(folder, "docker")
    assert removed == ["rm", "--force", "train"]
    at = started.index("eu/praxis_lite:1")
    check_flags(started[1:at], DOCKER)
    command, options = our_options(started[at + 1 :])
    assert command.exp == "lm.PyDocs" and command.settings == ["task.name=it's"]
    assert command.job_log_dir == job and not command.elastic
    assert f"--stop-timeout={options['grace_seconds']}" in started
    assert ("--volume=/mnt/share/train:/job" in started) == (job == "/job")


@pytest.mark.parametrize(
    ("status", "num_tries"),
    [
        (0, 1),
        (1, 100),
        (2, 1),
        (3, 1),
        (127, 1),
        *(pytest.param(status, 100, marks=pytest.mark.slow) for status in (125, 137)),
    ],
)
def test_a_host_starts_its_container_again_unless_the_status_is_final(tmp_path, status, num_tries):
    kept = tmp_path / "startup.sh"
    gcloud = f'for w in "$@"; do [[ $w == *startup-script=* ]] && cp "${{w##*=}}" {kept}; done'
    run(tmp_path / "bin", "create", "--exp=lm.PyDocs", gcloud=gcloud)
    for other in ("mkdir", "mountpoint", "sleep"):
        program(tmp_path / "bin", other, "exit 0")
    program(tmp_path / "bin", "docker", f"[[ $1 != run ]] || exit {status}")
    host = subprocess.run(["bash", kept], env=environment(tmp_path / "bin"), capture_output=True)
    started = [call for call in calls(tmp_path / "bin", "docker") if call[0] == "run"]
    assert (host.returncode, len(started)) == (status, num_tries)


# The answers of `describe`: a state, or a line of an error; "": the slice is absent.
@pytest.mark.parametrize(
    ("states", "errors", "names", "status"),
    [
        # Taken away: requested again. Deleted by hand: it ends.
        (["", "ACCEPTED", "ACTIVE", "SUSPENDING", "SUSPENDED", "", "ACTIVE", "DELETING", ""],
         {}, ["create", "delete", "create"], 0),
        (["ACTIVE", "FAILED", "DELETING", "", "ACTIVE", ""], {}, ["delete", "create"], 0),
        # What may pass is asked again, and is no deletion.
        (["ERROR: 503 Service Unavailable", "", "ACTIVE", "ERROR: refreshing auth tokens",
          "ERROR: PERMISSION_DENIED", "ACTIVE", ""], {}, ["create"], 0),
        (["", "", "ACTIVE", ""], {"create": ["UNAVAILABLE"]}, ["create", "create"], 0),
        (["", "", "ACTIVE", ""], {"create": ["RESOURCE_EXHAUSTED"]}, ["create", "create"], 0),
        (["", "ACTIVE", ""], {"create": ["ALREADY_EXISTS"]}, ["create"], 0),
        (["FAILED", "FAILED", "", ""], {"delete": ["503"]}, ["delete", "delete", "create"], 0),
        (["FAILED", "", ""], {"delete": ["NOT_FOUND"]}, ["delete", "create"], 0),
        # What cannot pass ends it.
        (["ERROR: INVALID_ARGUMENT: zone"], {}, [], 1),
        (["ERROR: PERMISSION_DENIED"], {}, [], 1),
        ([""], {"create": ["INVALID_ARGUMENT"]}, ["create"], 1),
        ([""], {"create": ["PERMISSION_DENIED"]}, ["create"], 1),
        ([""], {"create": ["NOT_FOUND: runtime version"]}, ["create"], 1),
    ],
)  # fmt: skip
def test_keep_asks_again_for_a_slice_that_is_lost(tmp_path, states, errors, names, status):
    folder = tmp_path / "bin"
    folder.mkdir()
    answers = [state or "ERROR: NOT_FOUND" for state in states]
    for name, lines in {"describe": answers, "create": [], "delete": [], **errors}.items():
        (folder / f"{name}.answers").write_text("".join(f"{line}\n" for line in lines))
    gcloud = f"""
line=$(head -1 {folder}/$4.answers); sed -i 1d {folder}/$4.answers
[[ $4 == describe && $line != ERROR* ]] && echo "$line" && exit 0
[[ -z $line ]] || {{ echo "$line" >&2; exit 1; }}
"""
    done = run(folder, "keep", "--exp=lm.PyDocs", gcloud=gcloud)
    assert done.returncode == status, done.stderr
    made = [check_gcloud(call)[0] for call in calls(folder, "gcloud")]
    assert [name for name in made if name != "describe"] == names
    assert made.count("describe") == len(states)


def test_keep_ends_where_gcloud_is_missing_or_refuses_its_arguments(tmp_path):
    for status in (2, 127):
        assert run(tmp_path / "bin", "keep", gcloud=f"exit {status}").returncode == status


def test_a_command_goes_to_all_hosts_and_a_wrong_word_is_answered(tmp_path):
    folder = tmp_path / "bin"
    assert run(folder, "ssh", "sudo docker logs train").returncode == 0
    ((name, flags),) = [check_gcloud(call) for call in calls(folder, "gcloud")]
    assert name == "ssh" and "--worker=all" in flags
    wrong = run(folder, "destroy")
    assert wrong.returncode == 2 and "queued_resources.sh create" in wrong.stderr
