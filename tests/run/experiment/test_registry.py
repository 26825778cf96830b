"""Names of experiments: found in the source, imported only when found."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from praxis_lite import ConfigError, Experiment
from praxis_lite.run.experiment import registry

EXPERIMENT = """
    from praxis_lite import Experiment, register

    @register
    class {name}(Experiment):
        '''The {name} one.

        More.
        '''
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Returns a function that writes files of a folder whose `experiments` are the library's."""
    monkeypatch.setattr(registry, "HOME", "experiments")
    for name in [item for item in sys.modules if item.partition(".")[0] in ("experiments", "zoo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(registry, "registered", {})
    monkeypatch.syspath_prepend(tmp_path)

    def write(**files):
        for name, text in files.items():
            file = tmp_path / f"{name.replace('__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / "__init__.py").touch()
            file.write_text(textwrap.dedent(text))

    write(
        experiments__lm=EXPERIMENT.format(name="PyDocs"),
        experiments__vision=EXPERIMENT.format(name="Digits"),
        zoo__deep__lm=EXPERIMENT.format(name="MyLm"),
    )
    yield write
    for name in [one for one in sys.modules if one.partition(".")[0] in ("experiments", "zoo")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["lm.PyDocs", "experiments.lm.PyDocs", "PyDocs"])
def test_a_short_a_full_and_a_bare_name_mean_the_same_class(packages, name):
    actual = registry.get_experiment(name)
    assert (actual.__module__, actual.__name__) == ("experiments.lm", "PyDocs")
    assert registry.get_experiment(name) is actual


def test_a_users_package_is_found_by_full_name(packages):
    actual = registry.get_experiment("zoo.deep.lm.MyLm", ["zoo"])
    assert registry.full_name(actual) == "zoo.deep.lm.MyLm"
    assert registry.get_experiment("MyLm", ["zoo"]) is actual


def test_a_package_that_is_not_listed_is_not_looked_into_until_it_has_registered(
    packages, monkeypatch
):
    # A worker of pytest-xdist has no file, and so looks like a notebook.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "tests.py", raising=False)
    with pytest.raises(ConfigError, match=r"--packages=zoo"):
        registry.get_experiment("zoo.deep.lm.MyLm")
    assert "zoo" not in sys.modules and registry.allowed_packages() == ("experiments",)
    assert list(registry.list_experiments()) == ["lm.PyDocs", "vision.Digits"]
    importlib.import_module("zoo.deep.lm")
    assert registry.get_experiment("zoo.deep.lm.MyLm").__name__ == "MyLm"
    assert registry.allowed_packages() == ("experiments", "zoo")


@pytest.mark.parametrize("name", ["os", "zoo.deep", "nothere", "", "../zoo", "zoo\x1b[2J"])
def test_what_is_no_package_of_the_users_cannot_be_listed(packages, name):
    with pytest.raises(ConfigError, match="^--packages=[ -~]*$"):
        registry.get_experiment("lm.PyDocs", [name])


def test_only_the_module_that_holds_the_class_is_imported(packages):
    packages(experiments__broken="raise RuntimeError('never import me')")
    registry.get_experiment("PyDocs")
    assert "experiments.lm" in sys.modules
    assert "experiments.vision" not in sys.modules and "experiments.broken" not in sys.modules


def test_an_unknown_name_suggests_and_imports_nothing(packages):
    with pytest.raises(ConfigError, match=r"lm\.PyDocs\?"):
        registry.get_experiment("lm.PyDoc")
    with pytest.raises(ConfigError, match=r"zoo\.deep\.lm\.MyLm\?"):
        registry.get_experiment("zoo.MyLm", ["zoo"])
    with pytest.raises(ConfigError, match=r"nothere\.Thing.*nothere"):
        registry.get_experiment("nothere.Thing")
    assert not [name for name in sys.modules if name.startswith(("experiments", "zoo"))]


@pytest.mark.parametrize("name", ["", "lm.", ".PyDocs", "lm/PyDocs", "a..b", "--x"])
def test_what_is_no_dotted_name_is_said_to_be_none(packages, name):
    with pytest.raises(ConfigError, match=f"--exp='?{name}'? "):
        registry.get_experiment(name)


def test_an_ambiguous_name_lists_the_choices(packages):
    packages(experiments__lm2=EXPERIMENT.format(name="PyDocs"))
    with pytest.raises(ConfigError, match=r"experiments\.lm\.PyDocs.*experiments\.lm2\.PyDocs"):
        registry.get_experiment("PyDocs")


@pytest.mark.parametrize("name", ["lm.Bare", "Bare"])
def test_a_class_without_the_decorator_is_told_to_add_it(packages, name):
    packages(experiments__lm="class Bare:\n    pass\n")
    with pytest.raises(ConfigError, match=r"lm\.py.*1\)"):
        registry.get_experiment(name)


def test_decorators_by_other_names_and_re_exports_are_seen(packages):
    packages(
        zoo__one="""
            import praxis_lite as pl
            if True:
                @pl.register
                class Dotted(pl.Experiment): pass
        """,
        zoo__two="""
            from praxis_lite import Experiment, register as reg
            @reg
            class Renamed(Experiment): pass
        """,
        zoo__three="from zoo.two import Renamed\nnumber = 7",
    )
    assert registry.get_experiment("zoo.one.Dotted", ["zoo"]).__name__ == "Dotted"
    renamed = registry.get_experiment("zoo.two.Renamed", ["zoo"])
    assert registry.get_experiment("zoo.three.Renamed", ["zoo"]) is renamed
    with pytest.raises(ConfigError, match=r"zoo\.three\.number.*7"):
        registry.get_experiment("zoo.three.number", ["zoo"])


def test_an_error_inside_the_users_module_comes_as_it_is(packages):
    packages(zoo__bad=EXPERIMENT.format(name="Bad") + "\n    import nowhere_to_be_found\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found") as caught:
        registry.get_experiment("zoo.bad.Bad", ["zoo"])
    assert caught.traceback[-1].path.name == "bad.py"
    packages(zoo__torn="class Torn(:\n")
    with pytest.raises(SyntaxError):
        registry.get_experiment("zoo.torn.Torn", ["zoo"])


def test_the_list_has_names_and_first_lines(packages):
    packages(
        experiments__torn="@register\nclass Torn(:\n", experiments__plain="class Plain: pass\n"
    )
    assert list(registry.list_experiments().items()) == [
        ("lm.PyDocs", "The PyDocs one."),
        ("vision.Digits", "The Digits one."),
    ]
    with_zoo = registry.list_experiments(["zoo"])
    assert list(with_zoo.items())[2:] == [("zoo.deep.lm.MyLm", "The MyLm one.")]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_odd_files_of_a_package_are_passed_over(packages, tmp_path):
    zoo = tmp_path / "zoo"
    os.mkfifo(zoo / "pipe.py")
    (zoo / "folder.py").mkdir()
    (zoo / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (zoo / "loop").symlink_to(zoo)
    (zoo / "zero.py").write_bytes(b"@register\nclass A: pass\n\0")
    (zoo / "latin.py").write_bytes(b"@register\nclass A: '\xe9'\n")
    (zoo / "deep.py").write_text("@register\nclass A: x = " + "(" * 10_000)
    (zoo / "large.py").write_text("@register\nclass A: pass\n" + "#" * 2**22)
    (zoo / "not-a-module.py").write_text("@register\nclass A: pass\n")
    names = list(registry.list_experiments(["zoo"]))
    assert names == ["lm.PyDocs", "vision.Digits", "zoo.deep.lm.MyLm"]
    for module in ("pipe", "folder", "gone"):
        with pytest.raises(ConfigError, match=rf"zoo\.{module}\.A"):
            registry.get_experiment(f"zoo.{module}.A", ["zoo"])


def test_two_classes_cannot_share_a_name(packages):
    first = type("Twin", (Experiment,), {"__module__": "zoo"})
    second = type("Twin", (Experiment,), {"__module__": "zoo"})
    assert registry.register(first) is first and registry.register(first) is first
    with pytest.raises(ConfigError, match=r"zoo\.Twin"):
        registry.register(second)


def test_only_experiments_can_be_registered(packages):
    with pytest.raises(ConfigError, match="'int'.*Experiment"):
        registry.register(int)


def test_classes_of_main_are_found_and_a_notebook_may_define_one_again():
    code = """
        import sys
        from praxis_lite import Experiment, register
        from praxis_lite.run.experiment.registry import get_experiment
        for number in (1, 2):
            @register
            class Mine(Experiment):
                size = number
        assert get_experiment("Mine") is get_experiment("__main__.Mine") is Mine
        assert Mine.size == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


LOOK_UP = """
import sys
import time
from praxis_lite import ConfigError, register
from praxis_lite.run.experiment.registry import get_experiment
assert not {"jax", "flax", "fiddle"} & set(sys.modules), "import praxis_lite is not light"
try:
    get_experiment(sys.argv[1], sys.argv[2:])
except ConfigError as error:
    print(error)
assert not {"jax", "flax", "fiddle", "mypackage"} & set(sys.modules), "a lookup is not light"
assert time.process_time() < 3, "a lookup takes long"  # Not the clock: the machine may be busy.
"""


@pytest.mark.parametrize("name", ["nothing.Such", "mypackage.experiments.MyL", "jax.numpy.Arrey"])
def test_an_unknown_name_is_answered_in_three_seconds_of_cpu_without_jax(tmp_path, name):
    folder = tmp_path / "mypackage"
    folder.mkdir()
    (folder / "experiments.py").write_text(textwrap.dedent(EXPERIMENT.format(name="MyLm")))
    packages = ["mypackage"] if "MyL" in name else []
    command = [sys.executable, "-c", LOOK_UP, name, *packages]
    done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = "Did you mean mypackage.experiments.MyLm?" if "MyL" in name else "No experiment"
    assert expected in done.stdout


def test_a_users_package_in_the_current_directory_is_found(tmp_path):
    folder = tmp_path / "mypackage"
    folder.mkdir()
    (folder / "experiments.py").write_text(textwrap.dedent(EXPERIMENT.format(name="MyLm")))
    code = (
        "from praxis_lite.run.experiment.registry import get_experiment, full_name;"
        "print(full_name(get_experiment('mypackage.experiments.MyLm', ['mypackage'])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "mypackage.experiments.MyLm\n"


def _environment():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
