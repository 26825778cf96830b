"""Runs a small job, or features with optional dependencies, without the optional packages.

    python -m tests.support.plain_program DIRECTORY job|features

It runs in a separate process, in which the packages have not been imported. With `job`, it trains,
evaluates and decodes a small `lm.PyDocs`, and starts two jobs that require a package. With
`features`, it prints `FEATURE: MESSAGE` for each feature that requires a package.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.optional_packages import PACKAGES
from tests.support.goldens import GOLDENS

ONE_DEVICE = "mesh.ici_mesh_shape=1,1,1"
SMALL = [
    ONE_DEVICE,
    "run.num_train_steps=2",
    "task.model.num_layers=1",
    "datasets.train.seq_len=16",
    "datasets.heldout.seq_len=16",
    "datasets.heldout.stride=None",
    "run.evaluation.max_batches=1",
    "task.decoder.max_decode_steps=3",
]


class Without:
    """A module finder that hides some packages, as if they were not installed."""

    def __init__(self, finder: Any, packages: set[str]):
        self.finder, self.packages = finder, packages

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname in self.packages:
            return None
        return self.finder.find_spec(fullname, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def features(folder: Path) -> dict[str, Callable[[], object]]:
    """Returns functions that require a package, by name; they use files created in `folder`."""
    from flax import nnx

    from praxis_lite.experiments import vision
    from praxis_lite.huggingface.model import load
    from praxis_lite.inputs import (
        ArrayRecords,
        FromDataset,
        ImageFiles,
        Tfds,
        TfRecords,
    )
    from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
    from praxis_lite.inputs.tokenizers.loading import load_tokenizer
    from praxis_lite.inputs.tokenizers.training import train_tokenizer
    from praxis_lite.layers.whole_model.quantization import quantized
    from praxis_lite.modes.mode import CommandLine
    from praxis_tools.lm_eval import harness_model
    from praxis_tools.lm_eval.program import LmEval
    from praxis_tools.plan.search.search_report import plot_plans
    from praxis_tools.plan.topology import topology_of
    from praxis_tools.serve.mode import Serve
    from praxis_tools.sweep.study import Study

    def file(name: str, content: bytes = b"\0" * 64) -> str:
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    texts, pieces = file("a.txt"), Path(file("pieces/tokenizer.model"))
    return {
        "tokenizer.json": lambda: load_tokenizer(GOLDENS / "tokenizers/llama3").vocab_size,
        "tokenizer.model": lambda: load_tokenizer(pieces.parent).vocab_size,
        "training a tokenizer": lambda: train_tokenizer(texts, folder / "tokenizer", 300),
        "a chat template": lambda: ChatTemplate("{{ messages }}").render([]),
        "TfRecords": lambda: TfRecords(file("a.tfrecord")).check(),
        "ImageFiles": lambda: ImageFiles(file("cats/a.png")).check(),
        "Tfds": lambda: Tfds(str(folder), "train").check(),
        "ArrayRecords": lambda: ArrayRecords(file("a.array_record")).check(),
        "FromDataset": lambda: FromDataset(dict, 2).check(),
        "quantized": lambda: quantized(model=nnx.Linear, rules=[], rngs=nnx.Rngs(0)),
        "load of Hugging Face": lambda: load(GOLDENS / "hf/llama"),
        "the picture of a search": lambda: plot_plans([], None, folder / "pareto.png"),
        "--topology": lambda: topology_of("v5e:2x4"),
        "vision.digits": lambda: vision.digits("train"),
        "harness_model": lambda: harness_model(None),
        "the command of lm_eval": lambda: LmEval().run(LmEval().parse([])),
        "praxis sweep": lambda: Study(folder / "sweep.journal"),
        "praxis serve": lambda: Serve().run(CommandLine(), step=None, hf=None),
    }


def main(folder: Path, what: str) -> None:
    """Runs one part of the script."""
    refused = {*PACKAGES} - {"datasets", "pyarrow"}
    sys.meta_path[:] = [Without(finder, refused) for finder in sys.meta_path]
    if what == "job":
        run_jobs(folder)
        return
    for name, feature in features(folder).items():
        try:
            print(f"{name}: {feature()}")
        except ConfigError as error:
            print(f"{name}: {error}")


def run_jobs(folder: Path) -> None:
    """Trains, evaluates and decodes, and starts two jobs that require a package."""
    from praxis_lite.main import main as praxis_lite

    job = f"--job_log_dir={folder / 'job'}"
    for words in (["--exp=lm.PyDocs", "--set", *SMALL], ["--mode=eval"], ["--mode=decode"]):
        print("STATUS", praxis_lite([*words, job]))
    tokenizer = f"corpus.tokenizer={GOLDENS / 'tokenizers/llama3'}"
    for words in (["--exp=lm.PyDocs", "--set", tokenizer], ["--exp=vision.DigitsResNet", "--set"]):
        try:
            praxis_lite([f"--job_log_dir={folder / 'other'}", *words, ONE_DEVICE])
        except SystemExit as status:
            print("STATUS", status.code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
