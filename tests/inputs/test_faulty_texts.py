"""Faulty texts, conversations and preferences: read correctly, or refused with their location."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from praxis_lite import ConfigError
from praxis_lite.inputs import (
    ByteTokenizer,
    Documents,
    JsonLines,
    Parquet,
    PreferenceData,
    TextCorpus,
    TextFiles,
)
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate, chatml
from praxis_lite.trainer.decoding.user_prompts import read_prompts

USER, ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
OTHER = {"role": "assistant", "content": "z"}


class Chat(ByteTokenizer):
    chat = ChatTemplate(chatml("<", ">"))


def documents(path, holds, skip=(), **settings):
    result = Documents(JsonLines(str(path), skip=skip), holds, tokenizer=Chat(), **settings)
    result.check()
    return result


def text_of(result, index=0):
    return bytes(int(i) for i in result[index].ids if i < 256).decode()


@pytest.mark.parametrize(
    ("holds", "line"),
    [
        ("text", '{"text": "HALF"}'),
        ("completion", '{"prompt": "HALF", "completion": "y"}'),
        ("completion", '{"prompt": "y", "completion": "HALF"}'),
        ("messages", json.dumps({"messages": [USER, ANSWER]}).replace('"y"', '"HALF"')),
        ("messages", json.dumps({"messages": [USER, ANSWER]}).replace('"user"', '"HALF"')),
        ("sharegpt", '{"conversations": [{"from": "human", "value": "HALF"}]}'),
        ("alpaca", '{"instruction": "HALF", "input": "", "output": "y"}'),
    ],
)
def test_half_a_character_is_refused_by_its_line_or_skipped(tmp_path, holds, line):
    (tmp_path / "a.jsonl").write_text(line.replace("HALF", "hi \\ud83d") + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl.*UTF-8"):
        documents(tmp_path / "a.jsonl", holds)
    left_out = documents(tmp_path / "a.jsonl", holds, ("not_utf8",)).left_out
    assert left_out == {"not_utf8": 1}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("né".encode("latin1"), "iconv -f LATIN1"),
        ("né".encode("utf-16"), "UTF-16"),
        ("né".encode("utf-32"), "UTF-32"),
        (b"a\0b", "NUL"),
        (b"\xc0\xaf", "UTF-8"),
    ],
)
def test_other_encodings_are_refused_by_file_and_line_in_every_reader(tmp_path, data, words):
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    for read in (
        lambda: TextCorpus(str(path), heldout_percent=0).documents("train"),
        lambda: TextFiles(str(path))[0],
        lambda: read_prompts(path),
    ):
        with pytest.raises(ConfigError, match=rf"a\.txt.*{words}"):
            read()


def test_a_mark_of_utf_8_is_no_text_and_a_separator_ends_no_prompt(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\u2028two\x85three\r\nfour\n".encode())
    assert read_prompts(tmp_path / "a.txt") == ["one\u2028two\x85three", "four"]
    assert TextFiles(f"{tmp_path}/a.txt")[0]["text"].startswith("one")


@pytest.mark.parametrize("name", ["p.jsonl", "p.JSONL", "p.Jsonl", "p.ndjson", "p.json"])
def test_prompts_in_json_lines_are_recognized_by_any_usual_extension(tmp_path, name):
    (tmp_path / name).write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert read_prompts(tmp_path / name) == ["a", "b"]
    (tmp_path / name).write_text('[\n{"prompt": "a"}\n]\n')
    with pytest.raises(ConfigError, match="line 1"):
        read_prompts(tmp_path / name)


def test_json_prompts_in_a_file_with_another_name_are_text_with_a_warning(tmp_path, caplog):
    (tmp_path / "p.txt").write_text('{"prompt": "a"}\n{"no": 1}\n')
    assert len(read_prompts(tmp_path / "p.txt")) == 2 and not caplog.text
    (tmp_path / "p.txt").write_text('{"prompt": "a"}\n')
    assert read_prompts(tmp_path / "p.txt") == ['{"prompt": "a"}']
    assert "p.txt contains JSON" in caplog.text


@pytest.mark.parametrize("name", ["a.JSONL.GZ", "a.Jsonl.Zst", "a.JSONL"])
def test_extensions_in_upper_case_are_written_and_read_like_in_lower_case(tmp_path, name):
    def make(folder):
        return [{"text": "one"}, {"text": "two"}]

    source = JsonLines(f"{tmp_path}/{name}", make=make)
    assert [example["text"] for example in source] == ["one", "two"]
    is_compressed = not (tmp_path / name).read_bytes().startswith(b"{")
    assert is_compressed == (name != "a.JSONL")


def test_nulls_of_arrow_are_absent_and_a_null_text_is_said_as_null(tmp_path):
    rows = [
        {"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f"}]}]},
        {"messages": [USER, ANSWER]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")

    class Sees(ByteTokenizer):
        chat = ChatTemplate(
            "{% for m in messages %}{{ m.role + ':' }}{% if 'tool_calls' in m %}{{ 'CALL' }}"
            "{% endif %}{{ m.content }}{{ '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
        )

    texts = []
    for source in (JsonLines(f"{tmp_path}/a.jsonl"), Parquet(f"{tmp_path}/a.parquet")):
        result = Documents(source, "messages", tokenizer=Sees())
        result.check()
        texts.append([text_of(result, i) for i in range(2)])
    assert texts[0] == texts[1] and "CALL" in texts[0][0] and "CALL" not in texts[0][1]
    (tmp_path / "null.jsonl").write_text('{"text": null}\n')
    with pytest.raises(ConfigError, match="'text'"):
        documents(tmp_path / "null.jsonl", "text")


@pytest.mark.parametrize(
    ("holds", "empty", "full"),
    [
        ("text", {"text": ""}, {"text": "abc"}),
        ("completion", {"prompt": "x", "completion": ""}, {"prompt": "x", "completion": "y"}),
        ("messages", {"messages": []}, {"messages": [USER, ANSWER]}),
        ("messages", {"messages": [USER, {**ANSWER, "content": ""}]}, {"messages": [USER, ANSWER]}),
        ("ids", {"ids": []}, {"ids": [1, 2]}),
    ],
)
def test_an_empty_document_is_none_and_is_counted(tmp_path, holds, empty, full):
    lines = [json.dumps(empty)] * 3 + [json.dumps(full)] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    result = documents(tmp_path / "a.jsonl", holds)
    assert len(result.lengths) == 2 and sum(result.left_out.values()) == 3


@pytest.mark.parametrize(
    ("name", "harmless", "mask"),
    [
        ("labels", [5, 6, 7], [-100, 6, 7]),
        ("attention_mask", [1, 1, 1], [1, 1, 0]),
        ("loss_mask", [True, True, True], [False, True, True]),
        ("completion_mask", [1, 1, 1], [0, 0, 1]),
    ],
)
def test_masks_of_ids_that_would_be_ignored_are_errors(tmp_path, name, harmless, mask):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"ids": [5, 6, 7], name: harmless, "url": "x"}))
    assert documents(path, "ids").lengths.tolist() == [3]
    path.write_text(json.dumps({"ids": [5, 6, 7], name: mask}))
    with pytest.raises(ConfigError, match=f"a.jsonl:1 has the key '{name}', which excludes"):
        documents(path, "ids")
    assert documents(path, "ids", ignored_keys=[name]).lengths.tolist() == [3]


def pairs_of(path, line, **settings):
    path.write_text(json.dumps(line) + "\n")
    data = PreferenceData(
        str(path), "train", 1, 200, Chat(), shuffle=False, heldout_percent=0, **settings
    )
    data.check()
    return [[bytes(int(i) for i in item.ids if i < 256).decode() for item in p] for p in data.pairs]


def test_preferences_are_read_as_trl_reads_them(tmp_path):
    path = tmp_path / "p.jsonl"
    expected = pairs_of(path, {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]})
    assert expected[0][0].count("x") == 1
    for prompt in ("x", None, [USER]):
        line = {"prompt": prompt, "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
        assert pairs_of(path, line) == expected, prompt
    assert pairs_of(path, {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}) == expected
    for same in ("y", [USER, ANSWER]):
        with pytest.raises(ConfigError, match="p.jsonl"):
            pairs_of(path, {"prompt": "x", "chosen": same, "rejected": same})
