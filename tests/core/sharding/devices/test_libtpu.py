"""libtpu is left alone where there is no TPU, and the one that does not fit jax is named."""

import importlib.metadata
import importlib.util
import types

import pytest

from praxis_lite.core.sharding.devices import libtpu


@pytest.fixture
def told(monkeypatch):
    """Returns a function that calls `avoid_loading_libtpu` of a host, and what it set of jax."""

    def call(platforms, *, is_installed=True, plugins=()):
        settings = {}
        config = types.SimpleNamespace(jax_platforms=platforms, update=settings.__setitem__)
        monkeypatch.setattr(libtpu, "jax", types.SimpleNamespace(config=config, __version__="0"))
        installed = {"libtpu": object()} if is_installed else {}
        monkeypatch.setattr(importlib.util, "find_spec", installed.get)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
        for name in libtpu.WITHOUT_TPU:
            monkeypatch.delenv(name, raising=False)
        libtpu.avoid_loading_libtpu.__wrapped__()
        return settings

    return call


def test_a_libtpu_without_a_tpu_is_not_loaded(told):
    assert told(None) == {"jax_platforms": "cpu"}


@pytest.mark.parametrize(
    "platforms, host",
    [("tpu,cpu", {}), ("cpu", {}), ("cuda", {}), (None, {"is_installed": False})],
)
def test_platforms_that_are_chosen_or_need_no_libtpu_stay(platforms, host, told):
    assert told(platforms, **host) == {}


def test_beside_a_plugin_libtpu_is_told_that_there_is_no_tpu(told, monkeypatch):
    environment = {}
    monkeypatch.setattr(libtpu.os, "environ", environment)
    assert told(None, plugins=("cuda",)) == {}
    assert environment == libtpu.WITHOUT_TPU


@pytest.mark.parametrize(
    "installed, requirement, wanted",
    [
        ("0.0.52", 'libtpu==0.0.42.*; extra == "tpu"', "0.0.42"),
        ("0.0.4", 'libtpu==0.0.42.*; extra == "tpu"', "0.0.42"),
        ("0.0.421", "libtpu==0.0.42.*; extra == 'tpu'", "0.0.42"),
        ("0.0.42", 'libtpu==0.0.42.*; extra == "tpu"', None),
        ("0.0.42.1", 'libtpu==0.0.42.*; extra == "tpu"', None),
        ("0.0.50", 'libtpu==0.0.50; extra == "tpu"', None),
        ("0.0.50", 'kubernetes; extra == "k8s"', None),
    ],
)
def test_a_libtpu_of_another_jax_is_named_with_the_right_one(
    installed, requirement, wanted, monkeypatch
):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["jaxlib", requirement])
    actual = libtpu.mismatch()
    assert (actual is None) == (wanted is None)
    if wanted:
        assert f"libtpu {installed} is installed" in actual
        assert f"pip install 'libtpu=={wanted}.*'" in actual


def test_a_job_on_a_tpu_says_at_its_start_that_libtpu_is_not_that_of_jax(told, monkeypatch, caplog):
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.0.1" if name == "libtpu" else "1"
    )
    told("cpu")
    assert caplog.text == ""
    told("tpu,cpu")
    assert "libtpu 0.0.1 is installed, but jax" in caplog.text


def test_jax_names_its_libtpu_as_it_is_read_here(monkeypatch):
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.0.0" if name == "libtpu" else "1"
    )
    assert "requires libtpu 0.0." in libtpu.mismatch()
