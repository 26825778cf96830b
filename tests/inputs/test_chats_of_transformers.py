"""Conversations of each format under templates of each kind: the ids are those of transformers."""

import functools
import itertools
import json
import shutil

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from praxis_lite import ConfigError
from praxis_lite.inputs.text.encoding import encoded
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from praxis_lite.trainer.decoding.user_prompts import prompt_ids
from tests.support.chat_templates import TEMPLATES
from tests.support.every_case import assert_each
from tests.support.goldens import GOLDENS

FOLDER = GOLDENS / "chats" / "byte_level"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <b>two</b> numbers & more.",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "number"},
                    "y": {"type": "number"},
                },
                "required": ["x"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "né",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
DOCUMENTS = [{"title": "Foxes", "text": "A fox is né red."}, {"title": "Hens", "text": "<b>&</b>"}]


def said(*turns, roles=("user", "assistant")):
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def call(name, arguments):
    return {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = said("Who is there?", "né, a fox!", "Where?", " There. ")
CALLS = [
    *said("1 + 2?"),
    {"role": "assistant", "tool_calls": [call("add", {"x": 1, "y": [2, "é"]})]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
# Name: what transformers is given, and a row that means the same.
ROWS = {
    "turns": ({"messages": TURNS}, {"messages": TURNS}),
    "a system message": (
        {"messages": [SYSTEM, *TURNS]}, {"messages": TURNS, "system": "Be brief."},
    ),
    "parts": (
        {"messages": [
            {**turn, "content": [{"type": "text", "text": part} for part in (turn["content"], "!")]}
            for turn in TURNS
        ]},
        {"messages": [
            {**turn, "content": [
                turn["content"], {"type": "output_text", "text": "!", "image": None},
            ]}
            for turn in TURNS
        ]},
    ),
    "tools": (
        {"messages": CALLS, "tools": TOOLS},
        {"tools": json.dumps(TOOLS), "documents": None, "messages": [
            {"role": None, "tool_calls": None, "reasoning_content": None, "weight": None} | turn
            for turn in [CALLS[0], {
                "role": "assistant", "content": None,
                "tool_calls": [call("add", '{"x": 1, "y": [2, "é"]}') | {"index": None}],
            }, *CALLS[2:]]
        ]},
    ),
    "documents": ({"messages": TURNS, "documents": DOCUMENTS},
                  {"messages": TURNS, "documents": json.dumps(DOCUMENTS), "tools": []}),
    "reasoning": (
        {"messages": [*TURNS[:3], {**TURNS[3], "reasoning_content": "Hm, \"né\"?"}]},
        {"messages": [*TURNS[:3], {**TURNS[3], "reasoning": "Hm, \"né\"?"}]},
    ),
    "a name": ({"messages": [{**TURNS[0], "name": "Ann"}, *TURNS[1:]]},) * 2,
    "a switch": (
        {"messages": TURNS[:3], "enable_thinking": False},
        {"messages": TURNS[:3], "chat_template_kwargs": {"enable_thinking": False, "x": None}},
    ),
}  # fmt: skip
# What each template reads beyond turns, by hand; else the error names the word.
READ = {
    # Mistral's template has it only if the last message is the user's.
    "a system message": set(TEMPLATES) - {"gemma", "mistral"},
    "tools": {"qwen2.5", "qwen3", "llama3.1", "mistral", "hermes, marked"},
    "documents": {"command-r"},
    "reasoning": {"qwen3", "deepseek-r1"},
    "a name": set(),
    "a switch": {"qwen3"},
}
# Unmarked templates that write an earlier turn otherwise once others follow, or text behind it.
REWRITTEN = {
    *((name, content) for name in ("qwen3", "deepseek-r1") for content in ROWS),
    ("command-r", "documents"),
}
NAMED = {
    "a system message": "System role|role 'system'. has content",
    "tools": "tool",
    "documents": "documents",
    "reasoning": "reasoning",
    "a name": "name",
    "a switch": "enable_thinking",
}


@functools.cache
def tokenizers(name):
    ours, template = load_tokenizer(FOLDER), TEMPLATES[name]
    ours.chat = ChatTemplate(template, SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"), chat_template=template, **SPECIAL
    )
    return ours, fast


def expected_ids(fast, name, row, content, **settings):
    row, day = dict(row), {"date_string": "26 Jul 2024"} if name == "llama3.1" else {}
    reads_lists = name == "gemma3"
    messages = row.pop("messages")
    if content == "parts" and not reads_lists:
        messages = [
            {**turn, "content": "".join(part["text"] for part in turn["content"])}
            for turn in messages
        ]
    return fast.apply_chat_template(messages, **row, **day, **settings)


def with_day(name, row):
    if name != "llama3.1":
        return row
    given = row.get("chat_template_kwargs") or {}
    return {**row, "chat_template_kwargs": {**given, "date_string": "26 Jul 2024"}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_the_ids_of_transformers_or_a_refusal_that_names_the_key(name):
    assert_each(functools.partial(check_conversation, name), ((kind, kind) for kind in ROWS))


def check_conversation(name, content):
    ours, fast = tokenizers(name)
    given, row = ROWS[content]
    row = with_day(name, row)
    if name not in READ.get(content, TEMPLATES):
        with pytest.raises(ConfigError, match=NAMED[content]):
            prompt_ids(row, ours, "here")
        return
    actual = prompt_ids(row, ours, "here").tolist()
    expected = expected_ids(fast, name, given, content, add_generation_prompt=True)
    assert actual == expected["input_ids"], ours.decode(actual)
    if content == "a switch":  # Nothing is to be learned.
        return
    if (name, content) in REWRITTEN:
        with pytest.raises(ConfigError, match="generation"):
            encoded("messages", None, row, ours, "here")
        return
    marks = "marked" in name
    tokens = encoded("messages", None, row, ours, "here")
    expected = expected_ids(fast, name, given, content, return_assistant_tokens_mask=marks)
    assert tokens.ids.tolist() == expected["input_ids"]
    if marks:
        assert tokens.is_answer.tolist() == list(map(bool, expected["assistant_masks"]))


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"weight": 1, "train": False}])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if (name, "turns") not in REWRITTEN])
def test_an_answer_with_weight_0_keeps_its_ids_and_is_not_learned(name, mark):
    ours, _ = tokenizers(name)
    messages = CALLS if name in READ["tools"] else TURNS
    row = with_day(name, {"messages": messages, "tools": TOOLS if messages is CALLS else None})
    plain = encoded("messages", None, row, ours, "here")
    # The answers are the runs of learned tokens.
    runs = [
        list(group)
        for is_on, group in itertools.groupby(
            range(len(plain.ids)), lambda i: bool(plain.is_answer[i])
        )
        if is_on
    ]
    assert len(runs) == 2
    for answer, index in enumerate((1, len(messages) - 1)):
        marked = [{**turn, **mark} if i == index else turn for i, turn in enumerate(messages)]
        tokens = encoded("messages", None, {**row, "messages": marked}, ours, "here")
        assert tokens.ids.tolist() == plain.ids.tolist()
        assert [i for i, is_on in enumerate(tokens.is_answer) if is_on] == runs[1 - answer]
    none = [{**turn, **mark} if turn["role"] == "assistant" else turn for turn in messages]
    with pytest.raises(ConfigError, match="weight 0"):
        encoded("messages", None, {**row, "messages": none}, ours, "here")


@pytest.mark.parametrize("form", ["a list", "files"])
def test_a_conversation_with_tools_takes_the_template_named_tool_use(form, tmp_path):
    template, of_tools = TEMPLATES["zephyr, marked"], TEMPLATES["qwen2.5"]
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    if form == "a list":
        named = {"default": template, "tool_use": of_tools}
        config["chat_template"] = [{"name": k, "template": v} for k, v in named.items()]
    else:
        config.pop("chat_template", None)
        (tmp_path / "chat_template.jinja").write_text(template)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(of_tools)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for row in ({"messages": TURNS}, {"messages": TURNS, "tools": TOOLS}):
        given = dict(row)
        expected = theirs.apply_chat_template(given.pop("messages"), **given)["input_ids"]
        assert encoded("messages", None, row, ours, "here").ids.tolist() == expected
