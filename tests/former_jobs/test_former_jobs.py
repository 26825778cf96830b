"""Jobs that an earlier version wrote load, go on and give the same numbers.

Where `tests/former_jobs` comes from stands in its README.
"""

import dataclasses
import json
import tarfile
from pathlib import Path

import fiddle as fdl
import pytest

from praxis_lite.experiments.huggingface import ChatLora
from praxis_lite.run.config.overrides import check_required
from praxis_lite.run.config.text import load_config_file
from praxis_lite.run.job.job_dir import JobDir
from tests.support.job_runs import lines_of, succeed

FORMER = Path(__file__).parent
# Rounding differs between versions of XLA and kinds of CPU.
CLOSE = {"rel": 2e-5, "abs": 2e-6}


@pytest.mark.parametrize("path", sorted(FORMER.glob("configs/*.json")), ids=lambda path: path.stem)
def test_a_config_that_was_written_before_still_builds(path):
    loaded = load_config_file(path)
    check_required(loaded.config)
    fdl.build(loaded.config)
    assert loaded.experiment.endswith(path.stem)


def test_conversations_of_before_are_read_as_those_of_today():
    def settings(item):
        actual = dataclasses.asdict(item)
        actual["documents"]["tokenizer"] = type(item.tokenizer)
        return type(item), actual

    before = fdl.build(load_config_file(FORMER / "configs/huggingface.ChatLora.json").config)
    today = fdl.build(ChatLora().config())
    for name in ("train", "heldout"):
        assert settings(before.datasets[name]) == settings(today.datasets[name])


@pytest.mark.slow
def test_a_job_that_was_begun_before_goes_on_and_decodes_to_the_same_numbers(tmp_path):
    with tarfile.open(FORMER / "reverse.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    job = JobDir(tmp_path)
    records_path = tmp_path / "decode/heldout/20.jsonl"
    losses = [line["loss"] for line in lines_of(job.metrics_jsonl)]
    evaluations = lines_of(job.eval_metrics_jsonl)
    records = [json.loads(line) for line in records_path.read_text().splitlines()]
    assert (len(losses), [line["step"] for line in evaluations]) == (20, [10, 20])
    records_path.unlink()

    config = json.loads(job.config_json.read_text())
    resumed = succeed(f"--exp={config['experiment']}", f"--job_log_dir={tmp_path}",
                      *(f"--set={item}" for item in config["overrides"]))
    assert "step 10" in resumed.out and "step 11/20" in resumed.out
    succeed("--mode=decode", f"--job_log_dir={tmp_path}")

    assert [line["loss"] for line in lines_of(job.metrics_jsonl)] == pytest.approx(losses, **CLOSE)
    for record, expected in zip(lines_of(job.eval_metrics_jsonl), evaluations, strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], **CLOSE)
    found_records = [json.loads(line) for line in records_path.read_text().splitlines()]
    for record, expected in zip(found_records, records, strict=True):
        assert record["output_ids"] == expected["output_ids"]
        assert record["log_prob"] == pytest.approx(expected["log_prob"], rel=1e-4, abs=1e-5)
