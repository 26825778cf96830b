"""The Dockerfile: nothing of it needs a network, its packages install, its process is ours."""

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from praxis_lite.job.health_files import HealthFiles
from tests.clusters.recipes import CLUSTERS, ROOT, our_options, tool
from tests.clusters.test_jobset import CONTAINER, POD
from tests.test_requirements import project

TEXT = (CLUSTERS / "Dockerfile").read_text()
WHEELHOUSE = "clusters/wheelhouse"
# Programs and addresses that ask a network.
NETWORK = re.compile(r"\b(apt|apt-get|apk|dnf|yum|curl|wget|git|ssh|conda|uv|npm)\b|://")


def instructions() -> list[tuple[str, str]]:
    """Returns the instructions of the Dockerfile with their arguments, on a line each."""
    lines = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines()]


def values(name: str) -> list[str]:
    return [value for instruction, value in instructions() if instruction == name]


def pip_words() -> list[str]:
    """Returns the words of the line that installs the packages, from `install` on."""
    (run,) = [value for value in values("RUN") if "pip install" in value]
    return shlex.split(run[run.index("pip install") :])[1:]


def test_hadolint_has_nothing_to_say():
    done = subprocess.run(
        [tool("hadolint"), CLUSTERS / "Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_nothing_but_the_base_comes_from_a_network():
    (base,) = values("FROM")
    assert re.fullmatch(r"python:(\d+\.\d+)\.\d+-slim-\w+", base)  # A release, not what is newest.
    for value in values("RUN"):
        assert not NETWORK.search(value), value
    assert {"--no-index", "--find-links=/wheelhouse"} <= set(pip_words())
    assert not values("ADD") and not values("COPY")
    (mounted,) = re.findall(r"--mount=(\S+)", " ".join(values("RUN")))
    assert f"source={WHEELHOUSE}" in mounted and "target=/wheelhouse" in mounted
    # What is mounted is what the command at the top makes, and what is sent to the builder.
    assert f"pip wheel --wheel-dir={WHEELHOUSE} " in TEXT
    ignored = (CLUSTERS / "Dockerfile.dockerignore").read_text().splitlines()
    assert [line for line in ignored if line[0] != "#"] == ["*", f"!{WHEELHOUSE}"]
    python = re.search(r"python:(\d+\.\d+)", base)[1]
    assert f"Python {python}" in TEXT.split("FROM")[0]
    assert eval_range(project()["requires-python"], python)


def eval_range(words: str, version: str) -> bool:
    """Returns True if "3.12" is within ">=3.11,<3.15"."""
    least, most = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", words).groups()
    return int(least) <= int(version.removeprefix("3.")) < int(most)


@pytest.mark.parametrize("line", [
    "apt-get install git", "curl -L x", "pip install git+https://x", "python -c 'get(\"http://x\")'",
])  # fmt: skip
def test_a_network_is_found(line):
    assert NETWORK.search(line)


def test_the_process_is_ours_and_hears_sigterm_itself():
    (entry,), (command,) = values("ENTRYPOINT"), values("CMD")
    assert json.loads(entry) == ["python", "-m", "praxis_lite"]  # No shell between.
    ours, options = our_options(json.loads(command))
    assert ours.job_log_dir == "/job" and options["health_dir"] == "/health"
    assert not any(word in CONTAINER for word in ("command", "tty"))  # The pod's args replace CMD.
    (user,) = values("USER")
    assert user == f"{POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
    made = " ".join(values("RUN"))
    assert f"--uid={user.partition(':')[0]}" in made and "/job /health" in made
    assert POD["shareProcessNamespace"]


def test_the_health_check_looks_at_the_files_age(tmp_path):
    (check,) = values("HEALTHCHECK")
    words = json.loads(check[check.index("CMD ") + 4 :])
    assert words == CONTAINER["livenessProbe"]["exec"]["command"]
    words = [word.replace("/health", str(tmp_path)) for word in words]
    assert subprocess.run(words).returncode != 0
    with HealthFiles(tmp_path):
        assert subprocess.run(words).returncode == 0


def wheel_of(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    """Packs an installed distribution as a wheel again."""
    name = re.sub(r"[-_.]+", "_", distribution.metadata["Name"])
    info = next(str(file.parent) for file in distribution.files if file.name == "WHEEL")
    tags = re.findall(r"^Tag: (\S+)-(\S+)-(\S+)$", distribution.read_text("WHEEL"), re.M)
    tag = "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True))
    path = folder / f"{name}-{distribution.version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as wheel:
        for file in distribution.files:
            is_left = (
                ".." in file.parts
                or file.suffix == ".pyc"
                or file.name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
            )
            if not is_left and file.locate().is_file():
                wheel.write(file.locate(), str(file))
        wheel.writestr(f"{info}/RECORD", "")


def needed(requirement: str, seen: dict[str, importlib.metadata.Distribution]) -> None:
    """Adds an installed distribution, and those that it requires here, to `seen`."""
    packaging = pytest.importorskip("packaging.requirements")
    parsed = packaging.Requirement(requirement)
    key = re.sub(r"[-_.]+", "-", parsed.name).lower()
    extras = parsed.extras or {""}
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return
    if key in seen and not parsed.extras:
        return
    seen[key] = importlib.metadata.distribution(parsed.name)
    for item in seen[key].requires or ():
        other = packaging.Requirement(item)
        if other.marker is None or any(other.marker.evaluate({"extra": e}) for e in extras):
            other.marker = None
            needed(str(other), seen)


@pytest.mark.slow
@pytest.mark.nightly
def test_its_packages_install_without_an_index_and_train(tmp_path):
    wheelhouse, seen = tmp_path / "wheelhouse", {}
    wheelhouse.mkdir()
    extras = [*project()["dependencies"], *project()["optional-dependencies"]["plots"]]
    for requirement in extras:
        needed(requirement, seen)
    for distribution in seen.values():
        wheel_of(distribution, wheelhouse)
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        symlinks=True,
        ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "tests", "docs"),
    )
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            f"--wheel-dir={wheelhouse}",
            source,
        ],
        check=True,
    )
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin/python"
    words = [
        word.replace("/wheelhouse", str(wheelhouse)).replace("${EXTRAS}", "plots")
        for word in pip_words()
        if word != "${MORE}"
    ]
    # Of a machine without any setting of pip's.
    subprocess.run([python, "-m", "pip", "--isolated", *words], check=True, cwd=tmp_path)
    job = tmp_path / "job"
    entry = json.loads(values("ENTRYPOINT")[0])
    done = subprocess.run(
        [
            python,
            *entry[1:],
            "--exp=lm.Synthetic",
            f"--job_log_dir={job}",
            "--set",
            "run.num_train_steps=2",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert len((job / "metrics.jsonl").read_text().splitlines()) == 2
    assert sysconfig.get_paths()["purelib"] not in done.stdout
