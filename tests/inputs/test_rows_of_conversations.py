"""Keys of rows with conversations: each is used, or refused by name, wherever rows are read."""

import json
import pickle
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from praxis_lite import ConfigError
from praxis_lite.inputs import ByteTokenizer, Documents, JsonLines, Parquet, PreferenceData
from praxis_lite.inputs.text.encoding import encoded
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from praxis_lite.trainer.decoding.user_prompts import prompt_ids, read_prompts
from praxis_tools.lm_eval.chat_text import chat_text
from praxis_tools.serve.api_error import ApiError
from praxis_tools.serve.requests import chat
from praxis_tools.serve.served_model import ServedModel
from tests.support.every_case import assert_each
from tests.support.goldens import GOLDENS


class ReadsAll(ByteTokenizer):
    chat = ChatTemplate(
        "{% if tools %}{{ 'T' + (tools | tojson) }}{% endif %}"
        "{% if documents %}{{ 'D' + documents[0].text }}{% endif %}"
        "{% if enable_thinking %}{{ 'E' }}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + (' ' + m.name if m.name else '') + '>' }}"
        "{% if m.role == 'assistant' %}{% generation %}"
        "{{ (m.reasoning_content or '') + (m.content or '') }}"
        "{{ (m.tool_calls | tojson) if m.tool_calls }};{% endgeneration %}"
        "{% else %}{{ m.content + ';' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )


class ReadsContent(ByteTokenizer):
    chat = ChatTemplate(
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
        "{{ '<' + m.role + '>' + (m.content or '') + ';' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )


def text_of(ids):
    return bytes(number for number in ids.tolist() if number < 256).decode()


def trained(row, tokenizer, folder):
    return text_of(encoded("messages", None, row, tokenizer, "here").ids)


def preferred(row, tokenizer, folder):
    *prompt, answer = row.pop("messages")
    row |= {"prompt": prompt, "chosen": [answer], "rejected": [{**answer, "content": "other"}]}
    pair = encoded("preference", None, row, tokenizer, "here")
    return text_of(pair.chosen.ids)


def of_file(row, tokenizer, folder):
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps(row | {"messages": row["messages"][:-1]}) + "\n")
    return text_of(prompt_ids(read_prompts(path)[0], tokenizer, "--prompts"))


def of_python(row, tokenizer, folder):
    return text_of(prompt_ids(row | {"messages": row["messages"][:-1]}, tokenizer, "generate"))


def served(row, tokenizer, folder):
    row = row | {"messages": row["messages"][:-1]}
    if "tools" in row:
        row["tool_choice"] = "none"
    body = json.dumps({"model": "m", **row}).encode()
    return text_of(ServedModel("m", tokenizer, None, 10_000, ()).tokenize(chat(body))[0])


TRAINING, PROMPTS = (trained, preferred), (of_file, of_python, served)
WAYS = [(way.__name__, way) for way in TRAINING + PROMPTS]
USER, MIDDLE, ANSWER = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "m"},
    {"role": "assistant", "content": "a"},
)
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}
CALLED = 'T[{"type": "function", "function": {"name": "f"}}]'
PLAIN = "<user>q;<assistant>m;<user>q;<assistant>"


def row(middle=None, user=None, **more):
    return {
        "messages": [USER, {**MIDDLE, **(middle or {})}, {**USER, **(user or {})}, ANSWER],
        **more,
    }


# Name: a row, its text before the answer by hand, and the key that a template of contents lacks.
USED = {
    "nothing": (row(), PLAIN, None),
    "nulls": (row({"tool_calls": None, "weight": None}, {"x": None}, tools=None, id=None), PLAIN,
              None),
    "tools": (row(tools=[TOOL | {"strict": None}]), CALLED + PLAIN, "tools"),
    "tools, JSON text": (row(tools=json.dumps([TOOL])), CALLED + PLAIN, "tools"),
    "tools, a list of JSON texts": (row(tools=[json.dumps(TOOL)]), CALLED + PLAIN, "tools"),
    "documents": (row(documents=[{"title": "x", "text": "d"}]), "Dd" + PLAIN, "documents"),
    "kwargs": (
        row(chat_template_kwargs={"enable_thinking": True}), "E" + PLAIN, "enable_thinking"),
    "a name": (row(user={"name": "Ann"}), PLAIN.replace(">m;<user", ">m;<user Ann"), "name"),
    "parts": (
        row(user={"content": ["q", {"type": "input_text", "text": "r", "image_url": None}]}),
        PLAIN.replace("m;<user>q", "m;<user>qr"), None),
    "reasoning": (row({"reasoning": "R"}), PLAIN.replace("m;", "Rm;"), "reasoning"),
    "thinking": (row({"thinking": "R"}), PLAIN.replace("m;", "Rm;"), "reasoning_content"),
    "calls": (
        row({"content": None, "tool_calls": [CALL | {"id": None}]}),
        PLAIN.replace("m;", '[{"type": "function", "function": {"name": "f", "arguments": '
                      '{"x": "1"}}}];'), "tool_calls"),
    "nulls in arguments and parameters": (
        row({"content": None, "tool_calls": [
            {"id": None, "function": {"name": "f", "arguments": {"x": None, "y": [None]}}}]},
            tools=[{"name": "f", "strict": None, "parameters": {"x": {"default": None}}}]),
        'T[{"name": "f", "parameters": {"x": {"default": null}}}]' + PLAIN.replace(
            "m;", '[{"function": {"name": "f", "arguments": {"x": null, "y": [null]}}}];'),
        "tool"),
    "labels": (row({"id": "1"}, user={"id": "2", "tool_call_id": "3"}), PLAIN, None),
    "weights": (row({"weight": 0}, user={"weight": 0}), PLAIN, None),
    "train": (row({"train": False}, user={"train": False}), PLAIN, None),
}  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_a_known_key_reaches_the_text_or_the_template_is_said_to_lack_it(name, tmp_path):
    def check(way):
        given, expected, lacked = USED[name]
        expected += "a;" if way in TRAINING else ""
        assert way(dict(given), ReadsAll(), tmp_path) == expected
        if lacked is None:
            assert way(dict(given), ReadsContent(), tmp_path) == expected
        else:
            with pytest.raises((ConfigError, ApiError), match=lacked):
                way(dict(given), ReadsContent(), tmp_path)

    assert_each(check, WAYS)


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
REFUSED = {
    "id": row(id=3),
    "weight": row(weight=0.5),
    "images": row(images=["x.png"]),
    "videos": row(videos=["x"]),
    "response_format": row(response_format={"a": 1}),
    "tool_choice": row(tool_choice="auto"),
    "enable_thinking": row(enable_thinking=True),
    "audio": row({"audio": {"id": "x"}}),
    "refusal": row({"refusal": "no"}),
    "function_call": row({"function_call": {"name": "f"}}),
    "training": row({"training": False}),
    "image_url": row(user={"content": ["q", IMAGE]}),
    "cache_control": row(user={"content": [{"type": "text", "text": "q", "cache_control": 1}]}),
    "weight of message 1": row({"weight": 0.5}),
    "weight 1": row(user={"weight": 1}),
    "train of message 1": row({"train": "no"}),
    "arguments": row(
        {
            "tool_calls": [
                {"function": {"name": "f", "arguments": "{"}},
            ]
        }
    ),
    "content": row(user={"content": {"text": "q"}}),
    "tools": row(tools={"name": "f"}),
    "chat_template_kwargs": row(chat_template_kwargs={"add_generation_prompt": True}),
}


@pytest.mark.parametrize("key", REFUSED)
def test_any_other_key_or_value_is_refused_by_its_name(key, tmp_path):
    def check(way):
        with pytest.raises((ConfigError, ApiError), match=key):
            way(dict(REFUSED[key]), ReadsAll(), tmp_path)

    assert_each(check, WAYS)


def test_a_system_message_that_the_template_leaves_out_is_refused(tmp_path):
    messages = [{"role": "system", "content": "s"}, USER, ANSWER]
    for way in TRAINING + PROMPTS:
        assert way({"messages": messages}, ReadsAll(), tmp_path).startswith("<system>s;")
        with pytest.raises((ConfigError, ApiError), match="system"):
            way({"messages": messages}, ReadsContent(), tmp_path)


# Name: a template that leaves out a content, and the messages before the answer.
OMITS = {
    "beside calls": (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}",
        [USER, {"role": "assistant", "content": "LOST", "tool_calls": [CALL]}, USER],
    ),
    "a later system message": (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}"
        "{% endfor %}",
        [USER, {"role": "system", "content": "LOST"}, USER],
    ),
    "all but the last messages": (
        "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}",
        [{"role": "user", "content": "LOST"}, MIDDLE, USER],
    ),
}


@pytest.mark.parametrize("name", OMITS)
def test_a_content_that_the_template_leaves_out_is_refused(name, tmp_path):
    template, messages = OMITS[name]

    class Omits(ByteTokenizer):
        chat = ChatTemplate(template)

    number = next(i for i, message in enumerate(messages) if message["content"] == "LOST")
    for way in (trained, *PROMPTS):
        with pytest.raises((ConfigError, ApiError), match=f"message {number} .*content"):
            way({"messages": [*messages, ANSWER]}, Omits(), tmp_path)


@pytest.mark.parametrize(
    "use",
    [
        # As SmolVLM's, LLaVA's, and one that refuses a string.
        "{% for x in m.content %}{% if x.type == 'text' %}{{ x['text'] }}{% endif %}{% endfor %}",
        "{{ m.content[0]['text'] }}",
        "{{ (m.content | selectattr('type', 'equalto', 'text') | first)['text'] + '' }}",
    ],
)
def test_a_string_is_a_part_for_templates_that_read_only_parts(tmp_path, use):
    class ReadsParts(ByteTokenizer):
        chat = ChatTemplate(
            "{% for m in messages %}<{{ m.role }}>" + use + ";{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )

    for way in TRAINING + PROMPTS:
        expected = PLAIN + ("a;" if way in TRAINING else "")
        assert way(row(), ReadsParts(), tmp_path) == expected


# Name: format, row, the text, and what of it is learned.
FORMATS = {
    "TRL's conversations": ("messages", {"conversations": [USER, ANSWER]}, "<user>q;<assistant>a;",
                            "a;"),
    "ShareGPT": ("sharegpt", {"conversations": [
        {"from": "human", "value": "q"}, {"from": "gpt", "value": "m", "weight": 0},
        {"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "markdown": None},
    ], "system": "s"}, "<system>s;" + PLAIN + "a;", "a;"),
    "LLaMA-Factory's tools": ("sharegpt", {"conversations": [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "o"}, {"from": "gpt", "value": "a"},
    ], "tools": '[{"name": "f"}]', "system": ""}, CALLED + '<user>q;<assistant>[{"type": '
        '"function", "function": {"name": "f", "arguments": {"x": 1}}}];<tool>o;<assistant>a;',
        '[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}];a;'),
    "Alpaca": ("alpaca", {"instruction": "i", "input": "n", "output": "a", "system": "s",
                          "history": [["q", "m"]]},
               "<system>s;<user>q;<assistant>m;<user>i\nn;<assistant>a;", "m;a;"),
    "prompt and completion": ("completion", {"prompt": [USER, MIDDLE, USER], "completion": [ANSWER],
                                             "tools": [TOOL]}, CALLED + PLAIN + "a;", "a;"),
    "a completion that repeats its prompt": ("completion", {
        "prompt": [USER], "completion": [USER, ANSWER]}, "<user>q;<assistant>a;", "a;"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_completely(name):
    holds, given, text, learned = FORMATS[name]
    tokens = encoded(holds, None, given, ReadsAll(), "here")
    assert text_of(tokens.ids) == text
    assert text_of(tokens.ids[tokens.is_answer]) == learned
    with pytest.raises(ConfigError, match="'score'.*ignored_keys"):
        encoded(holds, None, {**given, "score": 1}, ReadsAll(), "here")
    same = encoded(holds, None, {**given, "score": 1}, ReadsAll(), "here", ["score"])
    assert same.ids.tolist() == tokens.ids.tolist()


@pytest.mark.parametrize("num_repeated", [(0, 0), (1, 1), (3, 3), (0, 3), (3, 1)])
def test_answers_that_repeat_the_end_of_their_prompt_have_it_once(num_repeated):
    prompt = [USER, MIDDLE, USER]
    chosen, rejected = (prompt[len(prompt) - n :] for n in num_repeated)
    row = {"prompt": prompt, "chosen": [*chosen, ANSWER], "rejected": [*rejected, MIDDLE]}
    pair = encoded("preference", None, row, ReadsAll(), "here")
    assert [text_of(side.ids) for side in pair] == [PLAIN + "a;", PLAIN + "m;"]


@pytest.mark.parametrize(("holds", "given", "words"), [
    ("sharegpt", {"conversations": [{"from": "system", "value": "s"},
                                    {"from": "gpt", "value": "a"}], "system": "o"}, "system"),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": "f(1)"}]}, "function_call"),
    ("alpaca", {"instruction": "i", "output": "a", "history": ["q"]}, "history"),
    ("alpaca", {"instruction": "i", "output": "a", "outputs": "x"}, "Did you mean output"),
    ("completion", {"prompt": "q", "completion": "a", "tools": [TOOL]}, "tools"),
    ("completion", {"prompt": "q", "completion": [ANSWER]}, "messages"),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "b", "tools": [TOOL]}, "tools"),
    ("preference", {"prompt": "z", "chosen": [USER, ANSWER], "rejected": [USER, MIDDLE]}, "prompt"),
    ("preference", {"prompt": [USER], "chosen": [USER, ANSWER],
                    "rejected": [{"role": "user", "content": "z"}, MIDDLE]}, "do not continue"),
    ("preference", {"prompt": [USER], "chosen": [{"role": "system", "content": "s"}, USER, ANSWER],
                    "rejected": [{"role": "system", "content": "s"}, USER, MIDDLE]}, "system"),
    ("preference", {"prompt": [USER], "chosen": [{**ANSWER, "weight": 0}],
                    "rejected": [MIDDLE]}, "weight 0"),
])  # fmt: skip
def test_a_format_that_is_not_followed_is_refused(holds, given, words):
    with pytest.raises(ConfigError, match=words):
        encoded(holds, None, given, ReadsAll(), "here")


@pytest.mark.parametrize("answer", [
    {"content": "", "id": "x"}, {"content": None, "id": "x"}, {"content": " \n"},
    {"content": [{"type": "text", "text": ""}]}, {"content": [], "tool_calls": [], "audio": None},
    {"content": "", "name": "bot", "weight": 1, "reasoning_content": ""},
])  # fmt: skip
def test_an_answer_that_says_nothing_is_empty_whatever_labels_it_has(answer):
    empty = {"role": "assistant", **answer}
    assert encoded("messages", None, {"messages": [USER, empty]}, ReadsAll(), "here") is None
    row = {"prompt": [USER], "chosen": [ANSWER], "rejected": [empty]}
    assert encoded("preference", None, row, ReadsAll(), "here") is None
    row = {"messages": [USER, empty, USER, ANSWER]}
    tokens = encoded("messages", None, row, ReadsAll(), "here")
    assert text_of(tokens.ids[tokens.is_answer]) == "a;"


def test_rows_with_unknown_keys_are_skipped_and_counted_and_nulls_of_arrow_are_absent(tmp_path):
    lines = [row(), row(id=1), row(user={"name": "Ann"}), row({"training": True})]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def documents(source, **settings):
        return Documents(source, "messages", tokenizer=ReadsAll(), heldout_percent=0, **settings)

    with pytest.raises(ConfigError, match=r"a\.jsonl:2.*'id'.*ignored_keys"):
        documents(JsonLines(f"{tmp_path}/a.jsonl")).check()
    skipping = JsonLines(f"{tmp_path}/a.jsonl", skip=("unknown_key",))
    assert documents(skipping).left_out == {"unknown_key": 2}
    assert documents(skipping, ignored_keys=("id",)).left_out == {"unknown_key": 1}
    pairs = [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [MIDDLE], "score": i} for i in range(3)
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = {"tokenizer": ReadsAll(), "shuffle": False, "heldout_percent": 0}
    with pytest.raises(ConfigError, match=r"p\.jsonl:1.*'score'"):
        PreferenceData(f"{tmp_path}/p.jsonl", "train", 1, 99, **settings).check()
    data = PreferenceData(
        f"{tmp_path}/p.jsonl", "train", 1, 99, ignored_keys=("score",), **settings
    )
    assert len(data.pairs) == 3

    def called(arguments):
        return {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        # Before version 22, pyarrow sorts these keys.
                        {"function": {"arguments": arguments, "name": "f"}},
                    ],
                },
            ],
            "tools": [{"name": "f", "parameters": arguments}],
        }

    rows = [called({"x": 1}), called({"y": {"z": "2"}}), {"messages": [USER, ANSWER]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    of_arrow, of_lines = (
        documents(source)
        for source in (Parquet(f"{tmp_path}/a.parquet"), JsonLines(f"{tmp_path}/b.jsonl"))
    )
    assert [text_of(of_arrow[i].ids) for i in range(3)] == [
        text_of(of_lines[i].ids) for i in range(3)
    ]


# Name: the messages before the answer, and what else the row contains. X is a special token.
INJECTED = {
    "user": ([{"role": "user", "content": "qX"}], {}),
    "system": ([{"role": "system", "content": "Xq"}, USER], {}),
    "role": ([{"role": "userX", "content": "q"}], {}),
    "parts": ([{"role": "user", "content": ["q", {"type": "text", "text": "X"}]}], {}),
    "tool result": ([USER, MIDDLE, {"role": "tool", "content": '{"x": "X"}'}], {}),
    "tools": ([USER], {"tools": [{"type": "function", "function": {"name": "f", "d": "X"}}]}),
    "tools, JSON text": ([USER], {"tools": '[{"name": "f", "description": "X"}]'}),
    "documents": ([USER], {"documents": [{"text": "X"}]}),
}
LLAMA3 = load_tokenizer(GOLDENS / "tokenizers" / "llama3")
LLAMA3.chat = ChatTemplate(ReadsAll.chat.source, reserved=LLAMA3.chat.reserved)


class Bytes(ByteTokenizer):
    chat = ChatTemplate(ReadsAll.chat.source, None, None, ByteTokenizer.chat.reserved, False)


def with_token(value, token):
    """Returns a JSON value in which each X is replaced by the token."""
    if isinstance(value, str):
        return value.replace("X", json.dumps(token)[1:-1] if value.startswith("[{") else token)
    if isinstance(value, list):
        return [with_token(item, token) for item in value]
    if isinstance(value, dict):
        return {key: with_token(item, token) for key, item in value.items()}
    return value


@pytest.mark.parametrize(("tokenizer", "token"), [
    (Bytes(), "\x02"), (Bytes(), "\x03"), (LLAMA3, "<|eot_id|>"), (LLAMA3, "<|begin_of_text|>"),
])  # fmt: skip
@pytest.mark.parametrize("name", INJECTED)
def test_special_tokens_are_refused_outside_of_the_assistants_messages(
    name, tokenizer, token, tmp_path
):
    messages, more = INJECTED[name]
    given = with_token({"messages": [*messages, ANSWER], **more}, token)
    shown = re.escape(repr(token))

    def check(way):
        with pytest.raises((ConfigError, ApiError), match=f"contains {shown}"):
            way(json.loads(json.dumps(given)), tokenizer, tmp_path)

    assert_each(check, WAYS)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(given) + "\n" + json.dumps(row()) + "\n")
    source = JsonLines(str(path), skip=("special_token",))
    documents = Documents(source, "messages", tokenizer=tokenizer)
    assert documents.left_out == {"special_token": 1} and len(documents.lengths) == 1


def test_parts_that_form_a_special_token_together_are_refused():
    parts = ["a<|eot", {"type": "text", "text": "_id|>"}]
    with pytest.raises(ConfigError, match="message 0 .*'<|eot_id|>'"):
        prompt_ids([{"role": "user", "content": parts}], LLAMA3, "here")


def test_an_answer_of_bytes_must_not_contain_the_ends_of_turns():
    messages = [USER, {**ANSWER, "content": "a\x03b"}]
    for template in (ByteTokenizer.chat, pickle.loads(pickle.dumps(Bytes.chat))):
        with pytest.raises(ConfigError, match=r"message 1 .*'assistant'.*'\\x03'"):
            template.checked(messages, {}, template.render, is_training=True)
        # The model may have written this.
        assert "a\x03b" in template.checked(messages, {}, template.render)
    with pytest.raises(ConfigError, match=r"here: message 1 .*'\\x03'"):
        encoded("messages", None, {"messages": messages}, ByteTokenizer(), "here")


def test_the_assistant_and_strings_may_contain_special_tokens():
    given = row({"content": "<|eot_id|>"})
    ids = encoded("messages", None, given, LLAMA3, "here").ids.tolist()
    token = LLAMA3.encode("<|eot_id|>", False).tolist()
    assert len(token) == 1 and token[0] in ids
    for tokenizer, text in (LLAMA3, "a<|eot_id|>"), (Bytes(), "a\x03"):
        expected = [*tokenizer.document_start, *tokenizer.encode(text, False)]
        assert prompt_ids(text, tokenizer, "--prompt").tolist() == expected


def test_lm_eval_reads_special_tokens_in_benchmarks_like_transformers(caplog):
    asked = [{"role": "user", "content": "a\x03"}]
    assert chat_text(Bytes(), asked, True) == "<user>a\x03;<assistant>"
    assert "contains '\\x03'" in caplog.text


def test_tools_of_a_request_need_a_choice_of_none():
    body = {"model": "m", "messages": [USER], "tools": [TOOL]}
    with pytest.raises(ApiError, match="tool_choice"):
        chat(json.dumps(body).encode())


def test_arguments_stay_json_in_templates_that_join_or_print_them(tmp_path):
    calls = [{"function": {"name": "f", "arguments": '{"x":1}'}}]
    messages = [USER, {"role": "assistant", "tool_calls": calls}, USER]
    for use in ("'' + c.function.arguments", "c.function.arguments"):

        class Joins(ByteTokenizer):
            chat = ChatTemplate(
                "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ " + use + " }}"
                "{% endfor %}{{ m.content or '' }}{% endfor %}"
            )

        assert Joins().apply_chat_template(messages, tokenize=False) == 'q{"x":1}q'
        for way in PROMPTS:
            assert way({"messages": [*messages, ANSWER]}, Joins(), tmp_path) == 'q{"x":1}q'


def test_chats_of_lm_eval_are_read_alike():
    asked = [{"role": "user", "content": ["q", {"type": "text", "text": "r"}], "name": None}]
    assert chat_text(ReadsAll(), asked, True) == "<user>qr;<assistant>"
    begun = [*asked, {"role": "assistant", "content": [{"type": "text", "text": "m"}]}]
    assert chat_text(ReadsAll(), begun, False) == "<user>qr;<assistant>m"
    with pytest.raises(ConfigError, match="name"):
        chat_text(ReadsContent(), [{**USER, "name": "Ann"}], True)
