"""What the pages say of the code, where the code can be asked: numbers, flags, files, absences."""

import argparse
import inspect
import re
from pathlib import Path

import praxis_lite as pl
from praxis_lite import main
from praxis_lite.core import MeshConfig, Partitioner, task
from praxis_lite.core.learner import learner
from praxis_lite.core.partitioner.compiler_options import init_options
from praxis_lite.core.sharding import mesh
from praxis_lite.experiment import experiment
from praxis_lite.huggingface import family
from praxis_lite.inputs.text.length_classes import SHORTEST
from praxis_lite.modes.options import parser_of
from praxis_lite.trainer.metrics import progress
from praxis_tools.serve import endpoints, engine, requests, served_model
from praxis_tools.serve.mode import Serve
from tests.clusters.test_queued_resources import DOCKER
from tests.clusters.test_slurm import SBATCH
from tests.support.goldens import GOLDENS
from tests.test_import_direction import ORDERS

ROOT = Path(__file__).parents[2]
LIBRARY = [ROOT / "praxis_lite", ROOT / "praxis_tools"]
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
# It names what Pax has.
OF_OURS = [name for name in PAGES if name != "coming_from_pax.md"]
ARCHITECTURE, FROM_PAX = PAGES["architecture.md"], PAGES["coming_from_pax.md"]
PARSER = parser_of("train", main.MODES["train"], main.MODES)
FLAGS = {flag for action in PARSER._actions for flag in action.option_strings}
FILES = [path for folder in LIBRARY for path in folder.rglob("*.py")]
MODULES = {path.stem for path in FILES} | {
    path.parent.name for path in FILES if path.name == "__init__.py"
}
# Of pip, pytest, tensorboard, XLA, of modules with command lines of their own, and of an example.
OTHERS_FLAGS = {
    "--largest",
    "--no-deps",
    "--wheel-dir",
    "--dist",
    "--logdir",
    # lm_eval's.
    "--model",
    "--model_args",
    "--tasks",
    "--apply_chat_template",
    "--include_path",
    # vLLM's.
    "--served-model-name",
    "--dtype",
    "--max-model-len",
    "--max-num-seqs",
    "--generation-config",
    "--api-key",
    "--enable-lora",
    "--lora-modules",
    # sbatch's.
    "--array",
    # pip's.
    "--no-build-isolation",
    "--target",
}


def number(page, pattern):
    return int(re.search(pattern, " ".join(page.split()))[1].replace(",", ""))


def test_numbers_in_the_pages_are_those_of_the_code():
    alone = mesh.make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1)))
    level = init_options(alone)["xla_backend_optimization_level"]
    assert number(ARCHITECTURE, r"LLVM optimization level (\d+)") == level
    most = number(ARCHITECTURE, r"as many devices as the mesh has, at most (\d+)")
    assert most == mesh.MAX_SIMULATED_DEVICES
    assert "about twenty lines a run" in PAGES["python.md"] and progress.LINES_PER_RUN == 20


def test_every_flag_that_a_page_names_exists():
    texts = [text for path in FILES if "add_argument" in (text := path.read_text())]
    texts += [path.read_text() for path in (ROOT / "Makefile", ROOT / "tests/support/api_page.py")]
    for folder in ("benchmarks", "tests/faults", "tests/tools/certificates"):
        texts += [path.read_text() for path in (ROOT / folder).glob("*.py")]
    exist = FLAGS | {flag for text in texts for flag in re.findall(r'"(--[\w-]+)"', text)}
    unknown = {page: flags_of(page) - exist for page in OF_OURS}
    assert {page: flags for page, flags in unknown.items() if flags} == {}


def flags_of(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", PAGES[page])) - OTHERS_FLAGS
    named -= {f"--{name}" for name in (*SBATCH, *DOCKER)} if page == "clusters.md" else set()
    return {flag for flag in named if not flag.startswith("--xla_")}


def test_what_has_no_counterpart_here_has_none():
    exists = FLAGS | {f"--{name}" for name in MODULES}
    exists |= {f"--{name}" for name in experiment.RunConfig.__annotations__}
    for owner in (learner.Learner, task.Task):
        exists |= {f"--{name}" for name in inspect.signature(owner).parameters}
    rows = [line.strip("| ").split(" | ") for line in FROM_PAX.splitlines() if line[:2] == "| "]
    absent = [row[0] for row in rows if len(row) > 1 and row[1].strip() == "none"]
    assert len(absent) > 8
    for cell in absent:
        for name in re.findall(r"`([^`]+)`", cell):
            flag, _, value = name.partition("=")
            flag = f"--{flag.lstrip('-').split('.')[-1]}"
            if value and flag == "--mode":
                assert value not in main.MODES, f"{name} is said to be absent"
                continue
            # `--restore_checkpoint_step` is called `--step` here.
            last = f"--{flag.rpartition('_')[2].lstrip('-')}"
            is_flag = "_" in flag and last in FLAGS - {"--mode", "--port"}
            assert flag not in exists and not is_flag, f"{name} is said to be absent"
    section = FROM_PAX.split("## Absent features")[1].split("\n## ")[0]
    absent = {one.strip().removeprefix("several ") for one in re.split(",| and ", section.lower())}
    assert "`sub_experiments`" in absent and not absent & MODULES


def test_the_partitioners_there_are_stand_beside_paxs():
    kinds = {Partitioner, *Partitioner.__subclasses__()}
    (row,) = [line for line in FROM_PAX.splitlines() if line.startswith("| `PjitPartitioner`")]
    # Another one is a former name.
    local = {kind.__name__ for kind in kinds if kind.__module__.startswith("praxis_lite.core.")}
    assert set(re.findall(r"`(\w*Partitioner)`", row)) - {"PjitPartitioner"} == local


def drawn_house():
    """Returns the paths of the drawing in docs/architecture.md, as its indentation nests them."""
    paths, parents = [], []
    block = ARCHITECTURE.split("## Two packages")[1].split("```")[1]
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if line and depth <= 4:  # What is further in goes on with a line's text.
            parents = parents[:depth]
            for name in re.findall(r"[\w.]+", line.strip().split("  ")[0]):
                paths.append("/".join([*parents, name]))
            parents.append(paths[-1].rpartition("/")[2])
    return paths


def test_every_file_of_the_house_exists_and_every_package_has_its_line():
    drawn = drawn_house()
    assert not {path for path in drawn if not (ROOT / path).exists()}
    packages = {path.parent for path in FILES if path.name == "__init__.py"} - {*LIBRARY}
    modules = {path for path in FILES if path.parent in LIBRARY and path.name != "__init__.py"}
    assert not {str(path.relative_to(ROOT)) for path in packages | modules} - set(drawn)


def test_every_file_that_the_architecture_names_exists():
    named = set(re.findall(r"[\w/]+/[\w/]*\.py|\b[a-z_]+/(?:[a-z_]+/)*(?=`)", ARCHITECTURE))
    assert len(named) > 10
    places = (ROOT, *LIBRARY)
    assert not {name for name in named if not any((place / name).exists() for place in places)}


def test_every_file_of_ours_that_a_page_names_exists():
    folders = "praxis_lite|praxis_tools|tests|tasks|experiments|examples|benchmarks|docs"
    named = {
        (page, name)
        for page in OF_OURS
        for name in re.findall(rf"`((?:{folders})/[\w./]*)`", PAGES[page])
    }
    assert len(named) > 20 and not {pair for pair in named if not (ROOT / pair[1]).exists()}


def test_the_import_order_is_the_one_that_a_test_holds():
    block = ARCHITECTURE.split("### Import order")[1].split("```")[1]
    drawn = {
        section.split()[0]: [set(line.split()) for line in section.splitlines()[1:]]
        for section in block.strip().split("\n\n")
    }
    for package in ("praxis_lite", "praxis_lite/core", "praxis_tools"):
        assert drawn[package] == list(ORDERS[package])
    of_layers = [
        {name for name in line if (ROOT / "praxis_lite/layers" / name).is_dir()}
        for line in ORDERS["praxis_lite/layers"]
    ]
    assert drawn["praxis_lite/layers"] == [line for line in of_layers if line]


def test_every_link_within_a_page_has_its_heading():
    for page, text in PAGES.items():
        anchors = {
            re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", text, re.M)
        }
        assert set(re.findall(r"\]\(#(.*?)\)", text)) <= anchors, page


def test_the_python_page_has_each_argument_and_each_member_of_a_trained_model():
    for name in ("train", "explain", "plan", "check", "report"):
        parameters = inspect.signature(getattr(pl, name)).parameters
        assert [word for word in parameters if word not in PAGES["python.md"]] == []
    members = [name for name in vars(pl.TrainedModel) if not name.startswith("_")]
    found = [name for name in members if f"`{name}" not in PAGES["python.md"]]
    assert {name.removesuffix("_with") for name in found} <= {"mdl_vars"}


def test_the_table_of_hugging_face_has_every_family():
    rows = re.findall(r"^\| ([A-Z][^|]*) \| [\d.]+e-6 \|", PAGES["huggingface.md"], re.MULTILINE)
    tables = [
        x for x in (Path(family.__file__).parent / "families").glob("*.toml") if x.stem != "common"
    ]
    assert len(rows) == len(tables) == len(list((GOLDENS / "hf").iterdir()))


def test_the_serving_page_has_each_field_of_a_request_and_the_numbers_of_the_code():
    page = PAGES["serving.md"]
    fields = {*requests._COMPLETION, *requests._CHAT}
    assert not {field for field in fields if f"`{field}`" not in page}
    parser = argparse.ArgumentParser()
    Serve().add_options(parser)
    for name in ("num_rows", "max_queue", "request_seconds", "drain_seconds"):
        assert f"`--{name}={parser.get_default(name):g}`" in page
    for words in (
        f"at most {served_model.DEFAULT_MAX_LENGTH})",
        f"powers? of two from {SHORTEST} on",
        f"up to {requests.MAX_CHOICES} of either",
        f"up to {requests.MAX_STOPS} texts",
        f"has {requests.COMPLETION_TOKENS} unless",
        f"up to {requests.MAX_LOGPROBS} tokens",
        f"at most {engine.STEPS_BETWEEN_CHECKS} steps",
        f"{endpoints.MAX_BODY_BYTES >> 20} MiB, in {endpoints.BODY_SECONDS:g} s",
    ):
        assert re.search(words.replace(")", r"\)"), page), words
