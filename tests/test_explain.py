"""--mode=explain: the layout, and what each compiled step does, without a job."""

import math
import os
import re

import fiddle as fdl
import pytest

from praxis_lite.hlo import format_bytes
from praxis_lite.layout_table import layout_table
from praxis_lite.train_state import state_layout
from tests.job_runs import home, succeed

WASTEFUL = "--exp=jobzoo.experiments.Wasteful"


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """What explain prints of Wasteful, and the layout it is about."""
    folder = tmp_path_factory.mktemp("cwd")
    home()
    from jobzoo.experiments import Wasteful

    before = os.getcwd()
    os.chdir(folder)
    try:
        out = succeed("--mode=explain", WASTEFUL).out
    finally:
        os.chdir(before)
    assert os.listdir(folder) == [], "explain wrote a file"
    task = fdl.build(Wasteful().config().task)
    return out, state_layout(task, {"replica": 1, "data": 4, "mdl": 2})


def test_it_prints_the_table_of_layout_txt(explained):
    out, layout = explained
    assert layout_table(layout) in out


def test_it_says_loudly_what_is_replicated(explained):
    out, _ = explained
    size = format_bytes(40_009 * 7 * 4)  # 1.1 MiB
    assert (
        f"WARNING: mdl_vars/params/position_emb/emb_var [40009, 7] is replicated: {size} on each "
        "of 8 devices. Give it a weight_split_dims_mapping."
    ) in out
    # Adam's two slots are as large; nothing else is.
    assert len(re.findall(r"^WARNING: .* is replicated", out, re.MULTILINE)) == 3


def test_it_says_loudly_which_dim_wastes_more_than_a_tenth(explained):
    out, _ = explained
    warnings = [line for line in out.splitlines() if line.startswith("WARNING: ")]
    # Hidden dims 1, heads 3 and model dims 7; the vocabulary's 257 of 258 is no waste.
    for words in (
        r"ffn_layer1/linear/w: dim 2 .*padded from 1 to 2 to split over mdl: 50% of it is padding",
        r"self_attention/\S+: dim 2 .*padded from 3 to 4 to split over mdl: 25% of it is padding",
        r"softmax/\S+/w: dim 0 .*padded from 7 to 8 to split over data: 12% of it is padding",
    ):
        assert any(re.search(words, line) for line in warnings), words
    assert not any("from 257 to 258" in line for line in warnings)


def test_each_step_has_its_collectives_memory_and_donated_bytes(explained):
    out, layout = explained
    sections = dict(re.findall(r"^(\w+_step), batches of \w+\n(.*?)(?=\n\n|\Z)", out, re.M | re.S))
    assert list(sections) == ["train_step", "eval_step", "decode_step"]
    for section in sections.values():
        assert re.search(r"^  collective +count +bytes$", section, re.M)
        row = r"^  all-(reduce|gather) +[~<>=]*[\d,]+ +[~<>=]*[\d.]+ ([KM]i)?B$"
        assert re.search(row, section, re.M), section
        assert re.search(r"memory per device: arguments \S+ \S+, outputs \S+ \S+, temp", section)
    # Train donates the whole state, and nothing else; the others donate nothing.
    leaves = list(layout.leaves())
    state_bytes = sum(math.prod(leaf.padded_shape) * 4 // leaf.num_shards for leaf in leaves)
    donated = f"donated per device: {format_bytes(state_bytes)} in {len(leaves)} buffers"
    assert donated in sections["train_step"]
    for step in ("eval_step", "decode_step"):
        assert "donated per device: 0 B in 0 buffers" in sections[step]


def test_it_takes_settings_and_trains_nothing(explained):
    out, _ = explained
    for words in ("loss", "restored", "initialising", "step 1/"):
        assert words not in out
