"""Values in Python set what the texts of --set set, and what no text can say is refused."""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.config.python_settings import as_texts
from praxis_lite.decode import Sample
from praxis_lite.decode.decoder import Decoder


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Fields:
    number: int = 1
    share: float = 1.0
    flag: bool = False
    text: str = "a"
    some_text: str | None = None
    text_or_number: str | int = 0
    word: Literal["none", "all"] = "all"
    shape: Sequence[int] = (1,)
    names: Sequence[str] = ("a",)
    fixed: tuple[int, int] = (1, 2)
    table: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: Any = jnp.float32
    color: Color = Color.RED
    rate: float | Callable[[int], float] = 1.0
    optimizer: Callable[..., Any] = optax.adam
    decoder: Decoder | None = None
    anything: Any = None


@pytest.mark.parametrize(
    "name, value",
    [
        ("number", 7),
        ("number", np.int64(7)),
        ("share", 0.1),
        ("share", 3),
        ("share", math.inf),
        ("share", np.float32(0.1)),
        ("flag", True),
        ("text", "7"),
        ("text", "none"),
        ("text", "a,b"),
        ("text", " a "),
        ("text", ""),
        ("text", "it's = 'so'"),
        ("text", "two\nlines"),
        ("some_text", "none"),
        ("some_text", None),
        ("text_or_number", "7"),
        ("text_or_number", 7),
        ("text_or_number", "inf"),
        ("word", "none"),
        ("shape", (1, 4, 2)),
        ("shape", [1, 4]),
        ("shape", ()),
        ("names", ["1", "none"]),
        ("fixed", (3, 4)),
        ("table", {"a": [1, None]}),
        ("color", Color.RED),
        ("rate", 0.5),
        ("anything", {"a": (1, "b")}),
        ("anything", "7"),
    ],
)
def test_a_value_is_what_is_set(name, value):
    config = fdl.Config(Fields)
    (text,) = as_texts({name: value})
    apply_overrides(config, [text])
    actual = getattr(config, name)
    assert actual == value and (type(actual) is type(value) or isinstance(value, np.generic | int))


def test_functions_classes_dtypes_and_configs_are_those_of_their_names():
    config = fdl.Config(Fields)
    schedule = fdl.Config(optax.linear_schedule, init_value=1.0, end_value=0.0, transition_steps=7)
    values = {
        "optimizer": optax.lion,
        "optimizer.b1": 0.8,
        "dtype": jnp.bfloat16,
        "rate": schedule,
        "decoder": Sample(temperature=0.5, stop_strings=("none",)),
    }
    texts = as_texts(values)
    assert texts[:3] == ("optimizer=optax.lion", "optimizer.b1=0.8", "dtype=bfloat16")
    apply_overrides(config, texts)
    assert config.optimizer == fdl.Partial(optax.lion, b1=0.8)
    assert config.dtype is jnp.bfloat16 and config.rate == schedule
    assert fdl.build(config.decoder) == values["decoder"]


def test_texts_are_taken_as_they_are():
    assert as_texts(["a=1", "b=[2]"]) == ("a=1", "b=[2]")
    assert as_texts(()) == as_texts({}) == ()


@pytest.mark.parametrize(
    "settings, words",
    [
        ("run.seed=1", "'run.seed=1'; expected a dict"),
        ([("run.seed", 1)], "expected a dict"),
        (7, "settings is 7"),
        ({7: 1}, "the key 7"),
        ({"a": np.ones(3)}, r"a: array\(\[1"),
        ({"a": lambda x: x}, "a: <function"),
        ({"a": fdl.Partial(optax.lion)}, r"a: <Partial\[lion"),
        ({"a": [object()]}, r"a: \[<object"),
    ],
)
def test_what_has_no_text_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        as_texts(settings)
