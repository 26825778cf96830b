"""Conversations and preferences as batches: which labels count, and how rows are shared."""

import json
import pickle

import pytest

from praxis_lite import ConfigError
from praxis_lite.config.build import build
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.experiments import huggingface
from praxis_lite.inputs import ByteTokenizer, Documents, JsonLines, PackedText, PreferenceData
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.text.conversations import tokens_of
from praxis_lite.inputs.text.encoding import encoded
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from tests.support.goldens import GOLDENS

LLAMA = load_tokenizer(GOLDENS / "tokenizers" / "llama3")
SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who is there?"},
    {"role": "assistant", "content": "né, a fox"},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "There."},
]


def conversation(number):
    user = {"role": "user", "content": f"What is {number}?"}
    return {"messages": [user, {"role": "assistant", "content": "a" * (number % 13 + 1)}]}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    path.write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(60)), "utf-8")
    return path


SIZES = {"batch_size": 4, "seq_len": 70, "shuffle": False}


def chats(path, split="train", heldout_percent=10, **settings):
    documents = Documents(JsonLines(str(path)), "messages", heldout_percent=heldout_percent)
    return PackedText(documents, split, **SIZES | settings)


def pairs(path, **settings):
    return PreferenceData(str(path), "train", **SIZES | {"heldout_percent": 0} | settings)


def conversations_of(rows):
    return [rows.documents[number] for number in rows.documents.of_split(rows.split)]


@pytest.mark.parametrize(
    ("tokenizer", "end"), [(LLAMA, "<|eot_id|>"), (ByteTokenizer(), "\x03")], ids=["llama", "bytes"]
)
def test_the_assistants_words_and_the_ends_of_its_turns_are_the_answers(tokenizer, end):
    ids, is_answer = tokens_of(SAID, tokenizer, "here")
    assert ids.tolist() == tokenizer.apply_chat_template(SAID).tolist()
    assert tokenizer.decode(ids[is_answer]) == f"né, a fox{end}There.{end}"
    _, is_last = tokens_of(SAID, tokenizer, "here", first=3)
    assert tokenizer.decode(ids[is_last]) == f"There.{end}"


def test_half_a_character_in_tools_of_json_is_refused_by_its_line():
    tokenizer = ByteTokenizer()
    tokenizer.chat = ChatTemplate(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    row = {"messages": SAID[1:3], "tools": json.dumps([{"name": "\ud83d"}])}
    with pytest.raises(BadExample, match="file:3.*UTF-8.*not_utf8"):
        encoded("messages", None, row, tokenizer, "file:3")


def test_a_tokenizer_that_has_formatted_a_conversation_is_sent_to_other_processes():
    LLAMA.fingerprint()  # It formats a conversation to find the end of a turn.
    sent = pickle.loads(pickle.dumps(LLAMA))
    assert sent.apply_chat_template(SAID).tolist() == LLAMA.apply_chat_template(SAID).tolist()


def test_a_template_that_rewrites_earlier_turns_must_mark_its_answers():
    rewrites = (
        "{% for m in messages %}[{{ m.role }}]{% if loop.last %}!{% endif %}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]!{% endif %}"
    )
    tokenizer = ByteTokenizer()
    tokenizer.chat = ChatTemplate(rewrites)
    with pytest.raises(ConfigError, match="file:3.*2"):
        tokens_of(SAID, tokenizer, "file:3")
    tokenizer.chat = ChatTemplate(
        rewrites.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    )
    ids, is_answer = tokens_of(SAID[3:], tokenizer, "file:3")
    assert tokenizer.decode(ids[is_answer]) == "Where?There."


def test_text_with_the_markers_of_answers_is_refused_or_left_unchanged():
    tokenizer = ByteTokenizer()
    for marker in "\ufdd0\ufdd1":
        said = [{"role": "user", "content": f"a{marker}b"}, *SAID[2:3]]
        with pytest.raises(ConfigError, match=f"U\\+{ord(marker):X}"):
            tokens_of(said, tokenizer, "file:3")
        with pytest.raises(ConfigError, match=f"U\\+{ord(marker):X}"):
            tokenizer.apply_chat_template(said)
        plain = ByteTokenizer()
        plain.chat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
        assert plain.apply_chat_template(said, tokenize=False) == f"a{marker}bné, a fox"


def test_rows_are_shared_and_every_conversation_is_in_one_of_them_once(path):
    actual, tokenizer = chats(path), ByteTokenizer()
    expected = {
        tokenizer.decode(tokenizer.apply_chat_template(conversation(i)["messages"]))
        for i in range(60)
    } - {tokenizer.decode(item.ids) for item in conversations_of(chats(path, "heldout"))}
    assert len(conversations_of(actual)) == len(expected) > 40
    texts, answers = [], 0
    for batch in actual.batches():
        for row in range(4):
            segments = batch["segment_ids"][row]
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                assert batch["segment_pos"][row][here].tolist() == list(range(here.sum()))
                ids, labels = batch["ids"][row][here], batch["labels"][row][here]
                assert ids[1:].tolist() == labels[:-1].tolist()
                texts.append(tokenizer.decode([*ids, labels[-1]]))
                weighs = batch["weights"][row][here] > 0
                assert set(tokenizer.decode(labels[weighs])) == {"a", "\x03"}
                answers += weighs.sum()
            assert not batch["weights"][row][segments == 0].any()
    assert len(texts) == len(set(texts)) and set(texts) == expected
    assert answers == sum(element.is_answer.sum() for element in conversations_of(actual))
    # Most of them share a row: 70 tokens hold two.
    assert actual.table.num_rows < 0.8 * len(expected)
    assert chats(path, packing=False).table.num_rows == len(expected)


BAD = {
    "{": "chat.jsonl:2.*JSON",
    '{"text": "a"}': r"chat.jsonl:2.*'messages'.*\['text'\]",
    '{"messages": "a"}': 'chat.jsonl:2.*messages.*"a"',
    '{"messages": [{"role": "user", "content": "a"}]}': r"chat.jsonl:2.*\['user'\]",
    json.dumps(
        conversation(3)
        | {
            "messages": [
                *conversation(3)["messages"],
                {"role": "assistant", "content": "b" * 99},
            ]
        }
    ): r"chat.jsonl:2 .*1.. .*seq_len \+ 1 = 71",
}


@pytest.mark.parametrize("line", BAD)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line):
    path = tmp_path / "chat.jsonl"
    path.write_text(f"{json.dumps(conversation(1))}\n{line}\n")
    with pytest.raises(ConfigError, match=BAD[line]):
        chats(path, heldout_percent=0, too_long="refuse").check()


FORMS = [
    {"prompt": "Who?", "chosen": " I.", "rejected": " You, perhaps."},
    {"prompt": SAID[1:2], "chosen": SAID[2:3], "rejected": SAID[4:5]},
    {"chosen": SAID[1:3], "rejected": [SAID[1], SAID[4]]},
]


def test_pairs_are_read_in_each_form_of_trl_and_only_answers_count(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in FORMS), "utf-8")
    actual, tokenizer = pairs(path), ByteTokenizer()
    (batch,) = actual.batches()
    assert batch["weights"].tolist() == [1, 1, 1, 0]
    answers = [
        [
            tokenizer.decode(batch["labels"][row, side][batch["answers"][row, side] > 0])
            for side in range(2)
        ]
        for row in range(3)
    ]
    message = ["né, a fox\x03", "There.\x03"]
    assert answers == [[" I.", " You, perhaps."], message, message]
    assert batch["answers"][0].sum(-1).tolist() == [4, 15]  # With the end of the text.
    assert (batch["ids"][1] == batch["ids"][2]).all()
    path.write_text('{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(ConfigError, match="pairs.jsonl:1.*\\['chosen'.*'prompt'\\]"):
        pairs(path).check()


def test_without_files_they_are_about_python(tmp_path):
    config = configured(huggingface.ChatFull, [f"folder={tmp_path / 'questions'}"])
    actual = build(config).datasets["train"]
    of_two = PreferenceData(None, "train", 2, 600, shuffle=True, heldout_percent=0)
    actual.check()
    of_two.check()
    assert len(actual.documents.lengths) == len(of_two.pairs) > 40
    assert "Python" in ByteTokenizer().decode(actual.documents[0].ids)
    assert [path.name for path in (tmp_path / "questions").glob("*.jsonl")] == ["questions.jsonl"]
