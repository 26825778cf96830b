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
    "zone": r"[a-z]+-[a-z]+\d-[a-z]", "quiet": "", "format": r"value\([\w.]+\)", "project": ".+",
}
GCLOUD = {
    ("queued-resources", "create"): {
        "node-id": r"[a-z][-a-z0-9]*", "accelerator-type": r"v\w+-\d+",
        "runtime-version": r"[\w.-]+",
        "spot": "", "metadata-from-file": r"startup-script=/.+", "reserved": "", "network": r".+",
        "internal-ips": "", "valid-until-duration": r"\d+[smhd]",
    },
    ("queued-resources", "delete"): {"force": "", "async": ""},
    ("queued-resources", "describe"): {},
    ("tpu-vm", "ssh"): {"worker": r"all|\d+", "command": r".+"},
}
# Of docker run(1).
DOCKER = {
    "detach": "", "name": r"\w+", "init": "",
    "restart": r"no|always|unless-stopped|on-failure(:\d+)?",
    "stop-timeout": r"\d+", "user": r"\w+", "privileged": "", "network": "host", "ipc": "host",
    "volume": r"/[^:]+:/[^:]+",
}


def run(folder, *argv, gcloud="exit 0", **env):
    """Runs the script with a program in place of gcloud."""
    program(folder, "gcloud", gcloud)
    return subprocess.run(
        ["bash", SCRIPT, *argv], capture_output=True, text=True, timeout=60,
        env=environment(
            folder, NAME="train", ZONE="us-west4-a", IMAGE="eu/praxis_lite:1", SHARE="10.0.0.2:/s",
            POLL_SECONDS="0", **env,
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


def test_create_asks_for_a_slice_whose_hosts_train(tmp_path):
    folder = tmp_path / "bin"
    kept = tmp_path / "startup.sh"
    gcloud = f'for w in "$@"; do [[ $w == *startup-script=* ]] && cp "${{w##*=}}" {kept}; done'
    done = run(folder, "create", "--exp=lm.PyDocs", "--set", "task.name=it's", gcloud=gcloud)
    assert done.returncode == 0, done.stderr
    ((name, flags),) = [check_gcloud(call) for call in calls(folder, "gcloud")]
    assert name == "create"
    assert {"--node-id=train", "--spot", "--zone=us-west4-a"} <= set(flags)
    check_shell(kept)
    # A host runs it: it mounts the share, and starts the image.
    for other in ("mkdir", "mountpoint", "mount"):
        program(folder, other, "exit 1" if other == "mountpoint" else "exit 0")
    program(folder, "docker", "exit 0")
    subprocess.run(["bash", kept], env=environment(folder), check=True, timeout=60)
    assert calls(folder, "mount") == [["-t", "nfs", "-o", "hard", "10.0.0.2:/s", "/mnt/share"]]
    removed, started = calls(folder, "docker")
    assert removed == ["rm", "--force", "train"]
    at = started.index("eu/praxis_lite:1")
    check_flags(started[1:at], DOCKER)
    command, options = our_options(started[at + 1 :])
    assert command.exp == "lm.PyDocs" and command.settings == ["task.name=it's"]
    assert command.job_log_dir == "/job" and not command.elastic
    assert f"--stop-timeout={options['grace_seconds']}" in started
    assert "--volume=/mnt/share/train:/job" in started


@pytest.mark.parametrize(
    ("states", "names"),
    [
        # Taken away: requested again. Deleted by hand: it ends.
        (["", "ACCEPTED", "ACTIVE", "SUSPENDING", "SUSPENDED", "", "ACTIVE", "DELETING", ""],
         ["create", "delete", "create"]),
        (["ACTIVE", "FAILED", "DELETING", "", "ACTIVE", ""], ["delete", "create"]),
    ],
)  # fmt: skip
def test_keep_asks_again_for_a_slice_that_is_lost(tmp_path, states, names):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "states").write_text("".join(f"{state}\n" for state in states))
    gcloud = f"""
if [[ $4 == describe ]]; then
  head -1 {folder}/states; sed -i 1d {folder}/states
fi
"""
    done = run(folder, "keep", "--exp=lm.PyDocs", gcloud=gcloud)
    assert done.returncode == 0, done.stderr
    made = [check_gcloud(call)[0] for call in calls(folder, "gcloud")]
    assert [name for name in made if name != "describe"] == names
    assert made.count("describe") == len(states)


def test_a_command_goes_to_all_hosts_and_a_wrong_word_is_answered(tmp_path):
    folder = tmp_path / "bin"
    assert run(folder, "ssh", "sudo docker logs train").returncode == 0
    ((name, flags),) = [check_gcloud(call) for call in calls(folder, "gcloud")]
    assert name == "ssh" and "--worker=all" in flags
    wrong = run(folder, "destroy")
    assert wrong.returncode == 2 and "queued_resources.sh create" in wrong.stderr
