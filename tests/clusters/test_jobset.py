"""The JobSet: its schema, the pod's own by Kubernetes, and what the pods' processes make of it."""

import copy
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from praxis_lite.job.health_files import HealthFiles
from praxis_lite.job.processes.addresses import own_address
from praxis_lite.job.processes.start import find_others, process_numbers
from tests.clusters.recipes import CLUSTERS, our_options

JOBSET = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
SCHEMA = json.loads((Path(__file__).parent / "jobset.schema.json").read_text())
SPEC = JOBSET["spec"]
(REPLICATED,) = SPEC["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]


def changed(path, value):
    """Returns the JobSet with the value at a path of keys changed; None: removed."""
    result = copy.deepcopy(JOBSET)
    *parents, last = path
    place = result
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return result


def errors_of_jobset(jobset):
    jsonschema = pytest.importorskip("jsonschema")
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(jobset)]


def test_it_is_a_jobset():
    assert errors_of_jobset(JOBSET) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("apiVersion",), "jobset.x-k8s.io/v1"),
        (("spec", "failurePolicy", "maxRestart"), 3),
        (("spec", "failurePolicy", "maxRestarts"), "3"),
        (("spec", "network", "enableDNSHostnames"), "yes"),
        (("spec", "successPolicy", "operator"), "all"),
        (("spec", "replicatedJobs", 0, "name"), "Hosts"),
        (("spec", "replicatedJobs", 0, "template"), None),
    ],
)
def test_what_is_no_jobset_is_found(path, value):
    assert errors_of_jobset(changed(path, value))


def error_of_job(jobset, version):
    """Returns what Kubernetes' schema says of the Job that JobSet makes, or None."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": spec}
    try:
        kubernetes.validate(job, version, strict=True)
    except kubernetes.ValidationError as error:
        return error.message
    return None


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_its_jobs_are_what_kubernetes_takes(version):
    assert error_of_job(JOBSET, version) is None


_IN_POD = ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*_IN_POD, "terminationGracePeriod"), 30),
        ((*_IN_POD, "terminationGracePeriodSeconds"), "300"),
        ((*_IN_POD, "containers", 0, "livenessProbe", "exec"), ["test", "-e", "/health/alive"]),
        ((*_IN_POD, "containers", 0, "arguments"), ["--exp=a"]),
        ((*_IN_POD, "containers", 0, "name"), None),
        (("spec", "replicatedJobs", 0, "template", "spec", "backoffLimitPerIndex"), "20"),
    ],
)
def test_what_kubernetes_would_refuse_is_found(path, value):
    assert error_of_job(changed(path, value), "1.37")


def test_what_the_schemas_do_not_say():
    assert JOB["completionMode"] == "Indexed"
    assert JOB["completions"] == JOB["parallelism"]  # All hosts run at once.
    assert POD["restartPolicy"] == "Never"  # podFailurePolicy wants that.
    assert SPEC["network"]["publishNotReadyAddresses"]  # They meet before they are ready.
    mounted = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in POD["volumes"]}
    assert set(mounted.values()) == {"/job", "/health", "/dev/shm"}
    # What fails the Job for its status is not restarted by JobSet.
    (final,) = [rule for rule in JOB["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert {2, 3, 127} <= set(final["onExitCodes"]["values"])
    (rule,) = SPEC["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    for rule in JOB["podFailurePolicy"]["rules"]:
        assert rule.get("onExitCodes", {}).get("containerName", "train") == CONTAINER["name"]
    labels = POD["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert labels[0]["labelSelector"]["matchLabels"] == {
        "jobset.sigs.k8s.io/jobset-name": JOBSET["metadata"]["name"]
    }


def pod_options(index):
    """Returns the options of a pod's process, as Kubernetes expands them, and its environment."""
    env = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    argv = [arg.replace("$(JOB_COMPLETION_INDEX)", str(index)) for arg in CONTAINER["args"]]
    assert not any("$(" in arg for arg in argv)
    return *our_options(argv), env


def test_the_pods_find_each_other():
    host = f"{JOBSET['metadata']['name']}-{REPLICATED['name']}-0-0"
    members = set()
    for index in range(JOB["completions"]):
        command, _, env = pod_options(index)
        given = command.coordinator, command.num_processes, command.process_id
        settings, result = find_others(*given, env)
        assert settings["coordinator_address"] == f"{host}.{SPEC['network']['subdomain']}:8476"
        assert settings["num_processes"] == JOB["completions"]
        assert result.startswith("--coordinator")
        members.add(process_numbers(*given, env)[0])
        numbers = process_numbers(None, command.num_processes, None, env)
        assert numbers == process_numbers(*given, env)
    assert members == set(range(JOB["completions"]))


def test_a_pod_whose_first_pod_is_gone_gives_its_own_address(monkeypatch):
    class Socket(socket.socket):
        def connect(self, target):
            if target[0] != "192.0.2.1":
                raise OSError(-2, "Name or service not known")

        def getsockname(self):
            return "10.4.0.7", 0

    assert own_address("127.0.0.1:8476") == "127.0.0.1"
    monkeypatch.setattr("praxis_lite.job.processes.addresses.socket.socket", Socket)
    command, _, _ = pod_options(3)
    assert own_address(command.coordinator) == "10.4.0.7"


def test_what_the_program_is_told_is_what_the_pod_has():
    command, options, _ = pod_options(0)
    assert command.elastic
    assert command.min_processes == JOB["completions"] - JOB["maxFailedIndexes"]
    assert command.job_log_dir == "/job"
    assert options["grace_seconds"] == POD["terminationGracePeriodSeconds"]
    probes = " ".join(json.dumps(CONTAINER[f"{kind}Probe"]) for kind in ("liveness", "readiness"))
    assert probes.count(f"{options['health_dir']}/") == 2


def passes(kind, folder):
    command = CONTAINER[f"{kind}Probe"]["exec"]["command"]
    local = [word.replace("/health", str(folder)) for word in command]
    return subprocess.run(local, capture_output=True).returncode == 0


def test_the_probes_do_what_they_say(tmp_path):
    folder = tmp_path / "health"
    assert not any(passes(kind, folder) for kind in ("startup", "liveness", "readiness"))
    with HealthFiles(folder) as files:
        assert passes("startup", folder) and passes("liveness", folder)
        assert not passes("readiness", folder)
        files.ready(True)
        assert passes("readiness", folder)
        old = time.time() - 61
        os.utime(folder / "alive", (old, old))
        assert not passes("liveness", folder)
        files.alive()
        assert passes("liveness", folder)
        recent = time.time() - 55
        os.utime(folder / "alive", (recent, recent))
        assert passes("liveness", folder)
    assert not passes("liveness", folder)
