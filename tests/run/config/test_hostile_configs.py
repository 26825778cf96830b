"""A job's config.json that means harm: refused in a sentence, before anything of it runs.

Each of the first cases leaves a file, called a canary here, where its code runs: the last tests
take the allow-list away and see every one of them.
"""

import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import fiddle as fdl
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.run.config.text import dump_config
from praxis_lite.run.experiment import registry

CHECKOUT = Path(__file__).parents[3]
SPIRALS = "praxis_lite.experiments.classify.Spirals"
PACKAGE = "open({!r}, 'w')\nx = dict\n"


def call(name, /, *items, **arguments):
    """Returns the config of a call, as text: `{c}` in it stands for the case's canary."""
    return {"Config": name, "arguments": {**dict(zip("0123", items, strict=False)), **arguments}}


MESH = "praxis_lite:MeshConfig"
RUNS = "open('{c}', 'w')"
CALLS = {
    "a command": call("os:system", command="touch {c}"),
    "the same, from where it is defined": call("posix:system", command="touch {c}"),
    "a command by a module that imports os": call(
        "praxis_lite.experiments.zebra:os.system", command="touch {c}"
    ),
    "a command that an allowed module imports": call(
        "praxis_lite.experiments.zebra:system", command="touch {c}"
    ),
    "a method of a class that it imports": call(
        "praxis_lite.experiments.zebra:Path.touch", self=call("pathlib:Path", "{c}")
    ),
    "a process": call("subprocess:run", args={"list": ["touch", "{c}"]}),
    "a shell": call("subprocess:getoutput", cmd="touch {c}"),
    "code": call("builtins:exec", RUNS),
    "an expression": call("builtins:eval", RUNS),
    "a file": call("builtins:open", file="{c}", mode="w"),
    "a script": call(
        "runpy:run_path", path_name="script.py", init_globals={"dict": [["c", "{c}"]]}
    ),
    "an import": call("importlib:import_module", name="zoo_import"),
    "a package on sys.path": {"name": "zoo_name:x"},
    "the experiment's own say": {"name": "zoo_own:x"},
    "numpy's files": call("numpy:save", file="{c}.npy", arr=7),
    "numpy's texts": call("numpy:savetxt", fname="{c}", X={"list": [7]}),
    "numpy's pickles": call("numpy:load", file="evil_{c}.npy", allow_pickle=True),
    "numpy's files, from where they are defined": call(
        "numpy.lib._npyio_impl:save", file="{c}.npy", arr=7
    ),
    "jax.numpy's files": call("jax.numpy:save", file="{c}.npy", arr=7),
    "jax.numpy's pickles": call("jax.numpy:load", file="evil_{c}.npy", allow_pickle=True),
    "a pickle": call("pickle:loads", {"bytes": "{p}"}),
    "a profile": call("jax.profiler:save_device_memory_profile", filename="{c}"),
    "a new job": call("praxis_lite.run.job.job_dir:open_for_training", path="{c}", experiment="x"),
    "a writer of lines": call("praxis_lite.run.trainer.metrics.json_lines:JsonLinesWriter",
                                path="{c}", resume_step=7),
    "a function that is called later": call(
        "praxis_lite.experiments.zebra:call",
        function={"functools.partial": "os:system", "items": ["touch {c}"], "arguments": {}},
    ),
    "a partial that is called later": call(
        "praxis_lite.experiments.zebra:call",
        function={"Partial": "os:system", "arguments": {"command": "touch {c}"}},
    ),
    "a path": call("pathlib:Path.touch", self=call("pathlib:Path", "{c}")),
    "a copy": call("shutil:copy", src="script.py", dst="{c}"),
    "an archive": call("zipfile:ZipFile", file="{c}", mode="w"),
    "a server": call(
        "praxis_lite.experiments.zebra:serve", file="{c}",
        socket=call("socket:create_server", address={"tuple": ["", 0]}),
    ),
    "fiddle's own": call("fiddle:build", buildable=call("os:system", command="touch {c}")),
    "a named tuple": {"namedtuple": "zoo_tuple:Point", "items": [7]},
}


def nested(depth):
    return functools.reduce(lambda node, _: {"list": [node]}, range(depth), 7)


def laughs(number):
    """Returns lists that each hold the one before twice."""
    node = {"list": [], "id": 0}
    for index in range(1, number):
        node = {"list": [node, {"again": index - 1}], "id": index}
    return node


def chained(number):
    """Returns lists side by side, each of which holds the one before."""
    first = {"list": [], "id": 0}
    return {"list": [first, *({"list": [{"again": i}], "id": i + 1} for i in range(number))]}


DAMAGED = {
    "a cycle": {"list": [{"again": 1}], "id": 1},
    "what comes later": {"list": [{"again": 1}, {"list": [], "id": 1}]},
    "what is not there": {"again": 7},
    "an id twice": {"list": [{"list": [], "id": 1}, {"list": [], "id": 1}]},
    "an id that is none": {"list": [], "id": True},
    "no kind": {},
    "an unknown kind": {"pickle": "gASV"},
    "fiddle's kind": {"type": "pyref", "module": "os", "name": "system"},
    "a list without kind": [7],
    "items that are none": {"list": 7},
    "pairs that are none": {"dict": [[7]]},
    "a name that is none": {"name": 7},
    "a name without module": {"name": "gelu"},
    "arguments that are none": {"Config": "optax:adam", "arguments": [7]},
    "no arguments": {"Config": "optax:adam"},
    "a key too many": {"list": [], "arguments": {}},
    "a slice of two": {"slice": [1, 2]},
    "a set of lists": {"set": [{"list": []}]},
    "a dtype of a gigabyte": {"dtype": "V1000000000"},
    "a dtype that is none": {"dtype": "zebra"},
    "a float that is none": {"float": "__import__('os')"},
    "bytes that are none": {"bytes": "zz"},
    "what is no class": {"Config": "jax.lax:Precision.HIGHEST", "arguments": {}},
    "what is no named tuple": {"namedtuple": "optax:adam", "items": []},
}
TOO_LARGE = {
    "deep": nested(200),
    "too deep for Python": nested(80),
    "a billion laughs": laughs(40),
    "a deep chain": chained(1_000),
    "too wide": {"list": [0] * 100_001},
}
REFUSED = {  # Names without a canary of their own.
    "what is not jitted": {"name": "jax.numpy:sum"},
    "what is no layer": {"name": "flax.linen:tabulate"},
    "a function of flax.nnx": {"name": "flax.nnx:display"},
    "a module": {"name": "jax.lax:linalg"},
    "a private one": {"name": "optax:_src.base.identity"},
    "a private module": {"name": "jax._src.nn.functions:gelu"},
    "a method": {"name": "praxis_lite.experiments.zebra:call.__init__"},
    "a global of a function": {"name": "praxis_lite.experiments.zebra:call.__globals__"},
    "an import of a module": {"name": "praxis_lite.experiments.zebra:os"},
    "a wide letter": {"name": "\uff4fs:system"},
    "an empty part": {"name": "experiments..zebra:call"},
    "a name with escapes": {"name": "\x1b[2Jos:\x1b]0;x\x07"},
    "a megabyte of name": {"name": "a." * 2**19 + "b:c"},
    "an argument that is not there": {"Config": "optax:adam", "arguments": {"a b": 7}},
    "what is not there": {"name": "praxis_lite.experiments.zebra:gone"},
    "a module that is not there": {"name": "praxis_lite.experiments.gone:x"},
}
CHILD = """
import contextlib, io, json, os, sys

from praxis_lite import main
import jax, optax, flax.linen, flax.nnx, praxis_lite.experiments

praxis_lite.experiments.__path__.append("home/experiments")
sys.path.append("home")
wanted, guarded = json.load(sys.stdin), sys.argv[1] == "guarded"
if not guarded:
    import importlib
    from praxis_lite.run.config import node_form, nodes, text

    def imported(module, name, *, is_called=False):
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    node_form.is_allowed = lambda module, name, packages: True
    nodes.imported = text.imported = imported

events = []

def hear(event, args):
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
    # A directory is asked whether it can be written by a nameless file in it.
    if writes and not os.path.isdir(args[0]) or event in (
        "os.system", "subprocess.Popen", "socket.bind", "socket.connect", "pickle.find_class"
    ):
        events.append([event, repr(args[0])[:99]])

sys.dont_write_bytecode = True  # Of the bait that may be imported.
sys.addaudithook(hear)
answers = {}
for case, folder in wanted.items():
    events.clear()
    before, out, err, code = set(sys.modules), io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.main(["--mode=eval", f"--job_log_dir={folder}"])
        except SystemExit as stop:
            code = stop.code
        except Exception as error:
            code = repr(error)
    modules = sorted(set(sys.modules) - before)
    answers[case] = {"code": code, "err": err.getvalue(), "out": out.getvalue(),
                     "modules": modules, "events": list(events)}
json.dump(answers, sys.stdout)
"""


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (self.canary, "w")


@functools.cache
def spirals():
    experiment = registry.get_experiment("classify.Spirals")
    return dump_config(experiment().config(), SPIRALS)


def config_text(task, experiment=SPIRALS):
    config = json.loads(spirals())
    config["experiment"], config["config"]["arguments"]["task"] = experiment, task
    return json.dumps(config)


def text_files():
    """Returns texts that are no config before it comes to names."""
    good = spirals()
    return {
        "nothing": "",
        "half": good[: len(good) // 2],
        "a list": "[]",
        "a list, deep": "[" * 100_000,
        "objects, deep": '{"a":' * 100_000,
        "a key twice": good.replace('"format": 3', '"format": 3, "format": 3'),
        "NaN": config_text(7).replace('"task": 7', '"task": NaN'),
        "an infinity": config_text(7).replace('"task": 7', '"task": 1e999'),
        "a number without end": config_text(7).replace('"task": 7', '"task": ' + "9" * 10_000),
        "fiddle's format": good.replace('"format": 3', '"format": 1'),
        "a format that is none": good.replace('"format": 3', '"format": {"a": "\\u001b[2J"}'),
        "no experiment": good.replace(SPIRALS, "\\u001b[2J"),
        "an experiment that is a number": good.replace(f'"{SPIRALS}"', "7"),
        "overrides that are none": good.replace('"overrides": []', '"overrides": {"a": 1}'),
        "another root": good.replace("praxis_lite:Job", "builtins:dict"),
        "a root that is a list": json.dumps({**json.loads(good), "config": {"list": []}}),
        "too large": good + " " * 2**24,
        "not UTF-8": good.replace("Spirals", "\udcff"),
        "a task that is none": config_text(7),
        "a mesh that is none": good.replace(MESH, "builtins:dict"),
        "a run that is none": good.replace("praxis_lite:RunConfig", "builtins:dict"),
        "a dataset above": good.replace('"heldout"', '"../../{c}"'),
        "a dataset that a terminal obeys": good.replace('"heldout"', '"\\u001b[2J"'),
        "a dataset from the root": good.replace('"heldout"', '"/tmp/{c}"'),
    }


def answers_of(folder, cases, guarded):
    """Returns the answer of `main` to each case, all in one process."""
    home = folder / "home"
    (home / "experiments").mkdir(parents=True)
    (home / "experiments/zebra.py").write_text(
        "import os\nfrom os import system\nfrom pathlib import Path\n\n"
        "def call(function): return function()\n"
        "def serve(socket, file): socket.close(); open(file, 'w')\n"
    )
    (folder / "script.py").write_text("open(c, 'w')\n")
    folders = {}
    for number, (case, text) in enumerate(cases.items()):
        canary = f"canary_{number}"
        for name in ("import", "name", "own", "tuple"):
            if f"zoo_{name}" in text:
                (home / f"zoo_{name}.py").write_text(PACKAGE.format(canary))
        with open(folder / f"evil_{canary}.npy", "wb") as file:
            np.save(file, np.array(Evil(canary), dtype=object), allow_pickle=True)
        job = folder / f"job_{number}"
        job.mkdir()
        text = text.replace("{c}", canary).replace("{p}", pickle.dumps(Evil(canary)).hex())
        (job / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
        folders[case] = job.name
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, "guarded" if guarded else "unguarded"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(CHECKOUT), "JAX_PLATFORMS": "cpu"},
        input=json.dumps(folders), text=True, capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def call_texts():
    return {
        case: config_text(task, "zoo_own.Mine" if "own say" in case else SPIRALS)
        for case, task in CALLS.items()
    }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    kinds = {"damaged": DAMAGED, "large": TOO_LARGE, "refused": REFUSED}
    nodes = {
        f"{kind}: {case}": config_text(node)
        for kind, cases in kinds.items() for case, node in cases.items()
    }  # fmt: skip
    cases = {**call_texts(), **nodes, **{f"text: {k}": text for k, text in text_files().items()}}
    return folder, answers_of(folder, cases, guarded=True)


def test_every_case_is_refused_in_one_printable_paragraph(guarded):
    _, answers = guarded
    assert len(answers) > 90
    for case, answer in answers.items():
        assert answer["code"] == 2, (case, answer["code"], answer["err"])
        assert answer["err"].startswith("error: ") and len(answer["err"]) < 1_000, case
        assert all(item.isprintable() for item in answer["err"].replace("\n", "")), case
        assert "Traceback" not in answer["err"] and "\n\n" not in answer["err"], case


def test_the_words_say_which_name_and_what_to_do(guarded):
    _, answers = guarded
    for case in CALLS:
        message = " ".join(answers[case]["err"].split())
        assert "config.json names " in message and "a config may name only what" in message, case
    assert "names os.system," in answers["a command"]["err"]
    assert "add --packages=zoo_name." in " ".join(answers["a package on sys.path"]["err"].split())
    for case, answer in answers.items():
        message = " ".join(answer["err"].split())
        if "a dataset" in case:
            assert "The name of a dataset in " in message, case
        if "that is none" in case and case.startswith("text: a"):
            assert "wanted a" in message or "this praxis_lite reads format 3" in message, case
        if case.startswith("large"):
            assert "at most 100000 parts" in message, case
        if case.startswith("damaged"):
            assert "is damaged, or praxis_lite did not write it" in message, case


def test_what_is_too_deep_to_be_read_is_not_written():
    config = functools.reduce(lambda inner, _: [inner], range(70), fdl.Config(dict))
    with pytest.raises(ConfigError, match="100000.*60"):
        dump_config(fdl.Config(dict, x=config), "praxis_lite.experiments.lm.PyDocs")


def test_no_canary_sings_and_no_module_is_imported(guarded):
    folder, answers = guarded
    assert not [name for name in os.listdir(folder) if "canary" in name and "evil" not in name]
    for case, answer in answers.items():
        loaded = {name.partition(".")[0] for name in answer["modules"]}
        assert not [name for name in loaded if name.startswith("zoo")], case
    for name in os.listdir(folder):
        if name.startswith("job_"):
            assert os.listdir(folder / name) == ["config.json"]


def test_nothing_is_written_started_or_unpickled_on_the_way(guarded):
    _, answers = guarded
    for case in CALLS:
        # The bait that lies in an allowed package may be imported, and no more.
        events = [answer for answer in answers[case]["events"] if "zebra" not in answer[1]]
        assert events == [], case


@pytest.mark.slow
def test_without_the_allow_list_every_canary_sings(tmp_path):
    answers = answers_of(tmp_path, call_texts(), guarded=False)
    sang = {name.partition(".")[0] for name in os.listdir(tmp_path)}
    silent = [case for number, case in enumerate(CALLS) if f"canary_{number}" not in sang]
    assert silent == [], {case: answers[case] for case in silent}
