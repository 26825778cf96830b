"""The decoders of generate_until, and room for contexts and new tokens."""

import types

import pytest

from praxis_lite import ConfigError
from praxis_lite.decode import Greedy, Sample
from praxis_lite.inputs.tokenizers import ByteTokenizer, load_tokenizer
from praxis_tools.lm_eval.continuations import Continuations, Request
from tests.support.goldens import GOLDENS


def continuations(tokenizer=None, max_length=48):
    model = types.SimpleNamespace(tokenizer=tokenizer or ByteTokenizer(), max_length=max_length)
    return Continuations(model, 4, seed=0)


@pytest.mark.parametrize("settings, expected", [
    ({}, Greedy(max_decode_steps=7, eos_id=(256, 3))),
    ({"do_sample": False, "temperature": 0.0}, Greedy(max_decode_steps=7, eos_id=(256, 3))),
    ({"do_sample": True, "temperature": 0.0}, Greedy(max_decode_steps=7, eos_id=(256, 3))),
    ({"repetition_penalty": 1.5},
     Greedy(max_decode_steps=7, eos_id=(256, 3), repetition_penalty=1.5)),
    # All tokens may be drawn, where Sample alone would take the likeliest 40.
    ({"do_sample": True, "temperature": 0.5},
     Sample(max_decode_steps=7, eos_id=(256, 3), temperature=0.5, k=0)),
    ({"do_sample": True, "temperature": 0.5, "top_k": 9, "top_p": 0.3, "min_p": 0.1},
     Sample(max_decode_steps=7, eos_id=(256, 3), temperature=0.5, k=9, p=0.3, min_p=0.1)),
], ids=str)  # fmt: skip
def test_settings_of_generation_are_those_of_a_decoder(settings, expected):
    assert continuations().decoder(settings, 7) == expected


def test_a_text_ends_with_the_tokenizers_ends():
    tokenizer = load_tokenizer(GOLDENS / "lm_eval/llama")
    assert continuations(tokenizer).decoder({}, 7).eos_ids == tuple(tokenizer.eos_ids)
    assert 2 in tokenizer.eos_ids


@pytest.mark.parametrize("settings, words", [
    ({"num_beams": 3}, "generation_kwargs has num_beams=3; .* until, max_gen_toks"),
    ({"topp": 0.3}, "Did you mean top_p"),
    ({"do_sample": True, "temperature": -1.0}, "temperature is -1.0"),
])  # fmt: skip
def test_a_setting_that_is_not_known_here_is_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        continuations().decoder(settings, 7)


def test_there_must_be_room_for_a_context_and_a_token_in_it():
    decoder = continuations().decoder({}, 48)
    with pytest.raises(ConfigError, match="max_gen_toks is 48; expected less than max_length, 48"):
        continuations().generate([Request([1], decoder, ())])
    with pytest.raises(ConfigError, match="empty context"):
        continuations(max_length=49).generate([Request([], decoder, ())])
