"""Measures the cost of certificates during training.

`python -m benchmarks.certify_cost` trains a language model on 8 simulated devices, and creates a
certificate every few steps. As in a job, this includes a copy of the state, from which the update
is recomputed, and digests of the state. The script prints the median cost of a certificate relative
to 500 steps, in wall time and in CPU time; the CPU time is not affected by other processes on the
machine. The compile time is reported separately, because compilation happens only once, in a
background thread.
"""

import argparse
import statistics
import sys
import time

import jax

from praxis_lite.config.build import build
from praxis_lite.core import simulate_devices
from praxis_lite.core.sharding.mesh import make_mesh
from praxis_lite.experiment.registry import get_experiment
from praxis_lite.inputs.base import TRAIN
from praxis_lite.trainer.compilation import use_compilation_cache
from praxis_lite.trainer.job_on_mesh import partitioner_on
from praxis_tools.certificates.certifier import Certifier
from praxis_tools.certificates.state_digests import StateDigests

EVERY, GOAL = 500, 0.01


def _timed(work) -> tuple[float, float]:
    """Returns the wall time and the CPU time of a call in seconds."""
    began, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(work())
    return time.perf_counter() - began, time.process_time() - cpu


def main() -> int:
    """Returns 1 if the CPU time of a certificate exceeds GOAL times the CPU time of EVERY steps."""
    simulate_devices(8)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exp", default="lm.PyDocs")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=None)
    args = parser.parse_args()
    use_compilation_cache()
    config = get_experiment(args.exp)().config()
    if args.batch_size:
        config.datasets[TRAIN].batch_size = args.batch_size
    job = build(config)
    own, pipeline = partitioner_on(job, make_mesh(job.mesh)), job.datasets[TRAIN]
    key, batches = own.key(0), pipeline.batches()
    state, batch = own.init(own.key(0)), own.global_batch(next(batches))
    began = time.perf_counter()
    spec = pipeline.element_spec()
    certifier = Certifier(own, lambda mesh: partitioner_on(job, mesh), spec, 0, state)
    certifier.compile_in_thread()
    certifier.check_memory()
    digests = StateDigests(own.layout, own.mesh)
    print(f"{time.perf_counter() - began:.0f} s to trace and compile, once", flush=True)
    steps, certificates = [], []

    def step():
        nonlocal state
        state, outputs = own.train_step(state, batch, key)
        return outputs

    def keep():
        certifier.take_snapshot(state, len(steps))

    def certificate():
        assert not list(digests(state).replica_mismatches())
        made = certifier.certify(state, batch, key, len(steps))
        assert made.update is not None and not made.failed

    # The first turn includes one-time work.
    for turn in range(1 + args.turns):
        steps.append(_timed(step))
        kept = _timed(keep)
        steps.append(_timed(step))
        made = _timed(certificate)
        if turn:
            certificates.append(tuple(map(sum, zip(kept, made, strict=True))))
    del steps[:2]
    certifier.close()
    (clock, cpu), (clock_of_all, cpu_of_all) = (
        [statistics.median(x[i] for x in times) for i in (0, 1)] for times in (steps, certificates)
    )
    print(
        f"{args.exp} on {dict(own.mesh.shape)}, {pipeline.batch_size} rows per step, "
        f"{certifier.num_rows} per certificate: {clock:.2f} s per step, {clock_of_all:.2f} s per "
        f"certificate, {clock_of_all / (EVERY * clock):.2%} of {EVERY} steps; CPU time "
        f"{cpu:.2f} and {cpu_of_all:.2f} s, {cpu_of_all / (EVERY * cpu):.2%}"
    )
    return int(cpu_of_all > GOAL * EVERY * cpu)


if __name__ == "__main__":
    sys.exit(main())
