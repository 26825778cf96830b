"""Configs as published models have them are understood, and give their numbers of parameters."""

import collections
import math

import pytest

from praxis_lite.tools.huggingface.family import family_of
from praxis_lite.tools.huggingface.same_model import weights_of
from praxis_lite.tools.huggingface.weights import parts, tensor_shape
from tests.support.goldens import golden
from tests.support.marks import every

PUBLISHED = golden("published_models.json")


@pytest.mark.parametrize("name", every(3, PUBLISHED))
def test_a_published_model_has_its_number_of_parameters(name):
    config = PUBLISHED[name]["config"]
    family = family_of(config)
    settings = family.decoder_settings(config)
    weights = weights_of(settings)
    of_tensor = collections.defaultdict(list)
    for part in parts(family, settings, weights):
        of_tensor[part.tensor].append(part)
    actual = sum(math.prod(tensor_shape(x)) for x in of_tensor.values())
    assert actual == PUBLISHED[name]["parameters"]
    assert actual == sum(math.prod(weight.shape) for weight in weights.values())
