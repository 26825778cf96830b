"""OpenAI's own client against a server: texts by hand, draws as alone, errors by field."""

import dataclasses
import json
import urllib.error
import urllib.request

import numpy as np
import openai
import pytest

from tests.tools.serve import toy_server
from tests.tools.serve.toy_server import NAME, NUM_IDS, TABLE, TEXT, Bytes, L, alone

AFTER_A = TEXT[1:]
CHAT = [{"role": "system", "content": "?"}, {"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def url():
    model, engine = toy_server.model_and_engine()
    with toy_server.serving(engine, model) as running, toy_server.decoding(engine):
        yield running.url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def completion(client, prompt="a", **settings):
    settings = {"model": NAME, "temperature": 0, "max_tokens": 50} | settings
    return client.completions.create(prompt=prompt, **settings)


def test_a_completion_is_the_likeliest_text_to_its_end(client):
    answer = completion(client, ["a", "w"])
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, AFTER_A, "stop"),
        (1, "xyz", "stop"),
    ]
    # A prompt begins with the end of a text, and an answer ends with it.
    num_new = len(AFTER_A.encode()) + 1 + 4
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == num_new
    assert completion(client, "t", max_tokens=3).choices[0].finish_reason == "length"
    assert completion(client, [97]).choices[0].text == AFTER_A


def test_streamed_pieces_are_whole_characters_and_the_same_text(client):
    chunks = list(completion(client, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert "".join(texts) == AFTER_A
    assert len(texts) > 5 and "\ufffd" not in "".join(texts)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(texts) - 1) + ["stop"]
    assert chunks[-1].choices == [] and chunks[0].usage is None
    assert chunks[-1].usage.completion_tokens == len(AFTER_A.encode()) + 1


@pytest.mark.parametrize("stop, expected", [
    ("\u20ac d", "bc\u00e9"), (["zz", "f"], "bc\u00e9\u20ac de"), ("zq", AFTER_A),
])  # fmt: skip
def test_stop_strings_are_not_sent_nor_begun(client, stop, expected):
    whole = completion(client, stop=stop).choices[0]
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    # A token for each byte of the text, those of a character at its place, and none of the stop's.
    offsets = [place for place, character in enumerate(expected) for _ in character.encode()]
    told = completion(client, stop=stop, logprobs=0).choices[0].logprobs
    assert told.text_offset == offsets
    sent = ""
    for chunk in completion(client, stop=stop, stream=True):
        sent += chunk.choices[0].text
        assert expected.startswith(sent)
    assert sent == expected


def test_the_stop_strings_of_the_job_end_answers_too():
    model, engine = toy_server.model_and_engine()
    model = dataclasses.replace(model, stop_strings=("f", "yz"))
    with (
        toy_server.serving(engine, model) as running,
        toy_server.decoding(engine),
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert completion(client).choices[0].text == "bc\u00e9\u20ac de"
        assert completion(client, stop="d").choices[0].text == "bc\u00e9\u20ac "
        answer = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0)
        assert answer.choices[0].message.content == "bc\u00e9\u20ac de"


def test_a_chat_is_answered_by_its_template_whole_and_streamed(client):
    answer = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0)
    assert answer.choices[0].message.content == AFTER_A
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len("s?ua")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    chunks = list(
        client.chat.completions.create(
            model=NAME, messages=parts, temperature=0, stream=True, max_completion_tokens=7
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "bc\u00e9\u20ac"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_draws_are_those_of_the_seed_alone_whatever_else_is_asked(client):
    settings = {"temperature": 1.4, "top_p": 0.8}
    answer = completion(client, ["a", "b"], **settings, n=3, seed=11, max_tokens=L - 2)
    expected = [
        ids for prompt in ("a", "b") for ids in alone(prompt, 11, 3, temperature=1.4, p=0.8)
    ]
    decode = Bytes().decode
    assert [c.text for c in answer.choices] == [decode(ids, True) for ids in expected]
    assert len({c.text for c in answer.choices}) == 6
    drawn = [completion(client, temperature=1.4).choices[0].text for _ in range(3)]
    assert len(set(drawn)) > 1, "without a seed each answer is another"


@pytest.mark.parametrize("settings", [{"n": 6}, {"stream": True}], ids=str)
def test_each_answer_of_a_request_has_its_own_draws(client, settings):
    prompts = ["a"] if "n" in settings else ["a"] * 6
    answer = completion(client, prompts, temperature=1.4, **settings)
    texts = dict.fromkeys(range(6), "")
    for piece in answer if settings.get("stream") else [answer]:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert len(set(texts.values())) == 6


def test_log_probs_are_the_models(client):
    rows = TABLE.astype(np.float64) - np.log(np.exp(TABLE.astype(np.float64)).sum(1))[:, None]
    answer = completion(client, "d", max_tokens=2, logprobs=0).choices[0].logprobs
    assert answer.tokens == ["e", "f"]
    expected = [rows[ord(a), ord(b)] for a, b in ("de", "ef")]
    np.testing.assert_allclose(answer.token_logprobs, expected, atol=1e-5)
    assert answer.text_offset == [0, 1] and answer.top_logprobs is None
    chunks = list(
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "d"}],
            temperature=0,
            logprobs=True,
            max_tokens=2,
            stream=True,
            top_logprobs=3,
        )
    )
    told = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [(token.token, token.bytes) for token in told] == [("e", [101]), ("f", [102])]
    np.testing.assert_allclose([token.logprob for token in told], expected, atol=1e-5)
    for byte, token in zip(b"de", told, strict=True):
        likeliest = np.argsort(-rows[byte])[:3]
        names = [chr(i) if i < 128 else f"bytes:\\x{i:02x}" for i in likeliest]
        assert [x.token for x in token.top_logprobs] == names
        np.testing.assert_allclose(
            [x.logprob for x in token.top_logprobs], rows[byte][likeliest], atol=1e-5
        )
    drawn = completion(client, "d", max_tokens=20, logprobs=2, temperature=2.0, seed=4)
    kept = drawn.choices[0].logprobs
    assert any(len(likeliest) == 3 for likeliest in kept.top_logprobs)  # The drawn one beside two.
    for text, logprob, likeliest in zip(
        kept.tokens, kept.token_logprobs, kept.top_logprobs, strict=True
    ):
        assert text in likeliest and likeliest[text] >= logprob


def test_models_health_and_numbers(client, url):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).model_dump()["max_model_len"] == L
    with urllib.request.urlopen(f"{url}/health") as answer:
        assert json.load(answer) == {"status": "ok"}
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        assert b"\npraxis_lite_serve_rows 3.0\n" in answer.read()


@pytest.mark.parametrize("settings, param, words", [
    ({"temperature": 3}, "temperature", "from 0 to 2"),
    ({"temperature": True}, "temperature", "true"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"n": 0}, "n", "from 1"),
    ({"n": 100, "prompt": ["a", "b"]}, "n", "limit of 128"),
    ({"stop": [""]}, "stop", "1 to 256 characters"),
    ({"max_tokens": L}, "prompt", f"{L + 2} .*limit.* is {L}"),
    ({"prompt": "a" * L}, "prompt", f"have {L + 1} .* tokens"),
    ({"prompt": [NUM_IDS]}, "prompt", f"{NUM_IDS}"),
    ({"prompt": [["a"]]}, "prompt", "a string, a list of token ids"),
    ({"best_of": 2}, "best_of", "Use n"),
    ({"echo": True}, "echo", "prompt"),
    ({"presence_penalty": 1}, "presence_penalty", "not supported"),
    ({"logit_bias": {"1": 2}}, "logit_bias", "not supported"),
    ({"extra_body": {"temprature": 1}}, "temprature", "Did you mean temperature"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "requires stream"),
    ({"extra_body": {"stream": True, "stream_options": {"a": 1}}}, "stream_options.a", "known"),
])  # fmt: skip
def test_a_wrong_field_is_named(client, settings, param, words):
    with pytest.raises(openai.BadRequestError, match=words) as error:
        completion(client, **settings)
    assert error.value.param == param and error.value.type == "invalid_request_error"


def test_another_models_name_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="serves toy") as error:
        completion(client, model="gpt-4")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("path, body, headers, status, words", [
    ("/v1/completions", b"{", {}, 400, "not JSON"),
    ("/v1/completions", b"[" * 2000, {}, 400, "not JSON"),
    ("/v1/completions", b"[" * 900 + b"]" * 900, {}, 400, "JSON object"),
    ("/v1/completions", b'{"prompt": "\\ud800"}', {}, 400, "not JSON"),
    ("/v1/completions", b'{"prompt": "a"}', {}, 400, "model is missing"),
    ("/v1/completions", b'{"model": "toy", "prompt": "a", "prompt": "b"}', {}, 400,
     "the key 'prompt' occurs twice"),
    ("/v1/chat/completions", b'{"model": "toy", "messages": [{"role": "user", "content": "a", '
     b'"content": "b"}]}', {}, 400, "the key 'content' occurs twice"),
    ("/v1/completions", b'{"model": "toy", "prompt": "a", "seed": 1' + b"0" * 30 + b"}", {}, 400,
     "seed"),
    ("/v1/completions", b'{"model": "toy", "prompt": [1' + b"0" * 30 + b"]}", {}, 400, "prompt"),
    ("/v1/completions", b"a" * (4 << 20) + b"a", {}, 413, "4194304 bytes"),
    ("/v1/completions", b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
    ("/v1/chat/completions", b'{"model": "toy", "messages": [{"role": "user"}]}', {}, 400,
     "message 0 (role 'user') has no content"),
    ("/v1/embeddings", b"{}", {}, 404, "/v1/chat/completions"),
    ("/v1/models", b"{}", {}, 405, "GET /v1/models"),
])  # fmt: skip
def test_hostile_requests_get_an_error_message(url, path, body, headers, status, words):
    headers = {"Content-Type": "application/json"} | headers
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(url + path, body, headers))
    assert error.value.code == status
    with error.value as answer:
        assert words in json.load(answer)["error"]["message"]
