"""--mode=certify: the facts of a job as one JSON and one page, and what verifying it finds."""

import contextlib
import hashlib
import io
import json
import shutil

import jax
import pytest

from praxis_lite.checkpoints.digest import digest_of
from praxis_lite.config.config_json import dump_config
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.experiment.registry import get_experiment
from praxis_lite.job.job_dir import JobDir
from praxis_lite.main import main
from praxis_tools.goodput.spans import THE_END, Span
from praxis_tools.report.certified.job_files import JobFiles
from tests.support.job_runs import succeed
from tests.support.line_jobs import LINE
from tests.support.written_jobs import certificate_line, change_line


def certify(*argv):
    """Returns exit status, output and errors of a command line."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["--mode=certify", "--packages=jobzoo", *map(str, argv)])
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), " ".join(err.getvalue().split())


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A job that was rolled back from a spike, and its certificate."""
    folder = tmp_path_factory.mktemp("certified")
    job = JobDir(folder / "job")
    succeed(LINE, f"--job_log_dir={job.path}")
    for file, lines in (
        (job.elastic_jsonl, [change_line(1, "start", 0, 2), change_line(2, "died", 7, 4)]),
        (job.certificates_jsonl, [certificate_line(5), certificate_line(20)]),
    ):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = folder / "certificate.json"
    actual = certify(job.path, f"--json={file}", f"--html={folder / 'page.html'}")
    assert actual[0] == 0, actual
    return job, file, folder / "page.html", actual[1]


@pytest.fixture
def job(original, tmp_path):
    return JobDir(shutil.copytree(original[0].path, tmp_path / "elsewhere"))


def facts_in(file):
    (job,) = json.loads(file.read_text())["jobs"]
    return {f"{fact['section']}: {fact['name']}": fact for fact in job["facts"]}


def verify(original, job, *argv):
    """Returns the exit status of verifying, and the verdict on each fact by its title."""
    status, out, err = certify(job.path, f"--verify={original[1]}", *argv)
    assert err == ""
    lines = [line.removeprefix("job: ").split(": ", 2) for line in out.splitlines()]
    return status, {": ".join(line[:2]): " ".join(line[2:]) for line in lines if len(line) > 1}, out


def test_a_certificate_has_what_the_files_have(original):
    job, file, page, out = original
    document, facts = json.loads(file.read_text()), facts_in(file)
    config = hashlib.sha256(job.config_json.read_bytes()).hexdigest()
    assert facts["config: config.json"]["value"] == config
    assert facts["config: experiment"]["value"] == "jobzoo.lines.Line"
    (versions,) = facts["versions: by their first step"]["value"]
    assert versions["from_step"] == 1 and versions["jax"] == jax.__version__
    assert {"python", "numpy", "praxis_lite"} < versions.keys()
    on_record = facts["examples: on record"]["value"]
    assert on_record["last_step"] == 29
    assert on_record["skipped_batches"] == [15]
    assert facts["examples: recomputed"]["value"] == {"digest": on_record["digest"]}
    assert facts["losses: steps and losses"]["value"]["num"] == 29
    for step in (21, 28, 29):
        assert facts[f"checkpoints: step {step}"]["value"] == digest_of(job.checkpoints / str(step))
    assert facts["step certificates: certificates.jsonl"]["value"]["lines"] == 2
    digest = hashlib.sha256(job.elastic_jsonl.read_bytes()).hexdigest()
    assert facts["regroupings: elastic.jsonl"]["value"]["sha256"] == digest
    own = document.pop("sha256")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert own == hashlib.sha256(text.encode()).hexdigest()
    html = page.read_text()
    assert own in html and "<script" not in html and "<svg" in html and "died: process 3" in html
    assert out.count(on_record["digest"]) == 2 and "no faults were found" in out


def test_a_copy_elsewhere_is_the_same_in_every_line(original, job):
    status, verdicts, out = verify(original, job)
    assert status == 0, out
    assert out.startswith("the certificate's own digest: same\n") and out.endswith("16 same\n")
    assert len(verdicts) == 16


@pytest.mark.slow
def test_a_job_that_went_on_is_still_the_job_of_its_certificate(original, job):
    argv = ("run.num_train_steps=31", "mesh.ici_mesh_shape=(1, 1, 2)")
    succeed(LINE, f"--job_log_dir={job.path}", "--set", *argv)
    with job.elastic_jsonl.open("a") as file:
        file.write(json.dumps(change_line(3, "left", 29, 2)) + "\n")
    status, verdicts, out = verify(original, job)
    # The config says more steps and another mesh; the oldest checkpoint is no longer kept.
    assert status == 1
    differing = {title for title, words in verdicts.items() if words.startswith("DIFFERS")}
    assert differing == {"config: config.json"}, out
    unknown = {title for title, words in verdicts.items() if words.startswith("cannot")}
    assert unknown == {"checkpoints: step 21"}, out


def flip(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def damage_checkpoint(job):
    path = next((job.checkpoints / "29").rglob("d/*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_config(job):
    flip(job.config_json, "jobzoo.lines", "jobzoo.lime")


def change_examples(job):
    path = job.examples / "0.jsonl"
    last = path.read_text().splitlines()[-1]
    flip(path, last, last.replace(json.loads(last)["digest"], "0" * 16))


def change_loss(job):
    flip(job.metrics_jsonl, '"loss": ', '"loss": 1')


def regroup(job):
    flip(job.elastic_jsonl, "died", "left")


def change_certificate(job):
    flip(job.certificates_jsonl, "00005", "00006")


@pytest.mark.parametrize(
    "tamper, title",
    [
        (change_loss, "losses: steps and losses"),
        (change_config, "config: config.json"),
        (change_examples, "examples: on record"),
        (regroup, "regroupings: elastic.jsonl"),
        (change_certificate, "step certificates: certificates.jsonl"),
        (damage_checkpoint, "checkpoints: step 29"),
    ],
)
def test_what_was_changed_differs(original, job, tamper, title):
    tamper(job)
    status, verdicts, out = verify(original, job)
    assert status == 1 and verdicts[title].startswith("DIFFERS"), out


def test_other_data_differ_and_data_that_are_not_there_cannot_be_made_again(original, job):
    status, verdicts, out = verify(original, job, "--set", "datasets.train.poisoned=(3,)")
    assert status == 1 and verdicts["examples: recomputed"].startswith("DIFFERS"), out
    status, verdicts, out = verify(original, job, "--recorded_only")
    assert status == 0, out
    assert verdicts["examples: recomputed"].startswith("cannot be recomputed here")
    assert verdicts["examples: on record"] == "same"


def test_the_last_line_of_a_running_launch_is_not_certified(job, tmp_path):
    closed = job.timeline_jsonl.read_bytes()
    with job.timeline_jsonl.open("a") as file:
        file.write(Span(1e9, 29, 29, {"step": 1.0}).line())  # It will be rewritten.
    file = tmp_path / "certificate.json"
    assert certify(job.path, f"--json={file}", "--recorded_only")[0] == 0
    assert facts_in(file)["time: timeline.jsonl"]["value"]["bytes"] == len(closed)


@pytest.mark.parametrize("ended_by, lacks", [(THE_END, True), ("SIGTERM", False), (None, False)])
def test_a_launch_that_ended_has_evaluated_its_last_step(tmp_path, ended_by, lacks):
    job = JobDir(tmp_path)
    settings = ["run.num_train_steps=9", "run.evaluation.every_steps=7"]
    config = configured(get_experiment("lm.PyDocs"), settings)
    job.config_json.write_text(dump_config(config, "praxis_lite.experiments.lm.PyDocs"))
    spans = [Span(1e9, 0, 3, {}, "SIGTERM" if lacks else THE_END), Span(1e9, 3, 7, {}, ended_by)]
    job.timeline_jsonl.write_text("".join(span.line() for span in spans))
    faults = list(JobFiles(job, step=7, newest_step=7).faults_of_evaluations())
    assert faults == ["eval_metrics.jsonl lacks evaluations of the steps 7"] * lacks


def test_a_certificate_that_was_changed_says_so_itself(original, tmp_path):
    job, file, *_ = original
    other = tmp_path / "other.json"
    other.write_text(file.read_text().replace('"last_step": 29', '"last_step": 28', 1))
    status, out, _ = certify(job.path, f"--verify={other}")
    assert status == 1 and out.startswith("the certificate's own digest: DIFFERS")


def test_a_step_certificate_with_a_difference_fails_the_job(job):
    lines = [certificate_line(5), certificate_line(20, {"cause": "device", "leaf": "w"})]
    job.certificates_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, _ = certify(job.path, "--recorded_only")
    assert status == 1 and "WRONG: step 20 is not certified: cause device, leaf w" in out


def missing(path):
    path.unlink()


def cut_short(path):
    content = path.read_bytes()
    path.write_bytes(content[: 2 * len(content) // 3])


def damaged(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4] = b"\0\xff\0\xff"
    path.write_bytes(content)


@pytest.fixture(scope="module")
def evidenced(tmp_path_factory):
    """A job that was evaluated, has step certificates and a tokenizer; and its certificate."""
    folder = tmp_path_factory.mktemp("evidenced")
    job = JobDir(folder / "job")
    succeed("--exp=jobzoo.lines.Evidenced", f"--job_log_dir={job.path}")
    file = folder / "certificate.json"
    actual = certify(job.path, f"--json={file}", "--recorded_only")
    assert actual[0] == 0, actual
    return job, file


# The last two files were added by hand, so only the certificate records them.
BY_HAND = ("elastic.jsonl", "certificates.jsonl")
FILES = [
    *("config.json", "layout.json", "metrics.jsonl", "timeline.jsonl", "examples/0.jsonl"),
    *("checkpoints/29/manifest.json", "checkpoints/29/commit.json", *BY_HAND),
]
MORE_FILES = [
    *("eval_metrics.jsonl", "certificates.jsonl", "tokenizers/0/tokenizer.json"),
    *("tokenizers/0/came_from.txt", "checkpoints/8/manifest.json"),
]
HARMS = [missing, cut_short, damaged]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", FILES)
def test_each_file_that_is_missing_or_damaged_is_wrong_and_differs(original, job, file, harm):
    harm(job.path / file)
    status, out, err = certify(job.path, f"--verify={original[1]}", "--recorded_only")
    assert status != 0, out
    status, out, err = certify(job.path, "--recorded_only")
    assert (status != 0) == (file not in BY_HAND or harm is not missing), out
    assert status != 1 or "WRONG" in out


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", MORE_FILES)
def test_so_is_each_file_of_a_job_with_all_evidence(evidenced, tmp_path, file, harm):
    job = JobDir(shutil.copytree(evidenced[0].path, tmp_path / "elsewhere"))
    harm(job.path / file)
    status, out, _ = certify(job.path, "--recorded_only")
    assert status != 0, out
    status, out, _ = certify(job.path, f"--verify={evidenced[1]}", "--recorded_only")
    assert status != 0, out


@pytest.mark.slow
@pytest.mark.parametrize("start, lost", [(3, ["4"]), (4, [])])
def test_each_step_after_the_start_of_the_newest_launch_needs_its_certificate(
    evidenced, tmp_path, start, lost
):
    job = JobDir(shutil.copytree(evidenced[0].path, tmp_path / "elsewhere"))
    lines = job.certificates_jsonl.read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [4, 8]
    job.certificates_jsonl.write_text(lines[1])
    files = JobFiles(job, step=8, newest_step=8, packages=("jobzoo",), start=start)
    named = [fault.rsplit(" ", 1)[1] for fault in files.faults_of_certificates()]
    assert named == lost


@pytest.mark.slow
def test_a_job_with_all_evidence_is_the_same_elsewhere_and_when_it_was_evaluated_later(
    evidenced, tmp_path
):
    job = JobDir(shutil.copytree(evidenced[0].path, tmp_path / "elsewhere"))
    succeed("--mode=eval", f"--job_log_dir={job.path}")
    status, out, _ = certify(job.path, f"--verify={evidenced[1]}")
    assert status == 0 and "DIFFERS" not in out, out


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "praxis report JOB"),
        (["{job}", "--exp=lm.PyDocs"], "--exp"),
        (["{job}", "--verify={file}", "--json=x.json"], "--verify cannot be combined"),
        (["{job}", "{job}/nowhere", "--verify={file}"], "number of jobs is 2, but"),
        (["--verify={job}/config.json"], "is not a certificate"),
    ],
)
def test_errors_say_what_to_change(original, argv, words):
    job, file, *_ = original
    status, _, err = certify(*(item.format(job=job.path, file=file) for item in argv))
    assert status == 2 and words in err
