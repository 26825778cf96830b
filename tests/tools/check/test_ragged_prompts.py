"""A check of custom layers with a cache: certified, or refused with the rule that they break."""

import fiddle as fdl
import pytest

from praxis_lite import ConfigError
from praxis_tools.check import check_on_meshes
from tests.decode import cached_layers
from tests.tools.check import tiny

pytestmark = pytest.mark.slow


def check_of(layer):
    class Custom(tiny.Lm):
        """Lm with a custom layer in attention's place."""

        def task(self):
            task = super().task()
            task.model.transformer_layer_tpl.tr_atten_tpl = fdl.Partial(layer)
            return task

        def decode_datasets(self):
            return {}

    return check_on_meshes(Custom, [(1, 2, 1)], steps=1, parts=("token by token", "ragged prompts"))


class Declared(cached_layers.GatedConv):
    """Declares what is not so."""

    cache_skips_padding = True


def test_a_layer_that_knows_nothing_of_padding_is_certified():
    actual = check_of(cached_layers.GatedConv)
    assert actual.certified, actual.summary()
    assert "ragged prompts" in {item.kind for item in actual.comparisons}


def test_padding_in_a_cache_that_is_declared_free_of_it_is_found():
    assert check_of(Declared).first_difference.kind == "ragged prompts"


def test_a_count_that_rows_share_is_refused():
    with pytest.raises(ConfigError, match="position.*batch"):
        check_of(cached_layers.SharedCounter)
