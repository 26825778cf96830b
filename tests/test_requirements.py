"""pyproject.toml requires each imported package; errors name the extra of a missing one."""

import ast
import collections
import functools
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.optional_packages import PACKAGES, optional_module
from tests.support.every_case import assert_each

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for folder in ("praxis_lite", "praxis_tools", "tasks", "experiments")
    for path in (ROOT / folder).rglob("*.py")
)  # fmt: skip
OURS = {"praxis_lite", "praxis_tools", "tasks", "experiments"}
# pip's names of packages that are imported by another name.
PIP_NAMES = {
    "orbax": "orbax-checkpoint",
    "google": "protobuf",
    "prometheus_client": "prometheus-client",
    "huggingface_hub": "huggingface-hub",
    "yaml": "pyyaml",
}
# Modules that import a package of an extra at their top: nothing else imports them at its own.
LATE = {
    "praxis_tools.serve.connections": "uvicorn",
    "praxis_tools.serve.endpoints": "starlette",
    "praxis_tools.lm_eval.lm": "lm_eval",
}
# Late imports after `require_package`.
ASKED_FOR = {"experiments.vision": "sklearn", "experiments.published.mnist1d": "mnist1d"}


@functools.cache
def project() -> dict:
    """Returns the metadata in pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    """Returns the names of packages with their extras; those of praxis_lite are expanded."""
    found = {re.match(r"[\w.-]+(\[[\w,]+\])?", requirement)[0] for requirement in requirements}
    ours = {name for name in found if name.startswith("praxis_lite[")}
    extras = [extra for name in ours for extra in name[len("praxis_lite[") : -1].split(",")]
    return (found - ours).union(*map(names_of_extra, extras))


def names_of_extra(extra: str) -> set[str]:
    return names(project()["optional-dependencies"][extra])


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Returns the modules that a file imports, and whether it does so at its top level."""
    tree = parsed(path)
    late = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [(alias.name, node not in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append((node.module, node not in late))
    return modules


@pytest.mark.slow
def test_all_that_is_imported_by_its_name_is_in_the_plain_installation():
    plain, places = names(project()["dependencies"]), collections.defaultdict(list)
    for path in FILES:
        module = str(path.relative_to(ROOT)).removesuffix(".py").replace("/", ".")
        for name, is_at_top in imports(path):
            root = name.partition(".")[0]
            is_late = LATE.get(name) in (None, LATE.get(module))
            assert not is_at_top or is_late, f"{path} imports {name} at its top"
            is_asked_for = not is_at_top and root == ASKED_FOR.get(module)
            if root not in OURS | sys.stdlib_module_names | {LATE.get(module)} and not is_asked_for:
                places[PIP_NAMES.get(root, root)].append(str(path))
    assert {name: files for name, files in places.items() if name not in plain} == {}
    # And nothing else is required.
    assert plain == {*places}


def test_packages_of_extras_are_asked_for_by_the_extra_that_has_them():
    extras = {extra: names_of_extra(extra) for extra in project()["optional-dependencies"]}
    plain = names(project()["dependencies"])
    for package, (pip_name, extra) in PACKAGES.items():
        assert pip_name.strip("'") in (plain if extra is None else extras[extra]), package
    assert extras["text"] < extras["hf"]
    for extra in {extra for _, extra in PACKAGES.values()} - {None, "plan", "lm_eval"}:
        assert extras[extra] <= extras["test"]


def test_each_late_import_is_of_a_package_of_the_table():
    asked = set()
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "optional_module",
                "require_package",
                "is_installed",
            ):
                text = ast.unparse(node.args[0]).removeprefix("f").strip("\"'")
                asked.add(re.split(r"[.{]", text)[0])
    assert asked - {"package", "name", "self"} == {*PACKAGES}


def test_the_lock_file_pins_versions_that_pyproject_allows():
    lines = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8").splitlines()
    assert all(re.match(r"#|[\w.-]+==[\w.]+( ;|$)", line) for line in lines)
    locked = [Requirement(line) for line in lines if line[0] != "#"]
    for text in project()["dependencies"] + project()["optional-dependencies"]["test"]:
        requirement = Requirement(text)
        if requirement.name == "praxis_lite":
            continue
        name = requirement.name.replace("_", "-").lower()
        versions = [pin.specifier for pin in locked if pin.name.lower() == name]
        assert versions, text
        for (pin,) in versions:
            assert requirement.specifier.contains(pin.version), (text, pin)


def test_links_of_the_package_description_are_absolute_and_exist(monkeypatch):
    calls = []
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: calls.append(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    repository = project()["urls"]["Repository"]
    links = re.findall(r"\]\(([^)]*)\)", calls[0]["long_description"])
    assert len(links) > 20
    for link in links:
        kind, path = re.fullmatch(rf"{repository}/(raw|blob)/main/([^#]+)(?:#.*)?", link).groups()
        assert (ROOT / path).is_file() and (kind == "raw") == path.endswith(".png")


def test_windows_is_refused_with_a_recommendation():
    code = "import sys; sys.platform = 'win32'; import praxis_lite"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search("^ImportError: .* Windows.* WSL2", done.stderr, re.M)


def run_plainly(folder: Path, what: str) -> str:
    """Returns the output of a process without the packages."""
    done = subprocess.run(
        [sys.executable, "-u", "-m", "tests.support.plain_program", str(folder), what],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_without_any_of_them_a_job_trains_and_what_needs_one_says_so_before_it_compiles(tmp_path):
    output = run_plainly(tmp_path, "job")
    assert re.findall("STATUS (.*)", output) == ["None"] * 3 + ["2"] * 2
    assert len((tmp_path / "job/metrics.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "job/decode/heldout/2.jsonl").read_text().splitlines()) == 5
    lacking = re.findall(r"note: .*/(\S+?),? .*(pip install '.*?')", output, re.M)
    assert lacking == [
        ("tensorboard", "pip install 'praxis_lite[plots]'"),
        ("loss_curve.png", "pip install 'praxis_lite[plots]'"),
    ]
    assert not (tmp_path / "job/loss_curve.png").exists()
    errors = re.findall(r"^error: (.*?)^STATUS 2$", output, re.M | re.S)
    assert [" ".join(words.split()).split("pip install ", 1)[1] for words in errors] == [
        "'praxis_lite[text]' (or: pip install tokenizers).",
        "'praxis_lite[digits]' (or: pip install scikit-learn).",
    ]
    assert output.count("compiling the first step") == 1  # Of the job that was trained.


PIP_LINES = {
    "tokenizer.json": "'praxis_lite[text]' (or: pip install tokenizers)",
    "tokenizer.model": "'praxis_lite[text]' (or: pip install transformers)",
    "training a tokenizer": "'praxis_lite[text]' (or: pip install tokenizers)",
    "a chat template": "'praxis_lite[text]' (or: pip install jinja2)",
    "TfRecords": "'praxis_lite[sources]' (or: pip install google-crc32c)",
    "ImageFiles": "'praxis_lite[sources]' (or: pip install pillow)",
    "Tfds": "'praxis_lite[sources]' (or: pip install tensorflow-datasets)",
    "FromDataset": "'praxis_lite[tensorflow]' (or: pip install tensorflow)",
    "ArrayRecords": "'praxis_lite[grain]' (or: pip install array-record)",
    "quantized": "'praxis_lite[quantization]' (or: pip install qwix)",
    "load of Hugging Face": "'praxis_lite[hf]' (or: pip install safetensors)",
    "the picture of a search": "'praxis_lite[plots]' (or: pip install matplotlib)",
    "--topology": "'praxis_lite[plan]' (or: pip install 'jax[tpu]')",
    "vision.digits": "'praxis_lite[digits]' (or: pip install scikit-learn)",
    "harness_model": "'praxis_lite[lm_eval]' (or: pip install lm_eval)",
    "the command of lm_eval": "'praxis_lite[lm_eval]' (or: pip install lm_eval)",
    "praxis sweep": "'praxis_lite[sweep]' (or: pip install optuna)",
    "praxis serve": "'praxis_lite[serve]' (or: pip install starlette)",
}  # fmt: skip


@pytest.mark.slow
def test_a_feature_says_what_to_install(tmp_path):
    output = run_plainly(tmp_path, "features")

    def check(feature):
        (line,) = re.findall(f"^{re.escape(feature)}: (.*)", output, re.M)
        assert line.endswith(f" Install it: pip install {PIP_LINES[feature]}.")

    assert_each(check, zip(PIP_LINES, PIP_LINES, strict=True))


@pytest.mark.parametrize("source, words", [
    ("raise ImportError('libz.so: undefined symbol')", "ImportError: libz.so: undefined symbol"),
    ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
])  # fmt: skip
def test_a_broken_installation_is_not_called_a_missing_one(tmp_path, monkeypatch, source, words):
    (tmp_path / "qwix.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "qwix", raising=False)
    with pytest.raises(ConfigError) as error:
        optional_module("qwix", "quantized")
    assert f" {words}." in str(error.value)
    assert "pip install --force-reinstall qwix." in str(error.value)
