"""Texts and conversations as ids and texts, as lm_eval's adapter of transformers makes them."""

import pytest

from praxis_lite import ConfigError
from praxis_lite.inputs.tokenizers import ByteTokenizer, load_tokenizer
from praxis_lite.inputs.tokenizers.chat_messages import RefusedConversation
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from praxis_tools.lm_eval.chat_text import chat_text
from praxis_tools.lm_eval.text_ids import TextIds
from tests.support.goldens import GOLDENS, golden
from tests.support.lm_eval_tasks import CHATS

FOLDER = GOLDENS / "lm_eval"
# Of a tokenizer without a beginning of a text transformers passes True over; we refuse it.
ENCODED = [
    case
    for case in golden("lm_eval/goldens.json")["encoded"]
    if (case["tokenizer"], case["add_bos_token"]) != ("qwen", True)
]


def name_of(case):
    return f"{case['tokenizer']}, add_bos_token={case['add_bos_token']}"


@pytest.mark.parametrize("case", ENCODED, ids=name_of)
def test_the_ids_of_texts_are_those_of_the_adapter_of_transformers(case):
    text_ids = TextIds(load_tokenizer(FOLDER / case["tokenizer"]), case["add_bos_token"])
    assert text_ids.prefix_id == case["prefix_token_id"]
    for text, ids in case["texts"]:
        assert text_ids.encode(text) == ids, text
    for text, ids in case["bare"]:
        assert text_ids.encode(text, False) == ids, text


def test_bytes_have_nothing_before_them_and_an_empty_context_is_the_end_of_the_text_before():
    text_ids = TextIds(ByteTokenizer())
    assert text_ids.encode("é\n") == [0xC3, 0xA9, 10]
    assert text_ids.prefix_id == 256
    assert TextIds(ByteTokenizer(), prefix_token_id=10).prefix_id == 10


@pytest.mark.parametrize("settings, words", [
    ({"add_bos_token": True}, "add_bos_token=True requires a beginning-of-text token"),
    ({"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
    ({"prefix_token_id": 257}, "prefix_token_id is 257; .*256"),
])  # fmt: skip
def test_a_wrong_setting_is_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        TextIds(ByteTokenizer(), **settings)


@pytest.mark.parametrize("name", CHATS)
def test_the_text_of_a_conversation_is_that_of_the_adapter_of_transformers(name):
    tokenizer = load_tokenizer(FOLDER / "llama")
    assert chat_text(tokenizer, *CHATS[name]) == golden("lm_eval/goldens.json")["chats"][name]


def test_a_template_that_refuses_what_is_no_system_message_is_an_error(caplog):
    class Refusing(ByteTokenizer):
        chat = ChatTemplate("{{ raise_exception('no ' + messages[0].role) }}")

    for name, role in (("question", "user"), ("system", "user")):
        with pytest.raises(RefusedConversation, match=f"no {role}"):
            chat_text(Refusing(), *CHATS[name])
    # Only the second conversation has a system message.
    assert [x.getMessage()[-32:] for x in caplog.records] == ["The system messages are omitted."]


def test_a_template_that_leaves_out_the_end_of_a_begun_answer_is_an_error():
    class Cutting(ByteTokenizer):
        chat = ChatTemplate("{% for m in messages %}{{ m.content[:3] }}{% endfor %}")

    with pytest.raises(ConfigError, match="omits the end of the last message"):
        chat_text(Cutting(), *CHATS["begun answer"])
