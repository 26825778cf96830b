"""Configs as published models have them are understood, and give their numbers of parameters."""

import collections
import math

import fiddle as fdl
import jax
import pytest

from praxis_lite.core import NnxModel
from praxis_lite.tools.huggingface.decoder import lm_config
from praxis_lite.tools.huggingface.family import family_of
from praxis_lite.tools.huggingface.weights import parts, tensor_shape
from tests.support.goldens import golden
from tests.support.marks import every

PUBLISHED = golden("published_models.json")


@pytest.mark.parametrize("name", every(3, PUBLISHED))
def test_a_published_model_has_its_number_of_parameters(name):
    config = PUBLISHED[name]["config"]
    family = family_of(config)
    settings = family.decoder_settings(config)
    model = NnxModel(fdl.build(lm_config(settings)))
    params = {"params": jax.eval_shape(model.init, jax.random.key(0))["params"]}
    shapes = {
        "/".join(key.key for key in path): x.shape
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    of_tensor = collections.defaultdict(list)
    for part in parts(family, settings, shapes):
        of_tensor[part.tensor].append(part)
    actual = sum(math.prod(tensor_shape(x)) for x in of_tensor.values())
    assert actual == PUBLISHED[name]["parameters"]
    assert actual == sum(map(math.prod, shapes.values()))
