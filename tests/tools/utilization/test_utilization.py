"""MFU and HFU in the lines of a job, on a chip that is said to be there."""

import re

import pytest

from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_tools.explain import hlo_matmuls
from praxis_tools.explain.hlo_runs import executed
from praxis_tools.explain.hlo_text import op_name_of, parse
from praxis_tools.plan.chips import CHIPS
from praxis_tools.utilization import utilization_hook as hook
from tests.support.job_runs import succeed, trained
from tests.support.lm_runs import batches, partitioner_of, structs

PEAK = 989e12  # Of an H100 in bfloat16, by its maker.
NUM_FFN = 2  # Matmuls of a feed-forward layer.


@pytest.mark.slow
def test_each_line_has_both_shares_and_the_first_line_says_how_they_count(tmp_path, monkeypatch):
    monkeypatch.setattr(hook, "attached_chip", lambda job: CHIPS["h100"])
    done = succeed(
        "--exp=jobzoo.experiments.Tiny",
        f"--job_log_dir={tmp_path}",
        "--set",
        "task.model.stacked_transformer_tpl.checkpoint_policy=save_nothing",
    )
    lines = read_json_lines(JobDir(tmp_path).metrics_jsonl)
    # By hand: 13 rows of 11 tokens; projections to 3 heads of 6, a feed-forward layer of 11, the
    # logits of 257; attention's two products. Forward, and twice that backward.
    tokens, dims, heads = 13 * 11, 7, 3 * 6
    layer = 4 * dims * heads + NUM_FFN * dims * 11 + 2 * 11 * heads
    flops = 3 * 2 * tokens * (2 * layer + dims * 257)
    for line in lines:
        assert line["mfu"] == pytest.approx(flops / 8 / line["step_time"] / PEAK)
        # Dims that no axis divides are padded, and both layers are computed again.
        assert line["hfu"] > line["mfu"] * (1 + 0.9 * 2 * layer / (2 * layer + dims * 257) / 3)
    (words,) = [line for line in done.out.splitlines() if line.startswith("MFU and HFU are ")]
    assert "989 TFLOP/s, the bfloat16 peak of h100" in words
    assert f"{flops / 8 / 1e12:,.4g} TFLOP" in words
    shown = re.findall(r"MFU ([\d.]+)%  HFU ([\d.]+)%", done.out)
    assert len(shown) == 6  # Of all lines but the first.


@pytest.mark.slow
def test_chips_that_are_not_known_have_no_shares():
    lines = read_json_lines(trained()[0].metrics_jsonl)
    assert not {"mfu", "hfu"} & lines[0].keys()
    assert "MFU" not in trained()[1].out


@pytest.mark.slow
def test_a_model_counts_alike_on_every_mesh_and_as_compiled_for_one_device():
    spec = structs(next(iter(batches("uneven"))))
    partitioners = [partitioner_of("uneven", "adamw", shape) for shape in ((1, 4, 2), (1, 1, 1))]
    split, whole = (hook.flops_of_step(each, spec) for each in partitioners)
    assert split == whole and not whole.at_least
    sites = executed(parse(partitioners[1].train_step.lower(spec).compile()))
    assert whole.flops == sum(
        site.num_runs * hlo_matmuls.matmul_flops(site.instruction, site.computation)
        for site in sites
        if "remat" not in op_name_of(site.instruction)
    )
