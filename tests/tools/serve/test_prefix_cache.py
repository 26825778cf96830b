"""A server that shares beginnings and takes drafts: the same answers, and all compiled before."""

import fiddle as fdl
import openai
import optax
import pytest

from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.decode import Greedy
from praxis_lite.layers import rotary_lm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.serve.served_model import create_served_model
from tests.decode.toy_models import num_compiled
from tests.support.goldens import GOLDENS
from tests.tools.serve.toy_server import decoding, serving

BEGINNING = "the sun is on the sea and the hen is in the tree. " * 3
PROMPTS = [*(BEGINNING + end for end in ("the", "a", "hen sat on", "")), "the", "sun "]


def answers(decoder):
    lm = rotary_lm(
        num_layers=2, vocab_size=101, model_dims=32, hidden_dims=64, num_heads=2, dim_per_head=16
    )
    task = LanguageModelTask(
        fdl.build(set_sharding_params(lm)),
        Learner(optax.sgd, 1.0),
        decoder=decoder,
        tokenizer=GOLDENS / "lm_eval/llama",
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1), allow_unused_devices=True))
    partitioner = Partitioner(task, mesh)
    mdl_vars = partitioner.init(partitioner.key(0)).mdl_vars
    model, engine = create_served_model(
        partitioner, mdl_vars, "tiny", max_length=128, num_rows=4, max_waiting=20
    )
    with (
        serving(engine, model) as running,
        decoding(engine),
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        before = num_compiled()
        result = [
            [
                choice.text
                for choice in client.completions.create(
                    model="tiny",
                    prompt=PROMPTS,
                    max_tokens=9,
                    seed=4,
                    temperature=temperature,
                    logprobs=2,
                ).choices
            ]
            for temperature in (0, 1, 1.3)
        ]
        assert num_compiled() == before
        return result, engine._rows


@pytest.mark.slow
def test_shared_beginnings_and_drafts_change_no_answer_and_compile_nothing_later():
    num_compiled()
    expected, _ = answers(Greedy())
    actual, rows = answers(Greedy(num_cached_prefixes=3, num_speculative_tokens=2))
    assert actual == expected
    assert len({text for texts in expected for text in texts}) > 12
    assert rows.num_read_tokens < rows.num_prompt_tokens
