"""The page of --mode=report in a real browser: what it draws, and what a reader does with it."""

import datetime
import re
import time

import pytest

import praxis_lite
from praxis_lite.trainer.metrics.json_lines import json_line
from praxis_tools.report.job_reader import JobReader
from praxis_tools.report.report import Report
from tests.support.browser import EXECUTABLE, NO_BROWSER, Browser
from tests.support.written_jobs import (
    certificate_line,
    change_line,
    nonsense_job,
    training_lines,
    written_job,
)

pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason=NO_BROWSER),
    pytest.mark.slow,
]
HOSTILE = "</script><script>document.title='stolen'</script><img src=http://evil.test/ onerror=a>"
TIMELINE = [
    {
        "launch": 1e9,
        "first_step": 0,
        "last_step": 37,
        "ended_by": HOSTILE,
        "seconds": {"import": 3.5, "compile": 10, "step": 60, "save": 2},
    }
]


def page_of(jobs, reload_seconds=None):
    states = [JobReader(name, job).read(100_000) for name, job in jobs.items()]
    now = datetime.datetime.now(datetime.UTC)
    return Report(states, now).page(reload_seconds=reload_seconds)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder, jobs = tmp_path_factory.mktemp("jobs"), {}
    for seed, name in enumerate(["plain", HOSTILE, "a-name-that-is-as-long-as-names-can-be" * 3]):
        lines = training_lines(37 if seed else 5_003, seed, is_loss_spike=0)
        lines[20]["is_loss_spike"], lines[20]["loss"] = 1, 90.0
        lines[23] |= {"num_skipped_in_a_row": 1, "loss": float("nan")}
        lines[24]["loss"] = float("inf")
        jobs[name] = written_job(
            folder / str(seed),
            lines,
            timeline=TIMELINE,
            experiment=HOSTILE,
            evaluations=[
                {"step": step, "dataset": dataset, "loss": 2 + seed + step / 37}
                for step in (13, 37)
                for dataset in ("heldout", HOSTILE)
            ],
            settings=[f"task.model.{'deeply.' * 9}lr={seed}", f"a={HOSTILE}{seed}"],
            samples={
                f"prompts/{step}": [
                    {"prompt": HOSTILE, "continuation": f"{HOSTILE} {name[:9]} at {step}"},
                    {"prompt": "long", "continuation": "x" * 500},
                ]
                for step in (13, 37)
            },
        )
    jobs["empty"] = written_job(folder / "empty", layout=None)
    return jobs


@pytest.fixture(scope="module")
def browser(tmp_path_factory, jobs):
    item, folder = Browser("about:blank"), tmp_path_factory.mktemp("pages")
    file = folder / "report.html"
    file.write_text(page_of(jobs), encoding="utf-8")

    def show(address="", width=1280, of=None):
        if of is not None:
            other = folder / f"{len(list(folder.iterdir()))}.html"
            other.write_text(of, encoding="utf-8")
        item.complaints.clear()
        item.requests.clear()
        item.resize(width, 900)
        item.open("about:blank")
        item.open((file if of is None else other).as_uri() + address)
        # A newer Chromium returns a promise of the scrolling.
        item.wait("(charts[0].node.scrollIntoView(), charts[0].svg.childElementCount)")
        return item

    yield show
    item.close()


def test_names_samples_and_settings_of_strangers_do_nothing(browser):
    item = browser()
    assert item.run("document.title") != "stolen"
    assert item.run("document.querySelectorAll('img').length") == 0
    assert item.run("document.getElementById('samples').textContent").count(HOSTILE) == 6
    assert item.run("document.body.innerText").count(HOSTILE) >= 8
    # The arrays of the layout, by their stored shapes.
    shown = "mdl_vars/params/w/a[8, 14]float32(data, mdl)1.1 KiB"
    assert shown in item.run("document.getElementById('main').textContent")
    assert item.complaints == []
    assert [url for url in item.requests if not url.startswith(("file:", "about:"))] == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_never_wider_than_the_window(browser, width):
    item = browser(width=width)
    item.run("document.querySelectorAll('details').forEach((node) => { node.open = true })")
    assert item.run("document.documentElement.scrollWidth <= innerWidth")
    too_small = item.run(
        "[...document.querySelectorAll('button, select, summary')]"
        ".filter((node) => node.offsetParent && node.getBoundingClientRect().height <"
        f" {40 if width == 390 else 32}).length"
    )
    assert too_small == 0


# The points of the loss curve of job 1 (37 steps): step and loss, by the chart's own ticks.
DRAWN = """
(() => {
  const chart = charts[0], svg = chart.svg;
  const ticks = [...svg.querySelectorAll("text")].map((node) => ({
    text: node.textContent, x: Number(node.getAttribute("x")), y: Number(node.getAttribute("y")),
    isX: node.getAttribute("text-anchor") === "middle",
  }));
  const lines = [...svg.querySelectorAll("path.line")].map((node) =>
    node.getAttribute("d").split(/(?=[ML])/).map((part) => part.slice(1).split(" ").map(Number)));
  return { ticks, lines };
})()
"""


def line_through(ticks, place):
    """Returns the scale of an axis, from the first and the last of its ticks."""

    def value(text):
        return float(text.replace("k", "e3"))

    first, last = ticks[0], ticks[-1]
    slope = (value(last["text"]) - value(first["text"])) / (last[place] - first[place])
    return lambda pixel: value(first["text"]) + slope * (pixel - first[place])


def test_a_curve_is_drawn_where_its_numbers_are(browser, jobs):
    lines = training_lines(31, seed=5)
    item = browser(
        of=page_of({"job": written_job(jobs["empty"].path.parent / "straight", lines, layout=None)})
    )
    drawn = item.run(DRAWN)
    x_ticks = [tick for tick in drawn["ticks"] if tick["isX"]][:-1]
    y_ticks = [{**tick, "y": tick["y"] - 4} for tick in drawn["ticks"] if not tick["isX"]]
    to_step, to_loss = line_through(x_ticks, "x"), line_through(y_ticks, "y")
    (points,) = drawn["lines"]
    assert [to_step(x) for x, _ in points] == pytest.approx(range(1, 32), abs=0.02)
    losses = [line["loss"] for line in lines]
    assert [to_loss(y) for _, y in points] == pytest.approx(losses, abs=0.01)


def test_a_job_is_hidden_and_the_view_stays_when_the_page_is_loaded_again(browser):
    item = browser()
    assert item.run("charts[0].svg.querySelectorAll('path.line').length") == 3
    item.run("document.querySelector('#chips button').click()")
    item.run("document.querySelector('[data-axis=tokens]').click()")
    item.run("document.getElementById('log-y').click()")
    item.run("document.getElementById('smooth').value = 5")
    item.run("document.getElementById('smooth').dispatchEvent(new Event('input'))")
    item.run("document.querySelector('#step').value = 13")
    item.run("document.querySelector('#step').dispatchEvent(new Event('change'))")
    item.run("charts[0].svg.scrollIntoView({block: 'center'})")
    drag(item, 0.25, 0.5)
    before = item.run("({...view})")
    assert before["x"] == "tokens" and before["logY"] and before["smooth"] == 5
    assert before["off"] == ["plain"] and before["step"] == 13
    low, high = before["zoom"]
    assert low / high == pytest.approx(0.5, abs=0.05)
    assert item.run("charts[0].svg.querySelectorAll('path.line').length") == 2
    item.send("Page.reload")
    item.wait("window.view === undefined && document.readyState === 'complete'")
    after = item.run("({...view})")
    assert {**after, "step": int(after["step"])} == before
    assert item.run("document.getElementById('samples').textContent").count("at 13") == 3
    # A double click shows all again.
    item.run("charts[0].svg.dispatchEvent(new MouseEvent('dblclick'))")
    assert item.run("view.zoom") is None
    assert item.run("document.getElementById('reset').hidden")


def drag(item, start, end):
    """Drags with the mouse over the first chart, between shares of its axis."""
    box = item.run(
        "(() => { const {x, y} = charts[0].svg.getBoundingClientRect();"
        "return [x + EDGE.left, x + charts[0].right, y + 100]; })()"
    )
    left, right, y = box
    xs = [left + share * (right - left) for share in (start, (start + end) / 2, end)]
    for kind, x in zip(("mousePressed", "mouseMoved", "mouseReleased"), xs, strict=True):
        item.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def test_pointing_at_a_step_tells_its_values(browser, jobs):
    item = browser()
    item.run("charts[0].svg.scrollIntoView({block: 'center'})")
    item.run("change({ off: JOBS.map((job) => job.name).filter((name) => name[0] !== 'a') })")
    x, y = item.run(
        "(() => { const {x, y} = charts[0].svg.getBoundingClientRect();"
        "return [x + charts[0].toX(12), y + 100]; })()"
    )
    item.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    told = item.run("charts[0].tip.innerText")
    (name,) = [name for name in jobs if name.startswith("a-name")]
    loss = training_lines(37, 2)[11]["loss"]
    assert told.startswith("step 12") and f"{loss:.5g}".rstrip("0") in told and name[:20] in told


def test_a_spike_of_a_single_step_among_thousands_reaches_the_edge(browser):
    item = browser(address="#off=empty")
    item.run("change({ off: JOBS.slice(1).map((job) => job.name), cut: false })")
    highest = item.run(
        "Math.min(...charts[0].svg.querySelector('path.range').getAttribute('d')"
        ".match(/ [0-9.]+/g).map(Number))"
    )
    # The infinity; and 90 is a tick of the axis' upper half.
    assert highest == 8
    ticks = item.run("[...charts[0].svg.querySelectorAll('text')].map((node) => node.textContent)")
    assert {"80"} <= set(ticks) or {"75"} <= set(ticks)
    assert item.run("charts[0].svg.querySelectorAll('path.spikes').length") == 1


def test_the_open_page_of_a_job_that_trains_shows_the_newest_and_rests_at_its_end(
    browser, tmp_path
):
    job = written_job(tmp_path / "job", training_lines(7))
    file = tmp_path / "live.html"
    file.write_text(page_of({"job": job}, reload_seconds=0.2))
    item = browser()
    item.open(file.as_uri() + "#logy=")
    item.wait("JOBS[0].last_step === 7 && view.logY")
    with job.metrics_jsonl.open("a") as more:
        more.write("".join(map(json_line, training_lines(13)[7:])))
    file.write_text(page_of({"job": job}))
    deadline = time.monotonic() + 20
    while item.run("typeof JOBS === 'undefined' ? 0 : JOBS[0].last_step") != 13:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert item.run("view.logY && doc.reload_seconds === null")


def test_the_page_of_files_of_nonsense_has_no_error(browser, tmp_path):
    for seed in range(12):
        jobs = {"nonsense": nonsense_job(tmp_path / str(seed), seed)}
        if not JobReader("job", jobs["nonsense"]).read(100).last_step:
            continue
        item = browser(of=page_of(jobs), address="#logx=&logy=&smooth=7&x=hours")
        item.run("charts.forEach((chart) => { chart.isSeen = true }); drawAll()")
        item.run("change({ logX: false, logY: false, cut: false, x: 'steps' })")
        item.run("charts.forEach((chart) => chart.tell(3, 100))")
        assert item.complaints == [], seed


def test_without_a_script_the_losses_are_there(jobs):
    text = page_of(jobs)
    (losses,) = re.findall(r"<noscript>(.*?)</noscript>", text, re.DOTALL)
    assert losses.count("<svg") == 3 and "<script" not in losses and "<img" not in losses


def test_a_notebook_shows_the_page_in_a_frame(browser, jobs, tmp_path):
    report = praxis_lite.report(*(job.path for job in jobs.values()))
    frame = report._repr_html_()
    # So that the test can look into it; a notebook's frame keeps its scripts to itself.
    frame = frame.replace('"allow-scripts"', '"allow-scripts allow-same-origin"')
    file = tmp_path / "notebook.html"
    file.write_text(f"<!DOCTYPE html><body>{frame}</body>")
    item = browser()
    item.complaints.clear()
    item.open(file.as_uri())
    item.wait("frames[0].document.querySelector('path.line')")
    item.run("frames[0].document.querySelector('#chips button').click()")
    assert item.run("frames[0].document.querySelectorAll('#chips [aria-pressed=false]').length")
    assert [words for words in item.complaints if "sandboxing" not in words] == []


def test_a_change_of_hands_is_told_where_the_curve_is_pointed_at(browser, tmp_path):
    elastic = [change_line(1, "start", 0, 8), change_line(2, "died", 11, 7)]
    elastic[1]["why"] = HOSTILE
    job = written_job(
        tmp_path / "job",
        training_lines(37),
        elastic=elastic,
        certificates=[certificate_line(5), certificate_line(15, {"cause": HOSTILE})],
    )
    item = browser(of=page_of({"job": job}))
    for step, is_told in ((11, True), (25, False)):
        item.run(f"charts[0].tell({step}, charts[0].toX({step}))")
        told = item.run("charts[0].tip.innerText")
        assert (HOSTILE in told) == ("7 devices" in told) == ("notice 1 s" in told) == is_told
    kinds = ["regroupings", "certified", "differences", "devices"]
    assert all(item.run(f"charts[0].svg.querySelectorAll('path.{kind}').length") for kind in kinds)
    assert item.run("document.title") != "stolen" and item.complaints == []
    texts = item.run("[...document.querySelectorAll('.num-devices')].map((x) => x.textContent)")
    assert texts == ["8", "7"]
