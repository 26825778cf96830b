"""Checks that the results of a job are bitwise equal after the job is stopped and resumed.

The train step must also donate the state, make no host transfers and be compiled only once.
"""

import contextlib
import dataclasses
import io
import itertools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.experiment.run_config import RunConfig
from praxis_lite.experiment.run_settings import StopSettings
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.interrupts import Interrupt
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.launch import launch_training
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.check import Check
from praxis_tools.check.parts.data import same_shaped, with_rows
from praxis_tools.check.runs.on_mesh import Leaves, TaskRunner, leaves_of, structs, unpad
from praxis_tools.explain import hlo
from praxis_tools.explain.hlo_text import text_of

NUM_STEPS, STOPPED_AT = 3, 1
_HOST = re.compile(r"\b(?:infeed|outfeed|send|recv)\(|custom_call_target=\"[^\"]*callback[^\"]*\"")


def resumed(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares a resumed job with an uninterrupted job, and restored states with saved states."""
    runner = check.on_mesh(check.own_shape, check.job.task)
    yield from _compare_restored(check, runner)
    pipeline = _CheckedData(check)
    stops_by_job: dict[str, tuple[int, ...]] = {"uninterrupted": (), "stopped": (STOPPED_AT,)}
    with tempfile.TemporaryDirectory() as folder:
        losses = [
            _train_job(check, runner, pipeline, Path(folder) / name, stops)
            for name, stops in stops_by_job.items()
        ]
        yield tolerances.exact(runner.name, "losses of a resumed job", *losses)
        directories = [JobDir(Path(folder) / name).checkpoints for name in stops_by_job]
        states = [_restore_state(directory, runner) for directory in directories]
        yield tolerances.exact(runner.name, "state of a resumed job", *map(leaves_of, states))
    yield _check_compiled_step(check, runner)


def _compare_restored(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Saves a random state on one mesh, restores it on each mesh, and compares the results."""
    rng = np.random.default_rng(7)

    def draw(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if jax.dtypes.issubdtype(x.dtype, np.floating):
            return rng.normal(size=x.shape).astype(x.dtype)
        return rng.integers(0, 100, x.shape).astype(x.dtype)

    shapes = runner.layout.shapes
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(shapes)):
        check.add_note("Restored: not checked, because a variable is a random key.")
        return
    state = jax.tree.map(draw, shapes)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with Checkpoints(directory, saving=SaveSettings(), note=lambda line: None) as checkpoints:
            placed = runner.place_state(state)
            checkpoints.save(int(state.step), placed, runner.layout, {}, is_last=True)
        for other in (check.one_device, *check.meshes.values()):
            yield tolerances.exact(
                f"{runner.name} to {other.name}",
                "restored",
                leaves_of(state),
                leaves_of(_restore_state(directory, other)),
            )


class _CheckedData(InputPipeline):
    """The training data with fewer rows per batch, and with all ids in the model's range."""

    def __init__(self, check: Check):
        self._check, self._pipeline = check, check.job.datasets[TRAIN]
        self.batch_size = check.num_rows

    @property
    def num_batches(self) -> int | None:
        return self._pipeline.num_batches

    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        return structs(self._check.batches[0])

    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        rows = self.rows_or_all(rows)
        for batch in itertools.islice(same_shaped(self._pipeline), start, None):
            checked_batch = self._check.with_known_ids(with_rows(batch, slice(self.batch_size)))
            yield with_rows(checked_batch, rows)

    def fingerprint(self) -> dict[str, Any]:
        return self._pipeline.fingerprint()


def _train_job(
    check: Check, runner: TaskRunner, pipeline: InputPipeline, folder: Path, stops: tuple[int, ...]
) -> Leaves:
    """Trains a job that stops and resumes after each step in `stops`, and returns the losses."""
    folder.mkdir()
    launched = LaunchedConfig(check.config, check.certificate.experiment, packages=check.packages)
    for num_steps in (*stops, NUM_STEPS):
        run = RunConfig(
            num_train_steps=num_steps,
            seed=check.seed,
            frozen_may_be_new=True,  # Random weights are fine, since the result is discarded.
            checkpoints=SaveSettings(save_non_finite=True),
            stopping=StopSettings(watchdog_seconds=None, max_skipped_steps_in_a_row=None),
        )
        job = dataclasses.replace(
            check.job, datasets={TRAIN: pipeline}, decode_datasets={}, run=run, hooks=()
        )
        with contextlib.redirect_stdout(io.StringIO()):
            on_mesh = JobOnMesh(runner.partitioner, job, JobDir(folder))
            ended = launch_training(on_mesh, launched, stop_request=Interrupt)
            if ended.stopped_by:
                raise KeyboardInterrupt(ended.stopped_by)
    return {
        f"step {line['step']}": np.asarray(line["loss"])
        for line in read_json_lines(JobDir(folder).metrics_jsonl)
    }


def _restore_state(directory: AnyPath, runner: TaskRunner) -> Any:
    with Checkpoints(directory, note=lambda line: None) as checkpoints:
        state = checkpoints.restore(runner.layout, runner.mesh).state
    return unpad(runner.layout, jax.device_get(state))[0]


def _check_compiled_step(check: Check, runner: TaskRunner) -> list[Comparison]:
    """Checks donation, host transfers and the number of compilations of the train step.

    Call this function after the step has run.
    """
    partitioner = runner.partitioner
    text = text_of(partitioner.train_step.lower(structs(check.batches[0])).compile())
    state_bytes = sum(leaf.bytes_per_device for leaf in runner.layout.leaves())
    num_compiled = partitioner.train_step.num_compiled()
    return [
        Comparison(
            runner.name,
            "donated",
            "bytes per device",
            None,
            abs(state_bytes - hlo.donated_bytes(text)),
            0.0,
            "the entire state is donated",
        ),
        Comparison(
            runner.name,
            "host transfers",
            "train_step",
            None,
            len(_HOST.findall(text)),
            0.0,
            "a step makes no host transfers",
        ),
        Comparison(
            runner.name,
            "compilations",
            "train_step",
            None,
            abs(num_compiled - 1),
            0.0,
            "all steps share one compilation",
        ),
    ]
