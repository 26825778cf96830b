"""--mode=explain: the layout, and what each compiled step does, without a job."""

import math
import os
import re
import types

import fiddle as fdl
import jax
import pytest
from jax.sharding import PartitionSpec

from praxis_lite.core import StateLayout
from praxis_lite.core.errors import format_bytes
from praxis_lite.core.partitioner.train_state import layout_and_learner
from praxis_lite.trainer.layout_table import layout_table
from praxis_tools.explain.explain import explain
from tests.support.browser import EXECUTABLE, NO_BROWSER, Browser
from tests.support.job_runs import home, launch, succeed

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
        out = succeed("--mode=explain", WASTEFUL, "--html=page.html").out
    finally:
        os.chdir(before)
    assert os.listdir(folder) == ["page.html"], "explain wrote a file that was not asked for"
    task = fdl.build(Wasteful().config().task)
    layout, _ = layout_and_learner(task, {"replica": 1, "data": 4, "mdl": 2})
    return out, layout, folder / "page.html"


@pytest.mark.slow
def test_it_prints_the_table_of_layout_txt(explained):
    out, layout, _ = explained
    assert layout_table(layout) in out


@pytest.mark.slow
def test_it_says_loudly_what_is_replicated(explained):
    out, *_ = explained
    size = format_bytes(40_009 * 7 * 4)  # 1.1 MiB
    assert (
        f"WARNING: mdl_vars/params/position_emb/emb_var [40009, 7] is replicated: {size} on each "
        "of 8 devices. Set its weight_split_dims_mapping, or add a rule to the task's "
        "weight_sharding."
    ) in out
    # Adam's two slots are as large; nothing else is.
    assert len(re.findall(r"^WARNING: .* is replicated", out, re.MULTILINE)) == 3


@pytest.mark.slow
def test_it_says_which_dim_wastes_more_than_a_tenth(explained):
    out, *_ = explained
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    # Hidden dims 1, heads 3 and model dims 7; the vocabulary's 257 of 258 is no waste.
    for words in (
        r"ffn_layer1/linear/w: dim 2 .*padded from 1 to 2 to split over mdl: 50% of it is padding",
        r"self_attention/\S+: dim 2 .*padded from 3 to 4 to split over mdl: 25% of it is padding",
        r"softmax/\S+/w: dim 0 .*padded from 7 to 8 to split over data: 12% of it is padding",
    ):
        assert any(re.search(words, line) for line in notes), words
    assert "from 257 to 258" not in out


def sections_of(out):
    """Returns the text on each step, by its name."""
    pattern = r"^(\w+_step), batches of \w+\n(.*?)(?=^\w+_step,|^The page|\Z)"
    return dict(re.findall(pattern, out, re.M | re.S))


@pytest.mark.slow
def test_each_batch_has_its_padded_rows_and_what_becomes_of_them(explained):
    out, *_ = explained
    for step, ids, size in (
        # 13 rows over 8 devices are 16; 5 are 8.
        ("train_step", "[13, 11]  [16, 11]", 2 * 11 * 4),
        ("eval_step", "[13, 37]  [16, 37]", 2 * 37 * 4),
        ("decode_step", "[5, 8]  [8, 8]", 8 * 4),
    ):
        rows = re.sub(r" {2,}", "  ", sections_of(out)[step])
        share = {"decode_step": "37.5%"}.get(step, "18.8%")
        line = f"  ids  {ids}  int32  (replica+data+mdl, -)  {size}  {share}  (1)\n"
        assert line in rows
        assert "  (1) rows over the mesh; then map_2d (replica+data, -)\n" in rows


@pytest.mark.slow
def test_a_weights_gather_and_its_gradients_sum_are_told_by_layer(explained):
    train = sections_of(explained[0])["train_step"]
    for words in (
        r"^    transformer/blocks/ff_layer/ffn_layer2/linear +2 ",
        r"^    gradient of several in transformer/blocks +\d",
        r"^    inputs +\d",
        r"^    .*\blearner\b.* +\d",
    ):
        assert re.search(words, train, re.M), words
    assert "unknown" not in train


@pytest.mark.slow
@pytest.mark.skipif(EXECUTABLE is None, reason=NO_BROWSER)
def test_the_page_of_a_job_shows_its_leaves_and_its_layers(explained):
    out, layout, page = explained
    browser = Browser(page.as_uri())
    try:
        shown = browser.run("document.body.innerText")
        assert browser.complaints == [] and browser.requests == [page.as_uri()]
    finally:
        browser.close()
    weights = [leaf for leaf in layout.leaves() if leaf.path.startswith("mdl_vars/")]
    assert len(weights) == 13
    for leaf in weights:
        assert f"{leaf.path}\n" in shown and leaf.declared_by in shown
    assert "batch of train (train_step)" in shown
    assert "gradient of several in transformer/blocks" in shown
    for warning in re.findall("^WARNING: (.*)", out, re.MULTILINE):
        assert warning in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode=summary", "--html=x.html"], "; summary does not use it"),
        (["--exp=jobzoo.experiments.Tiny", "--html=x.html"], "; train does not use it"),
        (["--mode=explain", WASTEFUL, "--html=."], "--html: . "),
        (["--mode=explain", WASTEFUL, "--html=no/where.html"], " no"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_at_once(arguments, words):
    done = launch(*arguments)
    assert done.code == 2 and words in " ".join(done.err.split())


def test_notes_are_printed():
    struct = jax.ShapeDtypeStruct((7,), "float32")
    layout = StateLayout({"w": struct}, {"w": PartitionSpec(None)}, {}, {}, ("w was left whole",))
    lines = []
    explain(types.SimpleNamespace(layout=layout, mesh=None), {}, {}, lines.append)
    assert "note: w was left whole" in lines


@pytest.mark.slow
def test_each_step_has_its_collectives_memory_and_donated_bytes(explained):
    out, layout, _ = explained
    sections = sections_of(out)
    assert list(sections) == ["train_step", "eval_step", "decode_step"]
    for section in sections.values():
        assert re.search(r"^  collective +count +bytes$", section, re.M)
        layer = r"^    transformer\S* +[~<>=]*[\d,]+ +[~<>=]*[\d.]+ ([KM]i)?B$"
        assert re.search(layer, section, re.M), section
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
