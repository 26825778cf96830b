"""Which tokens of a conversation are its answers, as transformers says."""

import functools
import json

import pytest

from praxis_lite.inputs.text.conversations import tokens_of
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from tests.support.goldens import GOLDENS

FOLDER = GOLDENS / "chats"
KINDS = ("byte_level", "byte_level_trimmed", "metaspace")
MARKED = {"[[": "{% generation %}", "]]": "{% endgeneration %}"}


@functools.cache
def golden():
    return json.loads((FOLDER / "answers.json").read_text())


@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "not marked"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_share_a_character_with_an_answer_are_learned(kind, is_marked):
    tokenizer, wrong = load_tokenizer(FOLDER / kind), []
    chosen = [item for item in golden()["answers"] if item[0] == kind]
    assert len(chosen) == len(golden()["templates"]) * len(golden()["conversations"])
    for _, name, number, ids, mask in chosen:
        template = golden()["templates"][name]
        for mark, tag in MARKED.items():
            template = template.replace(mark, tag if is_marked else "")
        tokenizer.chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
        actual = tokens_of(golden()["conversations"][number], tokenizer, "here")
        assert actual.ids.tolist() == ids
        if "".join(map(str, actual.is_answer.astype(int))) != mask:
            wrong.append((name, number, mask, "".join(map(str, actual.is_answer.astype(int)))))
    assert not wrong
