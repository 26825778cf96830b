"""Runs and times the thirty tasks in docs/first_day.md.

    python benchmarks/first_day.py                       # prints the page's table
    python benchmarks/first_day.py --write               # updates the page
    python benchmarks/first_day.py --folder=F --only=a   # uses folder F; only rows that contain "a"

Each row is a shell command, in which `praxis` runs `python -m praxis_lite`, or a few lines of
Python. The rows run in order in the same directory, each in a separate process, and may use files
from previous rows. First, `first_day_files.py` creates the user's files (texts, chats, a package, a
model and a Pax checkpoint). A row fails if its exit status or output is not as expected.
"""

import argparse
import dataclasses
import importlib.util
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import first_day_files  # noqa: E402

PAGE = ROOT / "docs/first_day.md"
PRAXIS = 'praxis() { python -m praxis_lite "$@"; }'
HEAD = "| task | command | seconds |"


@dataclasses.dataclass(frozen=True)
class Row:
    """A task on the page, and the commands for it.

    Attributes:
      want: What the user wants to do, in a few words.
      how: A shell command, or lines of Python that start with an import.
      needs: An optional package that the row requires.
      status: Expected exit status.
      found: Text that the output must contain.
    """

    want: str
    how: str
    needs: str | None = None
    status: int = 0
    found: str = ""

    @property
    def is_python(self) -> bool:
        return self.how.startswith("import ")


PL = "import praxis_lite as pl\n"
ROWS = [
    Row(
        "install, if the dependencies are installed",
        "pip install --no-deps --no-build-isolation --target installed REPOSITORY",
        found="Successfully installed",
    ),
    Row("list the experiments", "praxis list", found="lm.PyDocs"),
    Row(
        "train",
        "praxis train lm.Synthetic --job_log_dir=a --set run.num_train_steps=30",
        found="trained to step 30",
    ),
    Row(
        "resume, with more steps",
        "praxis train lm.Synthetic --job_log_dir=a --set run.num_train_steps=40",
        found="restored the checkpoint of step 30",
    ),
    Row(
        "resume on another mesh",
        "praxis train lm.Synthetic --job_log_dir=a --set run.num_train_steps=50 "
        "mesh.ici_mesh_shape=1,2,2",
        found="changed since the job was last run: mesh",
    ),
    Row(
        "change a setting",
        "praxis train lm.Synthetic --job_log_dir=b --set run.num_train_steps=50 "
        "task.learner.optimizer=lion task.learner.learning_rate=3e-4",
        found="trained to step 50",
    ),
    Row("see the result", "praxis summary a", found="heldout, step 50"),
    Row(
        "compare two runs, on a page",
        "praxis report a b --html=report.html",
        found="report.html",
    ),
    Row(
        "read the metrics in Python",
        f'{PL}job = pl.load("a")\n'
        'print(job.metrics["loss"][-1], job.evaluations["heldout"]["loss"])',
        found="[",
    ),
    Row("evaluate a checkpoint", "praxis eval a", found="heldout: accuracy"),
    Row("evaluate while a job trains", "praxis eval a --follow", found="heldout"),
    Row("list the checkpoints", "praxis checkpoints ls a", found="50"),
    Row(
        "train on your own text",
        "praxis train lm.PyDocs --job_log_dir=text --set 'corpus.files=texts/*.txt' "
        "run.num_train_steps=20 task.model.num_layers=2",
        found="trained to step 20",
    ),
    Row(
        "continue a prompt",
        'praxis decode text --prompt "The word "',
        found="decoded 1 record",
    ),
    Row(
        "the same in Python",
        f'{PL}print(pl.load("text").generate("The ", temperature=0.7))',
        found="continuation",
    ),
    Row(
        "train your own model and data in Python",
        f'{PL}job = pl.train("mymodel.experiments.Wave", "wave", packages=["mymodel"])\nprint(job)',
        found="step 150, loss",
    ),
    Row(
        "show what each device stores and sends",
        "praxis explain lm.Synthetic --html=explain.html",
        found="explain.html",
    ),
    Row(
        "predict memory, time and MFU on a pod",
        "praxis plan lm.Synthetic --topology=v5e:2x4",
        "libtpu",
        found="MFU",
    ),
    Row(
        "the same in Python",
        f'{PL}plan = pl.plan("lm.Synthetic", topology="cpu:8")\n'
        "print(plan.fits, plan.steps[0].peak_bytes_per_device)",
        found="True",
    ),
    Row(
        "check that a mesh computes what one device computes",
        "praxis check lm.Synthetic --meshes=1x2x1 --steps=1",
        found="certified",
    ),
    Row(
        "profile two steps",
        "praxis train lm.Synthetic --job_log_dir=profiled --set run.num_train_steps=12 "
        "run.profile.steps=8:10",
        found="measured/predicted",
    ),
    Row(
        "print the profile's table again",
        "praxis profile profiled",
        found="measured/predicted",
    ),
    Row(
        "find the operation that produced a NaN",
        "praxis train mymodel.broken.Broken --packages=mymodel --job_log_dir=nan --set "
        "run.debug_nans=true run.num_train_steps=3",
        status=3,
        found="broken.py",
    ),
    Row(
        "track in Weights & Biases",
        "WANDB_MODE=offline praxis train lm.Synthetic --job_log_dir=tracked --set "
        "run.num_train_steps=9 'run.trackers.wandb=WeightsAndBiases()' "
        "run.trackers.wandb.project=first",
        "wandb",
        found="trained to step 9",
    ),
    Row(
        "try several settings",
        "praxis sweep lm.Synthetic --job_log_dir=sweep --set run.num_train_steps=10 "
        "task.learner.learning_rate=1e-3,1e-2",
        "optuna",
        found="complete",
    ),
    Row(
        "run two processes, on one machine or on two",
        "praxis train lm.Synthetic --job_log_dir=two --coordinator=localhost:PORT "
        "--num_processes=2 --process_id=1 --set run.num_train_steps=9 & "
        "praxis train lm.Synthetic --job_log_dir=two "
        "--coordinator=localhost:PORT --num_processes=2 --process_id=0 --set run.num_train_steps=9 "
        "&& wait",
        found="trained to step 9",
    ),
    Row(
        "train a tokenizer",
        "praxis tokenizers train 'texts/*.txt' bpe --vocab-size=300",
        "tokenizers",
        found="bpe",
    ),
    Row(
        "fine-tune a Hugging Face model on chats",
        "praxis train huggingface.ChatLora --job_log_dir=chat --set HF_DIR=llama "
        "CHAT_FILES=chats.jsonl SEQ_LEN=64 BATCH_SIZE=8 task.learner.learning_rate=1e-2 "
        "run.num_train_steps=60",
        "safetensors",
        found="trained to step 60",
    ),
    Row(
        "chat with it",
        'praxis decode chat --chat --prompt "What comes after 4?"',
        "safetensors",
        found="comes",
    ),
    Row(
        "export it",
        "praxis hf export chat merged --adapters merge",
        "safetensors",
        found="wrote merged",
    ),
    Row(
        "evaluate it with lm-evaluation-harness",
        "praxis lm_eval --model praxis_lite --model_args pretrained=merged "
        "--include_path tasks --tasks what_comes_after",
        "lm_eval",
        found="what_comes_after",
    ),
    Row(
        "start from the weights of a Pax job",
        "praxis pax paxmodel.FromPax --packages=paxmodel --pax=pax --job_log_dir=from_pax",
        found="created",
    ),
]


def main() -> None:
    """Runs the rows, and prints or updates the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--only", default="", help="only run rows that contain this text")
    parser.add_argument("--folder", type=Path, help="folder to work in; existing files are reused")
    args = parser.parse_args()
    if args.write and args.only:
        parser.error("--only cannot be combined with --write, because the page contains all rows")
    rows = [row for row in ROWS if args.only in f"{row.want} {row.how}"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        if not folder.is_dir() or not any(folder.iterdir()):
            folder.mkdir(exist_ok=True)
            first_day_files.write(folder)
        lines = [f"| {row.want} | {shown(row)} | {seconds(row, folder)} |" for row in rows]
    table = "\n".join([HEAD, "| --- | --- | --- |", *lines])
    if args.write:
        before, _, old = PAGE.read_text("utf-8").partition(HEAD)
        _, _, after = old.partition("\n\n")
        PAGE.write_text(f"{before}{table}\n\n{after}", "utf-8")
    else:
        print(table)


def shown(row: Row) -> str:
    """Returns the text in the second cell of a row."""
    lines = row.how.splitlines()
    text = "<br>".join(f"`{line.strip()}`" for line in lines)
    return text.replace("|", "\\|")


def seconds(row: Row, folder: Path) -> str:
    """Returns a row's wall and CPU seconds as text, or "-" if a package is not installed.

    Raises:
      SystemExit: The row's exit status or output is not as expected.
    """
    if row.needs is not None and importlib.util.find_spec(row.needs) is None:
        print(f"{row.want}: skipped, because {row.needs} is not installed", file=sys.stderr)
        return "-"
    bin_folder = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{folder}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
    }
    words = row.how.replace("REPOSITORY", str(ROOT))
    words = words.replace("PORT", str(first_day_files.free_port()))
    command = (
        [sys.executable, "-c", words] if row.is_python else ["bash", "-c", f"{PRAXIS}\n{words}"]
    )
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode != row.status or row.found not in done.stdout:
        sys.exit(
            f"{row.want}: status {done.returncode}; expected {row.status} and {row.found!r} in\n"
            f"{done.stdout[-3000:]}"
        )
    print(f"{row.want}: {wall:.1f} s, {cpu:.1f} s of CPU time", file=sys.stderr, flush=True)
    return f"{wall:.0f} ({cpu:.0f})"


if __name__ == "__main__":
    main()
