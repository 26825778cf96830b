"""The page of --mode=explain, in a real browser, against JAX's own placement of each array."""

import dataclasses
import json
import re
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite.core import StateLayout
from praxis_lite.core.sharding.devices.axis_types import mesh_of
from praxis_tools.explain.explain_page import ExplainedStep, in_notebook, page
from praxis_tools.explain.hlo import Collective, MemoryPerDevice
from tests.support.browser import EXECUTABLE, NO_BROWSER, Browser

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason=NO_BROWSER)

# Nothing here divides. Path: true shape, spec for the axes a, b, c.
LEAVES = {
    "mdl_vars/params/ffn/w": ((7, 13), P("a", "b")),
    "mdl_vars/params/ffn/b": ((13,), P("b")),
    "mdl_vars/params/attention/w": ((3, 5, 7), P("c", None, ("a", "b"))),
    "mdl_vars/params/attention/post": ((13, 5), P(("b", "a", "c"), None)),
    "mdl_vars/params/norm": ((7,), P(None)),
    "mdl_vars/params/tiny": ((1, 2), P("a", None)),
    "mdl_vars/params/even": ((16, 8), P("b", "a")),
    "opt_states/slots/ffn/w": ((7, 13), P("a", ("b", "c"))),
    "step": ((), P()),
}


def collective(kind, layers, count, size, **flags):
    bounds = {"at_least": False, "at_most": False} | flags
    return Collective(
        kind,
        size,
        ("f32",),
        count,
        **bounds,
        group_size=2,
        op_name="",
        layers=tuple((layer, size // len(layers)) for layer in layers),
    )


STEP = ExplainedStep(
    step="train",
    dataset="texts",
    batch=StateLayout(
        {"ids": jax.ShapeDtypeStruct((13, 5), "int32")},
        {"ids": P(("a", "b", "c"), None)},
        {"a": 2, "b": 2, "c": 2},
        {"ids": "rows over the mesh"},
    ),
    collectives=[
        collective("all-gather", ("ffn",), 7, 100),
        collective("all-gather", ("gradient of ffn",), 7, 300, at_least=True),
        collective("all-reduce", ("gradient of a/ffn", "gradient of a/norm"), 3, 2048),
        collective("all-reduce", ("gradient of a/norm", "gradient of a/q"), 2, 1024),
    ],
    memory=MemoryPerDevice(arguments=1024, outputs=2048, temp=3072, aliased=0, peak=6144),
    donated=(1024, 3),
    flops=1234567,
)


def layout_of(leaves, axis_sizes, **settings):
    return StateLayout(
        shapes={path: jax.ShapeDtypeStruct(s, "float32") for path, (s, _) in leaves.items()},
        specs={path: spec for path, (_, spec) in leaves.items()},
        axis_sizes=axis_sizes,
        **settings,
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser that shows what it is given, with a fresh record of complaints and requests."""
    item = Browser("about:blank")
    folder = tmp_path_factory.mktemp("pages")

    def show(mesh, layout, steps=(), *, title="a job", warnings=(), address=""):
        file = folder / f"{len(list(folder.iterdir()))}.html"
        file.write_text(page(title, mesh, layout, warnings, steps), encoding="utf-8")
        item.complaints.clear()
        item.requests.clear()
        item.open(file.as_uri() + address)
        return item

    yield show
    item.close()


@pytest.fixture(scope="module")
def mesh_222():
    return mesh_of(np.array(jax.devices()).reshape(2, 2, 2), tuple("abc"))


# All blocks as they are drawn: devices, colors, tooltip, box; and the hatched boxes in them.
DRAWN = """
(() => {
  const box = (node) => {
    const {x, y, width, height} = node.getBoundingClientRect();
    return [x, y, width, height];
  };
  return Object.fromEntries([...document.querySelectorAll(".leaf")].map((leaf) => [
    leaf.dataset.path, {
      box: box(leaf.querySelector(".drawing")),
      blocks: [...leaf.querySelectorAll(".block")].map((block) => ({
        devices: block.dataset.devices.split(" ").map(Number),
        title: block.title,
        box: box(block),
        colors: getComputedStyle(block).background.match(/rgb\\([^)]*\\)/g),
        hatched: [...block.querySelectorAll("i")].map(box),
      })),
    }]));
})()
"""
OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = true })"


def all_drawn(number):
    return (
        f"document.querySelectorAll('.leaf').length === {number} && "
        "[...document.querySelectorAll('.drawing')].every((one) => one.children.length)"
    )


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 2), (8, 1, 1), (1, 1, 1)])
def test_blocks_and_their_colors_are_where_jax_places_them(browser, shape):
    size = int(np.prod(shape))
    mesh = mesh_of(np.array(jax.devices()[:size]).reshape(shape), tuple("abc"))
    layout = layout_of(LEAVES, dict(mesh.shape))
    item = browser(mesh, layout)
    item.resize(1280, 4000)
    item.run(OPEN_ALL)
    item.wait(all_drawn(len(LEAVES)))
    drawn = item.run(DRAWN)
    colors = item.run(
        "Object.fromEntries([...document.querySelectorAll('#mesh button')].map((one) =>"
        " [one.innerText, getComputedStyle(one).backgroundColor]))"
    )
    assert list(colors) == [str(i) for i in range(size)]
    assert len(set(colors.values())) == size
    assert drawn.keys() == LEAVES.keys()
    for leaf in layout.leaves():
        sharding = NamedSharding(mesh, LEAVES[leaf.path][1])
        placed = {}
        for device, index in sharding.devices_indices_map(leaf.padded_shape).items():
            bounds = [s.indices(n)[:2] for s, n in zip(index, leaf.padded_shape, strict=True)]
            placed.setdefault(tuple(bounds), []).append(device.id)
        actual = drawn[leaf.path]["blocks"]
        by_devices = {tuple(sorted(block["devices"])): block for block in actual}
        assert by_devices.keys() == {tuple(sorted(ids)) for ids in placed.values()}, leaf.path
        assert len(actual) == len(placed)
        for bounds, ids in placed.items():
            block = by_devices[tuple(sorted(ids))]
            expected = [colors[str(device)] for device in block["devices"]]
            # In a gradient each color stands twice: where it begins and where it ends.
            assert list(dict.fromkeys(block["colors"])) == expected, leaf.path
            true = [(lo, min(hi, n)) for (lo, hi), n in zip(bounds, leaf.shape, strict=True)]
            ranges = [f"{lo}:{hi}" if hi > lo else "only padding" for lo, hi in true]
            assert block["title"].split("\n")[1] == f"[{', '.join(ranges)}]"
            check_padding(block, bounds, leaf)
            if len(leaf.shape) == 2:
                check_place(block, drawn[leaf.path]["box"], bounds, leaf)
    assert (item.complaints, item.requests) == ([], [item.run("location.href")])


def check_padding(block, bounds, leaf):
    stored = np.prod([hi - lo for lo, hi in bounds])
    sizes = zip(bounds, leaf.shape, strict=True)
    true = np.prod([max(min(hi, n) - lo, 0) for (lo, hi), n in sizes])
    area = sum(width * height for _, _, width, height in block["hatched"])
    assert area / (block["box"][2] * block["box"][3]) == pytest.approx(1 - true / stored, abs=2e-2)


def check_place(block, drawing, bounds, leaf):
    (top, _), (left, _) = bounds
    at = [block["box"][i] - drawing[i] for i in (0, 1)]
    assert at[0] / drawing[2] == pytest.approx(left / leaf.padded_shape[1], abs=2e-2)
    assert at[1] / drawing[3] == pytest.approx(top / leaf.padded_shape[0], abs=4e-2)


@pytest.fixture
def shown(browser, mesh_222):
    layout = layout_of(
        LEAVES,
        dict(mesh_222.shape),
        notes=("norm was left whole",),
        declared_by={"mdl_vars/params/ffn/w": "rule 'ffn/.*': fsdp(\"a\")"},
    )
    item = browser(mesh_222, layout, [STEP], warnings=["much padding"])
    item.resize(1280, 900)
    return item, layout


def test_what_stands_beside_a_drawing(shown):
    item, layout = shown
    row = item.run("document.querySelector('.leaf[data-path$=\"ffn/w\"]').innerText")
    words = ("[7, 13] padded to [8, 14]", "float32", "(a, b)", "112 B per device", "18.8% padding")
    assert all(word in row for word in words), row
    assert "decided by rule 'ffn/.*': fsdp(\"a\")" in re.sub(r"\s+", " ", row)
    assert {leaf.path: leaf for leaf in layout.leaves()}["mdl_vars/params/ffn/w"].padded_shape == (
        8,
        14,
    )
    notes = item.run("document.querySelector('#main details').innerText")
    assert notes.split("\n\n")[1:] == ["much padding", "norm was left whole"]


def test_totals_are_those_of_the_shards_of_one_device(shown):
    item, layout = shown
    held = {"weights": 0, "optimizer slots": 0}
    for leaf in layout.leaves():
        shards = NamedSharding(
            mesh_of(np.array(jax.devices()).reshape(2, 2, 2), tuple("abc")), leaf.spec
        ).shard_shape(leaf.padded_shape)
        kind = "weights" if leaf.path.startswith("mdl_vars") else "optimizer slots"
        held[kind] += 4 * int(np.prod(shards))
    rows = dict(
        item.run(
            "[...document.querySelectorAll('#totals tr')].map((row) => row.innerText.split('\\t'))"
        )
    )
    assert rows == {
        **{kind: f"{size} B" for kind, size in held.items()},
        "total state": f"{sum(held.values())} B",
        "batch of texts (train_step)": f"{2 * 5 * 4} B",
        "temporary arrays in train_step": "3.0 KiB",
    }


def test_padding_of_a_device_is_what_its_shards_hold_beyond_the_true_shape(shown, mesh_222):
    item, layout = shown
    true, stored = np.zeros(8), np.zeros(8)
    for leaf in layout.leaves():
        real = np.zeros(leaf.padded_shape)
        real[tuple(slice(n) for n in leaf.shape)] = 1
        for device, index in (
            NamedSharding(mesh_222, leaf.spec).devices_indices_map(leaf.padded_shape).items()
        ):
            true[device.id] += real[index].sum()
            stored[device.id] += real[index].size
    texts = [item.run(f"look({i}); document.getElementById('device').innerText") for i in range(8)]
    for i, text in enumerate(texts):
        places = zip("abc", np.unravel_index(i, (2, 2, 2)), strict=True)
        place = ", ".join(f"{axis} {x}" for axis, x in places)
        share = f"{100 * (1 - true[i] / stored[i]):.1f}%"
        assert text == f"Device {i} ({place}): {share} of its state is padding."


def test_collectives_are_told_by_kind_and_layer_with_their_bytes(shown):
    item, _ = shown
    rows = item.run(
        "[...document.querySelectorAll('.step tbody tr')].map((row) => [row.className,"
        " ...[...row.cells].slice(0, 3).map((cell) => cell.innerText.trim())])"
    )
    assert rows == [
        ["total", "all-reduce", "5", "8.0 KiB"],
        ["layer", "gradient of several in a", "5", "8.0 KiB"],
        ["total", "all-gather", ">=14", ">=2.7 KiB"],
        ["layer", "gradient of ffn", ">=7", ">=2.1 KiB"],
        ["layer", "ffn", "7", "700 B"],
    ]
    item.run("document.querySelector('.step tbody details').open = true")
    opened = item.run("document.querySelector('.step tbody details').innerText")
    assert [line for line in opened.splitlines() if line][1:] == [
        # Half of 3 x 2048 and half of 2 x 1024; half of the one; half of the other.
        "gradient of a/norm: 4.0 KiB",
        "gradient of a/ffn: 3.0 KiB",
        "gradient of a/q: 1.0 KiB",
    ]
    facts = item.run("document.querySelector('.step p').innerText")
    assert facts == (
        "Per device: arguments 1.0 KiB, outputs 2.0 KiB, temp 3.0 KiB, peak 6.0 KiB, donated "
        "1.0 KiB in 3 buffers, 1,234,567 matmul flops."
    )


VISIBLE = (
    "[...document.querySelectorAll('.leaf')].filter((leaf) => leaf.offsetParent)"
    ".map((leaf) => leaf.dataset.path)"
)


def test_the_filter_keeps_what_has_every_word_and_stands_in_the_address(shown):
    item, _ = shown
    item.run("document.getElementById('filter').focus()")
    item.type("FFN w")
    assert item.run(VISIBLE) == ["mdl_vars/params/ffn/w"]
    assert item.run("document.getElementById('count').innerText") == "2 of 10 arrays"
    assert item.run("location.hash") == "#filter=FFN+w"
    rows = "[...document.querySelectorAll('.step tr.layer')].filter((row) => row.offsetParent)"
    assert item.run(f"{rows}.length") == 0
    item.run("location.hash = '#filter=attention'")
    item.wait("document.getElementById('filter').value === 'attention'")
    assert item.run(VISIBLE) == ["mdl_vars/params/attention/post", "mdl_vars/params/attention/w"]
    item.run("location.hash = ''")
    item.wait("document.getElementById('filter').value === ''")
    assert len(item.run(VISIBLE)) == 7 + 1  # Weights and the batch; slots are folded away.


def test_a_filter_in_the_address_holds_from_the_start(browser, mesh_222):
    item = browser(mesh_222, layout_of(LEAVES, dict(mesh_222.shape)), address="#filter=ffn%20b")
    assert item.run("document.getElementById('filter').value") == "ffn b"
    assert item.run(VISIBLE) == ["mdl_vars/params/ffn/b"]
    # Slots are built when their heading is opened, and filtered then.
    item.run(OPEN_ALL)
    item.wait(f"document.querySelectorAll('.leaf').length === {len(LEAVES)}")
    assert item.run(VISIBLE) == ["mdl_vars/params/ffn/b"]


def bright(item):
    return item.run(
        "[...document.querySelectorAll('.leaf[data-path$=\"ffn/b\"] .block')]"
        ".filter((block) => getComputedStyle(block).opacity === '1')"
        ".map((block) => block.dataset.devices)"
    )


def test_a_device_is_picked_with_the_mouse_and_with_the_keyboard(shown):
    item, _ = shown
    item.wait("document.querySelector('.leaf[data-path$=\"ffn/b\"] .block')")
    # ffn/b is split over b: devices 0, 1, 4, 5 hold the first half.
    halves = ["0 1 4 5", "2 3 6 7"]
    assert bright(item) == halves
    item.run("document.querySelectorAll('#mesh button')[5].click()")
    assert bright(item) == halves[:1]
    item.run("document.querySelectorAll('#mesh button')[5].click()")
    assert bright(item) == halves
    item.press("Tab")  # To the mesh: one stop for all of its devices.
    item.press("ArrowRight")
    item.press("ArrowDown")
    assert item.run("document.activeElement.innerText") == "3"
    assert bright(item) == halves[1:]
    item.press("Enter")
    item.press("Tab")
    assert item.run("document.activeElement.id") == "filter"
    assert bright(item) == halves[1:], "what was picked did not stay"
    pressed = "[...document.querySelectorAll('[aria-pressed=true]')].map((one) => one.innerText)"
    assert item.run(pressed) == ["3"]
    # A block that is pointed at shows its devices in the mesh.
    item.run(
        "document.querySelector('.leaf[data-path$=\"ffn/b\"] .block')"
        ".dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    marked = "[...document.querySelectorAll('#mesh .on')].map((one) => one.innerText)"
    assert item.run(marked) == ["0", "1", "4", "5"]


@pytest.mark.parametrize("width", [1280, 390])
def test_it_does_not_scroll_sideways(browser, mesh_222, width):
    path = "/".join(f"a_rather_long_name_{i}" for i in range(9))
    layout = layout_of(
        {path: ((7,), P("a"))},
        dict(mesh_222.shape),
        notes=(path,),
        declared_by={path: f"rule {path!r}"},
    )
    sent = collective("all-gather", (path, f"gradient of {path}"), 7, 100)
    step = dataclasses.replace(STEP, collectives=[sent, *STEP.collectives])
    item = browser(mesh_222, layout, [step], title=path, warnings=[path])
    item.resize(width, 900)
    item.run(OPEN_ALL)
    item.wait(all_drawn(2))
    assert item.run("document.documentElement.scrollWidth <= innerWidth")
    # A name breaks between its parts, and a part without a space is on one line.
    assert item.run(BROKEN_WORDS) == []


BROKEN_WORDS = """(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), broken = [];
  while (walker.nextNode()) {
    const text = walker.currentNode, range = document.createRange();
    if (/\\s/.test(text.data) || text.parentNode.closest("p, script")) continue;
    range.selectNode(text);
    if (range.getClientRects().length > 1) broken.push(text.data);
  }
  return broken;
})()"""


def test_a_thousand_leaves_on_256_devices_are_drawn_as_they_come_into_sight(browser):
    devices = [types.SimpleNamespace(id=i, device_kind="TPU") for i in range(256)]
    mesh = types.SimpleNamespace(devices=np.array(devices, dtype=object))
    specs = [P("a", "b"), P(("a", "b"), None), P(None, None), P("b", "a")]
    layout = layout_of(
        {f"mdl_vars/{i:03}/kernel": ((8190, 1021), specs[i % 4]) for i in range(1000)},
        {"a": 16, "b": 16},
    )
    item = browser(mesh, layout)
    item.resize(390, 900)
    item.wait("document.querySelectorAll('.block').length")
    assert 256 <= item.run("document.querySelectorAll('.block').length") < 256 * 60
    assert item.run("document.querySelectorAll('.leaf').length") == 1000
    last = "[...document.querySelectorAll('.leaf')].at(-1).querySelectorAll('.block').length"
    assert item.run(last) == 0
    item.run("scrollTo(0, 1e9)")
    item.wait(f"{last} === 256")
    assert item.complaints == []


def test_4096_devices_are_drawn_in_groups_and_a_plan_in_figures(browser):
    devices = [types.SimpleNamespace(id=i, device_kind="TPU") for i in range(4096)]
    mesh = types.SimpleNamespace(devices=np.array(devices, dtype=object))
    sizes = {"replica": 1, "data": 512, "mdl": 8}
    layout = layout_of({"mdl_vars/params/w": ((8192, 1024), P("data", "mdl"))}, sizes)
    batch = layout_of({"ids": ((4096, 128), P(("replica", "data", "mdl"), None))}, sizes)
    figures = (("step", "1.5 s (1.2 s to 1.9 s)"), ("fits", "yes: 3 GiB of 16 GiB"))
    item = browser(mesh, layout, [dataclasses.replace(STEP, figures=figures, batch=batch)])
    item.resize(1280, 900)
    assert item.run("document.querySelectorAll('.mesh button').length") == 256
    shown = item.run("document.getElementById('mesh').textContent")
    assert "Each square and each number represents 16 devices: 16 along data." in shown
    # 32 groups along data of 16 x 16 rows of the weight each.
    item.wait("document.querySelectorAll('.leaf .block').length >= 256")
    title = item.run("document.querySelector('.leaf .block').title")
    assert title.endswith("[0:256, 0:128]")
    assert "4096 devices: replica 1, data 512, mdl 8" in item.run(
        "document.getElementById('versions').textContent"
    )
    # What was computed from nominal rates stands last.
    assert item.run("document.getElementById('main').lastElementChild.className") == "figures"
    plan = item.run("document.querySelector('.figures').textContent")
    assert "Estimates for" in plan and "1.5 s (1.2 s to 1.9 s)" in plan
    assert item.complaints == []


def test_the_page_is_one_file_with_valid_data(mesh_222):
    text = page("x", mesh_222, layout_of(LEAVES, dict(mesh_222.shape)), [], [STEP])
    data = text.split('id="document">')[1].split("</script>")[0]
    assert len(json.loads(data)["leaves"]) == len(LEAVES)
    assert not re.search(r"\bsrc=|href=\"(?!data:)|@import|url\(|fetch\(|XMLHttp|https?:", text)


@pytest.mark.slow
def test_in_a_notebooks_output_the_page_draws_and_filters(browser, mesh_222, tmp_path):
    frame = in_notebook(page("a job", mesh_222, layout_of(LEAVES, dict(mesh_222.shape)), (), ()))
    # Within the sandbox of a notebook nobody else can look.
    frame = frame.replace('sandbox="allow-scripts"', "")
    (tmp_path / "notebook.html").write_text(f"<p>output</p>{frame}", encoding="utf-8")
    item = browser(mesh_222, layout_of({}, dict(mesh_222.shape)))
    item.open((tmp_path / "notebook.html").as_uri())
    inside = "document.querySelector('iframe').contentDocument"
    item.wait(f"{inside}.getElementById('count').textContent.endsWith(' arrays')")
    assert item.run(f"{inside}.querySelectorAll('[data-path]').length") > 0
    item.run(
        f"(() => {{ const box = {inside}.getElementById('filter'); box.value = 'attention';"
        " box.dispatchEvent(new Event('input')); })()"
    )
    assert item.run(f"{inside}.getElementById('count').textContent").startswith("2 of ")
    assert item.complaints == []
