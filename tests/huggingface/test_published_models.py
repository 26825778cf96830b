"""Configs as published models have them are understood, and give their numbers of parameters."""

import collections
import math

import fiddle as fdl
import pytest

from praxis_lite.core import NnxModel
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.huggingface.decoder import lm_config
from praxis_lite.huggingface.family import family_of
from praxis_lite.huggingface.weights import map_tensors, tensor_shape, weights_of
from praxis_lite.layers import set_sharding_params
from tests.support.goldens import golden
from tests.support.marks import slow_or_nightly

PUBLISHED = golden("published_models.json")
QUICK = ["Llama-3.2-1B", "gemma-2-2b", "pythia-70m", "gpt-oss-20b"]
# Of 61 layers of 256 experts.
LARGEST = "DeepSeek-V3"


@pytest.mark.parametrize("name", slow_or_nightly(QUICK, set(PUBLISHED) - {LARGEST}, PUBLISHED))
def test_a_published_model_has_its_number_of_parameters_and_each_matrix_is_sharded(name):
    config = PUBLISHED[name]["config"]
    family = family_of(config)
    settings = family.decoder_settings(config)
    weights = weights_of(settings)
    of_tensor = collections.defaultdict(list)
    for part in map_tensors(family, settings, weights):
        of_tensor[part.tensor].append(part)
    actual = sum(math.prod(tensor_shape(x)) for x in of_tensor.values())
    assert actual == PUBLISHED[name]["parameters"]
    assert actual == sum(math.prod(weight.shape) for weight in weights.values())
    # Fully sharded, no matrix of it is replicated.
    model = NnxModel(fdl.build(set_sharding_params(lm_config(settings), "fsdp")))
    matrices = {
        path: spec
        for path, spec in spec_leaves(model.weight_specs()["params"])
        if spec.matrix and all(spec.matrix)
    }
    assert len(matrices) > 3
    specs = {
        path: spec.partition_spec(("replica", "data", "mdl"), path)
        for path, spec in matrices.items()
    }
    assert [path for path, spec in specs.items() if not any(spec)] == []
