"""What processes tell each other, how they find each other, and who is slow: the parts alone."""

import io
import itertools
import json
import logging
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from praxis_lite import ConfigError, PeerLost
from praxis_lite.core import MeshConfig, make_mesh
from praxis_lite.core.sharding.batch_sharding import process_rows
from praxis_lite.job import processes
from praxis_lite.job.command import run
from praxis_lite.job.processes.beats import Beats
from praxis_lite.job.processes.logs import PrefixedStream
from praxis_lite.job.processes.same_everywhere import check_same
from praxis_lite.job.processes.start import find_others
from praxis_lite.job.processes.stop_consensus import SlowHosts, StopConsensus


def test_one_process_exchanges_with_itself_and_asks_no_device():
    assert processes.exchange("word", "text") == ["text"]
    assert (processes.index(), processes.count(), processes.is_first()) == (0, 1, True)


def test_a_command_that_lost_a_peer_exits_with_a_status_after_which_clusters_retry():
    def command():
        raise PeerLost("process 1 (host) did not reach 'the end' within 300 s")

    with pytest.raises(SystemExit) as exited:
        run(command, continues_without_output=lambda: True)
    assert exited.value.code == 1


def test_a_process_that_died_before_its_first_heartbeat_counts_as_silent():
    beats = Beats(2.0)
    for _ in range(3):
        other = json.dumps({"number": 1, "pid": 1})
        beats.next_beat()
        beats.receive({1: other})
    assert (beats.silent_seconds(1), beats.silent_seconds(2)) == (4.0, 6.0)


def test_one_process_agrees_with_itself_at_once(mesh_of):
    consensus = StopConsensus(mesh_of(1, 4, 2))
    consensus.add_host_seconds(5.0)
    requests = (False, True, False)
    assert [consensus.should_stop(request) for request in requests] == list(requests)


class FakeDevice:
    """What `process_rows` and `make_mesh` ask of a device."""

    platform = "cpu"

    def __init__(self, process_index: int, number: int):
        self.process_index, self.id = process_index, number

    def __repr__(self):
        return f"{self.process_index}.{self.id}"


def devices_of(num_processes: int, each: int) -> list[FakeDevice]:
    return [FakeDevice(k, k * each + n) for k in range(num_processes) for n in range(each)]


class FakeMesh:
    """A mesh of such devices."""

    def __init__(self, order: list[FakeDevice]):
        self.devices = np.array(order)
        self.size = len(order)


@pytest.mark.parametrize("order", ["in turn", "alternating", "shuffled"])
@pytest.mark.parametrize("num_rows", [1, 5, 6, 7, 13, 37])
def test_a_process_feeds_all_rows_that_its_devices_hold(order, num_rows):
    devices = devices_of(3, 2)
    if order == "alternating":
        devices = devices[::2] + devices[1::2]
    elif order == "shuffled":
        devices = [devices[k] for k in np.random.default_rng(0).permutation(6)]
    mesh = FakeMesh(devices)
    each = math.ceil(num_rows / 6)
    fed = set()
    for process in range(3):
        rows = process_rows(num_rows, mesh, process)
        # By hand, device for device.
        held = {
            row
            for place, device in enumerate(devices)
            if device.process_index == process
            for row in range(place * each, (place + 1) * each)
            if row < num_rows
        }
        asked = set(range(rows.start, rows.stop))
        assert held <= asked <= set(range(num_rows))
        if held and order == "in turn":
            assert asked == held
        fed |= held
    assert fed == set(range(num_rows))


def test_a_process_without_a_device_feeds_nothing():
    assert process_rows(7, FakeMesh(devices_of(2, 1)), 5) == slice(0, 0)


def mesh_of_processes(num_processes: int, each: int, ici, dcn=None, monkeypatch=None):
    grids = []
    monkeypatch.setattr(
        "praxis_lite.core.sharding.mesh.mesh_of", lambda grid, *args, **settings: grids.append(grid)
    )
    make_mesh(MeshConfig(ici_mesh_shape=ici, dcn_mesh_shape=dcn), devices_of(num_processes, each))
    return np.vectorize(lambda device: device.process_index)(grids[0])


def test_simulated_processes_are_the_slices(monkeypatch):
    actual = mesh_of_processes(2, 4, (1, 2, 2), (1, 2, 1), monkeypatch)
    assert actual.tolist() == [[[0, 0], [0, 0], [1, 1], [1, 1]]]
    actual = mesh_of_processes(2, 4, (1, 2, 2), (1, 1, 2), monkeypatch)
    assert actual.tolist() == [[[0, 0, 1, 1], [0, 0, 1, 1]]]


def test_each_process_gives_as_many_simulated_devices(monkeypatch):
    # 8 devices in each process, because the environment says so: the mesh takes 3 of each.
    actual = mesh_of_processes(2, 8, (1, 3, 2), None, monkeypatch)
    assert actual.tolist() == [[[0, 0], [0, 1], [1, 1]]]


@pytest.mark.parametrize(
    ("shape", "dcn", "words"),
    [
        ((1, 7, 1), None, "'data': 7.* 2 "),
        ((1, 2, 1), (1, 3, 1), "3 .* 2 "),
        ((1, 10, 2), None, "20.*16"),
    ],
)
def test_a_mesh_that_does_not_fit_the_processes_is_refused(shape, dcn, words, monkeypatch):
    with pytest.raises(ConfigError, match=words):
        mesh_of_processes(2, 8, shape, dcn, monkeypatch)


def test_processes_with_too_few_devices_are_named(monkeypatch):
    devices = devices_of(1, 5) + [FakeDevice(1, 5), FakeDevice(1, 6), FakeDevice(1, 7)]
    with pytest.raises(ConfigError, match="4.* 1 .*3"):
        make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)), devices)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("host:1", 2, None), "K, .*--process_id=K "),
        ((None, 2, 1), "K, .*--coordinator=HOST:PORT "),
        (("host:1", None, None), "K, .*--num_processes=N.*--process_id=K "),
        (("host", 2, 1), "--coordinator.*'host';.*HOST:PORT"),
        (("host:70000", 2, 1), "'host:70000'.*65535"),
        ((":123", 2, 1), "':123'.*HOST:PORT"),
        (("host:12x", 2, 1), "'host:12x'.*HOST:PORT"),
        (("host:1", 2, 2), "--process_id.* 2;.* 1"),
        (("host:1", 2, -1), "--process_id.*-1"),
        (("host:1", 0, 0), "--num_processes.* 0;"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        find_others(*flags, {})


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, (None, "")),
        (SLURM, ({}, "SLURM")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (None, "")),
        # A script of sbatch, without srun: no step.
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, (None, "")),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "3",
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1",
            },
            ({}, "Open MPI"),
        ),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, (None, "")),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ({}, "the TPU slice")),
        ({"TPU_WORKER_HOSTNAMES": "a"}, (None, "")),
        # Any pod has this; only one of a job has an index.
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (None, "")),
        (
            {
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                "JOB_COMPLETION_INDEX": "1",
                "TPU_WORKER_HOSTNAMES": "a,b",
            },
            ({}, "the Kubernetes job"),
        ),
    ],
)
def test_what_launchers_leave_in_the_environment_is_found(environment, found):
    assert find_others(None, None, None, environment) == found


def test_a_launcher_that_does_not_say_where_the_first_is_needs_the_flag(monkeypatch):
    monkeypatch.setattr("praxis_lite.job.processes.start.find_spec", lambda name: None)
    environment = {"PMI_SIZE": "4", "PMI_RANK": "3"}
    with pytest.raises(ConfigError, match="--coordinator=HOST:PORT"):
        find_others(None, None, None, environment)
    settings, words = find_others("host:12", None, None, environment)
    assert (settings["num_processes"], settings["process_id"]) == (4, 3)
    assert words == "--coordinator=host:12"


def test_lines_of_another_process_are_marked_once_each():
    stream = io.StringIO()
    marked = PrefixedStream(stream, "[process 1] ")
    print("one\ntwo", file=marked)
    print("three", end=" ", file=marked)
    print("four", file=marked)
    assert stream.getvalue() == "[process 1] one\n[process 1] two\n[process 1] three four\n"


def exchanging(monkeypatch, *answers: dict):
    """Makes this process the first of several whose answers are these, besides its own."""
    monkeypatch.setattr(processes, "count", lambda: 1 + len(answers))
    monkeypatch.setattr(processes, "name", lambda k: f"process {k} (host{k})")
    coded = [json.dumps({k: json.dumps(v) for k, v in answer.items()}) for answer in answers]
    monkeypatch.setattr(processes, "exchange", lambda name, text: [text, *coded])


def test_a_difference_names_the_field_both_values_and_both_hosts(monkeypatch):
    exchanging(monkeypatch, {"a": 1, "b": "x"}, {"a": 1, "b": "y", "c": 3})
    with pytest.raises(ConfigError) as caught:
        check_same("The processes differ", {"a": 1, "b": "x"})
    words = str(caught.value)
    assert 'b is "x" on process 0 (host0) and "y" on process 2 (host2)' in words
    assert "Other differences: c." in words
    exchanging(monkeypatch, {"a": 1})
    check_same("The processes differ", {"a": 1})


def said_by(run) -> list[str]:
    message = []
    handler = logging.Handler()
    handler.emit = lambda record: message.append(record.getMessage())
    log = logging.getLogger("praxis_lite.job.processes.stop_consensus")
    log.addHandler(handler)
    try:
        run()
    finally:
        log.removeHandler(handler)
    return message


def test_a_slow_host_is_named_once_after_several_steps():
    usual, slow = [0.01, 0.011, 0.012], [0.01, 0.4, 0.012]

    def run(*steps):
        hosts = SlowHosts()
        for step in itertools.chain(*steps):
            hosts.add(np.array(step))

    assert said_by(lambda: run([usual] * 20, [slow] * 4, [usual], [slow] * 4)) == []
    message = said_by(lambda: run([slow] * 40))
    assert len(message) == 1
    assert message[0].startswith("slow: process 1 takes 0.40 s per step")
    # Of two, the slow one is not its own median.
    assert len(said_by(lambda: run([[0.01, 0.3]] * 9))) == 1
    # Three times as long is nothing where it is milliseconds.
    assert said_by(lambda: run([[0.001, 0.004]] * 9)) == []


def test_the_mesh_is_a_real_one_in_the_rows_of_this_process(mesh_of):
    mesh: Mesh = mesh_of(1, 4, 2)
    assert process_rows(13, mesh) == slice(0, 13)
    assert jax.process_count() == 1
