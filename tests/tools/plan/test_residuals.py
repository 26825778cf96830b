"""Residuals of steps that ran: kept by --measure and by a profile, read by later plans."""

import dataclasses
import json

import pytest

from praxis_lite import ConfigError
from praxis_lite.host import object_stores
from praxis_lite.host.object_stores import StorePath
from praxis_tools.plan.plan_text import plan_text
from praxis_tools.plan.residuals import (
    Residual,
    append_residual,
    apply_residuals,
    read_residuals,
)
from praxis_tools.plan.step_plan import PredictedStepPlan
from tests.support.fake_s3 import s3_bucket
from tests.support.job_runs import launch

MESH = {"data": 7, "mdl": 3}
RESIDUAL = Residual(
    chip="v5e",
    step="train",
    axis_sizes=MESH,
    flops_per_device=1009,
    predicted_seconds=2.0,
    measured_seconds=2.2,
    source="--measure",
)
PLAN = PredictedStepPlan(
    step="train",
    topology="v5e:3x7",
    num_devices=21,
    fits=True,
    peak_bytes_per_device=1,
    hbm_bytes_per_device=2,
    parameters=5,
    compile_seconds=1.0,
    step_seconds=3.0,
    step_seconds_low=2.5,
    step_seconds_high=3.5,
    compute_seconds=2.0,
    memory_seconds=0.5,
    network_seconds=0.5,
    exposed_seconds=0.5,
    flops_per_device=1009,
    recomputed_flops=0,
    mfu=0.5,
    hfu=0.5,
    tokens_per_second=11.0,
)


@pytest.fixture(params=["disk", "store"])
def folder(request, tmp_path):
    if request.param == "disk":
        return tmp_path
    pytest.importorskip("obstore")
    object_stores._bucket.cache_clear()
    return StorePath.opened("memory://bucket/job")


def file_of(folder, *residuals):
    file = folder / "residuals.jsonl"
    for residual in residuals:
        append_residual(file, residual)
    return file


def correction(tmp_path, *residuals):
    file = file_of(tmp_path, *residuals)
    return apply_residuals(PLAN, "v5e", MESH, file, read_residuals(file))


def test_a_file_has_a_line_for_each_residual_and_gives_them_back(folder):
    other = dataclasses.replace(RESIDUAL, chip="tpu7x", measured_seconds=0.7)
    assert read_residuals(file_of(folder, RESIDUAL, other)) == [RESIDUAL, other]
    assert read_residuals(folder / "none.jsonl") == []


def test_a_plan_is_corrected_by_the_median_of_the_same_step(tmp_path):
    runs = [dataclasses.replace(RESIDUAL, measured_seconds=s) for s in (2.2, 2.6, 2.4)]
    others = [dataclasses.replace(RESIDUAL, flops_per_device=1, measured_seconds=40.0)] * 5
    plan = correction(tmp_path, *runs, *others)
    assert plan.correction.seconds == pytest.approx(3.0 * 1.2)
    assert (plan.correction.count, plan.correction.is_of_step) == (3, True)
    text = plan_text(plan)
    assert "corrected 3.60 s: this step took 1.2 times the planned time (median of 3 in " in text
    assert json.loads(json.dumps(plan.to_json()))["correction"]["ratio"] == pytest.approx(1.2)


@pytest.mark.parametrize("field", ["flops_per_device", "axis_sizes"])
def test_without_the_same_step_others_on_the_chip_correct_and_it_is_said(tmp_path, field):
    value = {"flops_per_device": 7, "axis_sizes": {"data": 3, "mdl": 7}}[field]
    plan = correction(tmp_path, dataclasses.replace(RESIDUAL, **{field: value}))
    assert not plan.correction.is_of_step
    assert "corrected 3.30 s: other steps on v5e took 1.1 times the planned time" in plan_text(plan)


@pytest.mark.parametrize("field", ["chip", "step"])
def test_another_chip_or_kind_of_step_corrects_nothing(tmp_path, field):
    plan = correction(tmp_path, dataclasses.replace(RESIDUAL, **{field: "another"}))
    assert plan.correction is None and "corrected" not in plan_text(plan)


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:-5],
        lambda line: line.replace("2.0", "0.0"),
        lambda line: line.replace('"chip"', '"chips"'),
        lambda line: "[]",
    ],
)
def test_a_damaged_line_is_named_by_file_and_number(tmp_path, damage):
    file = file_of(tmp_path, RESIDUAL, RESIDUAL)
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{damage(second)}\n")
    with pytest.raises(ConfigError, match=r"residuals\.jsonl, line 2\b.*--residuals"):
        read_residuals(file)


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"residuals\.jsonl.*--residuals"):
        append_residual(tmp_path / "nowhere" / "residuals.jsonl", RESIDUAL)


@pytest.mark.slow
def test_a_measured_step_corrects_the_next_plan_of_it(tmp_path):
    file = tmp_path / "residuals.jsonl"
    words = ("--exp=lm.Synthetic", f"--residuals={file}")
    measured = launch("--mode=plan", *words, "--measure")
    assert measured.code == 0 and f"saved to {file}" in measured.out, measured
    (residual,) = read_residuals(file)
    planned = launch("--mode=plan", *words, "--topology=cpu:8")
    assert planned.code == 0, planned
    correction = f"{residual.ratio:.3g} times the planned time (median of 1 in {file})"
    assert f"this step took {correction}" in planned.out


@pytest.mark.slow
def test_a_job_in_a_store_corrects_plans_like_its_copy_on_disk(tmp_path):
    copy = tmp_path / "job"
    with s3_bucket() as url:
        job = StorePath.opened(f"{url}/jobs/job")
        (job / "config.json").write_bytes(b"{}")
        measured = launch(
            "--mode=plan", "--exp=lm.Synthetic", f"--residuals={job}/residuals.jsonl", "--measure"
        )
        assert measured.code == 0 and f"saved to {job}/residuals.jsonl" in measured.out, measured
        for name in job.files():
            (job / name).download(copy / name)
        plans = []
        for folder in (job, copy):
            argv = ("--exp=lm.Synthetic", f"--job_log_dir={folder}", "--topology=cpu:8")
            planned = launch("--mode=plan", *argv)
            assert planned.code == 0, planned
            plans.append(planned.out.replace(f"{folder}/", "JOB/").splitlines())
    lines = [[line for line in plan if line.startswith(("step", "corrected"))] for plan in plans]
    assert lines[0] == lines[1] and "(median of 1 in JOB/residuals.jsonl)" in lines[0][-1]
