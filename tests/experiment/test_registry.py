"""Names of experiments: looked up in their modules."""

import importlib
import subprocess
import sys
import textwrap

import pytest

from praxis_lite import ConfigError, Experiment
from praxis_lite.core.callables import callable_name
from praxis_lite.experiment import registry

EXPERIMENT = """
    from praxis_lite import Experiment, register

    @register
    class {name}(Experiment):
        '''The {name} one.

        More.
        '''
"""


@pytest.fixture
def packages(tmp_path, monkeypatch, registry_copy):
    """Returns a function that writes files of a folder whose `experiments` are the library's."""
    monkeypatch.setattr(registry, "HOME", "experiments")
    for name in [item for item in sys.modules if item.partition(".")[0] in ("experiments", "zoo")]:
        monkeypatch.delitem(sys.modules, name)
    registry_copy.clear()
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
    assert callable_name(actual) == "zoo.deep.lm.MyLm"
    assert registry.get_experiment("MyLm", ["zoo"]) is actual


def test_a_package_that_is_not_listed_is_not_imported_and_one_that_registered_is_listed(
    packages, monkeypatch
):
    # A worker of pytest-xdist has no file, and so looks like a notebook.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "tests.py", raising=False)
    with pytest.raises(ConfigError, match="--packages="):
        registry.get_experiment("zoo.deep.lm.MyLm")
    assert "zoo" not in sys.modules and registry.allowed_packages() == ("experiments",)
    importlib.import_module("zoo.deep.lm")
    assert registry.get_experiment("zoo.deep.lm.MyLm").__name__ == "MyLm"
    assert registry.allowed_packages() == ("experiments", "zoo")


@pytest.mark.parametrize("name", ["os", "zoo.deep", "nothere", "", "../zoo", "zoo\x1b[2J"])
def test_what_is_no_package_of_the_users_cannot_be_listed(packages, name):
    with pytest.raises(ConfigError, match="^--packages=[ -~]*$"):
        registry.get_experiment("lm.PyDocs", [name])


def test_a_full_name_imports_its_module_alone(packages):
    packages(experiments__broken="raise RuntimeError('never import me')")
    registry.get_experiment("lm.PyDocs")
    assert "experiments.lm" in sys.modules
    assert "experiments.vision" not in sys.modules and "experiments.broken" not in sys.modules


@pytest.mark.parametrize(
    "name, suggested",
    [
        ("lm.PyDoc", r"lm\.PyDocs\?"),
        ("zoo.MyLm", r"zoo\.deep\.lm\.MyLm\?"),
        ("nothere.Thing", r"nothere\.Thing "),
    ],
)
def test_an_unknown_name_suggests_the_nearest(packages, name, suggested):
    with pytest.raises(ConfigError, match=suggested):
        registry.get_experiment(name, ["zoo"])


@pytest.mark.parametrize("name", ["", "lm.", ".PyDocs", "lm/PyDocs", "a..b", "--x"])
def test_a_name_that_is_not_dotted_is_refused(packages, name):
    with pytest.raises(ConfigError, match=f"^'{name}' is not the name of an experiment"):
        registry.get_experiment(name)


def test_an_ambiguous_name_lists_the_choices(packages):
    packages(experiments__lm2=EXPERIMENT.format(name="PyDocs"))
    with pytest.raises(ConfigError, match=r"experiments\.lm\.PyDocs.*experiments\.lm2\.PyDocs"):
        registry.get_experiment("PyDocs")


def test_a_class_without_the_decorator_is_named(packages):
    packages(experiments__lm="class Bare:\n    pass\n")
    with pytest.raises(ConfigError, match=r"experiments\.lm\.Bare.*@register"):
        registry.get_experiment("lm.Bare")


def test_an_experiment_is_found_where_another_module_imports_it(packages):
    packages(zoo__three="from zoo.deep.lm import MyLm")
    assert registry.get_experiment("zoo.three.MyLm", ["zoo"]).__module__ == "zoo.deep.lm"


def test_an_error_inside_the_users_module_comes_as_it_is(packages):
    packages(zoo__bad=EXPERIMENT.format(name="Bad") + "\n    import nowhere_to_be_found\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found") as caught:
        registry.get_experiment("zoo.bad.Bad", ["zoo"])
    assert caught.traceback[-1].path.name == "bad.py"


def test_the_list_has_names_and_first_lines_and_warns_of_broken_modules(packages, caplog):
    packages(
        experiments__torn="@register\nclass Torn(:\n", experiments__plain="class Plain: pass\n"
    )
    assert list(registry.list_experiments(["zoo"]).items()) == [
        ("lm.PyDocs", "The PyDocs one."),
        ("vision.Digits", "The Digits one."),
        ("zoo.deep.lm.MyLm", "The MyLm one."),
    ]
    assert "experiments.torn" in caplog.text and "torn.py, line 2" in caplog.text


def test_two_classes_cannot_share_a_name(packages):
    first = type("Twin", (Experiment,), {"__module__": "zoo"})
    second = type("Twin", (Experiment,), {"__module__": "zoo"})
    assert registry.register(first) is first and registry.register(first) is first
    with pytest.raises(ConfigError, match=r"zoo\.Twin"):
        registry.register(second)


def test_only_experiments_can_be_registered(packages):
    with pytest.raises(ConfigError, match="'int'.*Experiment"):
        registry.register(int)


@pytest.mark.slow
def test_classes_of_main_are_found_and_a_notebook_may_define_one_again():
    code = """
        import sys
        from praxis_lite import Experiment, register
        from praxis_lite.experiment.registry import get_experiment
        for number in (1, 2):
            @register
            class Mine(Experiment):
                size = number
        assert get_experiment("Mine") is get_experiment("__main__.Mine") is Mine
        assert Mine.size == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
