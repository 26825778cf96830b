"""--prompt, --prompts and --chat: what a user gives, and what is seen of it while it comes."""

import io
import json

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.decode import Greedy, Sample
from praxis_lite.decode.continuous_batching import NewTokens
from praxis_lite.inputs.tokenizers import ByteTokenizer
from praxis_lite.job import processes
from praxis_lite.trainer.decoding.decode import ContinuationPrinter, chat
from praxis_lite.trainer.decoding.user_prompts import prompt_batch, prompt_ids, read_prompts, title
from tests.support.job_runs import copy_of_trained, launch, loaded, succeed

PROMPTS = ("The ", "né")


def records_of(job):
    text = job.decode_jsonl("command_line", 7).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return copy_of_trained(tmp_path_factory.mktemp("prompts") / "job")


@pytest.mark.slow
def test_prompts_are_continued_as_python_continues_them_and_printed_in_order(job):
    done = succeed("--mode=decode", f"--job_log_dir={job.path}", "--prompt", *PROMPTS)
    actual = records_of(job)
    expected = loaded(job).generate(list(PROMPTS))
    assert [x["output_ids"] for x in actual] == [x["output_ids"] for x in expected]
    assert [item["prompt"] for item in actual] == list(PROMPTS)
    shown = "".join(
        f"\nprompt {number} of 2: {element['prompt']}\n{element['continuation']}\n"
        for number, element in enumerate(actual, 1)
    )
    assert shown in done.out
    assert "decoded 2 records of command_line with the weights of step 7" in done.out


@pytest.mark.parametrize(
    "prompt",
    [
        "now",
        np.frombuffer(b"now", np.uint8).astype(np.int32),
        [{"role": "user", "content": text} for text in ("first", "then", "now")],
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "now"}]}]},
    ],
    ids=["text", "ids", "conversation", "row"],
)
def test_a_title_is_the_last_message(prompt):
    assert title(prompt, ByteTokenizer()) == "now"


def test_a_conversation_without_messages_is_not_a_prompt():
    with pytest.raises(ConfigError, match="generate is .*messages.*; expected"):
        prompt_ids({"messages": []}, ByteTokenizer(), "generate")


def test_prompts_of_other_lengths_have_few_shapes(job):
    task = loaded(job).partitioner.task
    shapes = [
        prompt_batch(task, [[1], [1] * length]).element_spec()["ids"].shape
        for length in (3, 32, 33, 64)
    ]
    assert shapes == [(2, 32), (2, 32), (2, 64), (2, 64)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompts=nowhere.txt"], "--prompts=nowhere.txt "),
        (["--prompt", "The ", "--mode=eval"], "decode; eval"),
    ],
    ids=str,
)
def test_what_cannot_be_continued_is_refused_in_words(job, options, said):
    done = launch("--mode=decode", f"--job_log_dir={job.path}", *options)
    assert done.code == 2 and said in " ".join(done.err.split()), done.err


def test_a_file_of_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("The \n\nné\n", "utf-8")
    assert read_prompts(path) == ["The ", "né"]
    path = tmp_path / "prompts.jsonl"
    message = [{"role": "user", "content": "Hello"}]
    path.write_text(f'{{"prompt": "The\\n"}}\n{json.dumps({"messages": message})}\n', "utf-8")
    text, conversation = read_prompts(path)
    assert text == "The\n" and conversation.messages == message


@pytest.mark.parametrize("key", ["prompt", "messages", "conversations", "text"])
def test_a_row_is_the_same_prompt_in_python_as_in_a_file(tmp_path, key):
    message = [{"role": "user", "content": "Hello"}]
    row = {"prompt": "Hello"} if key == "text" else {key: message}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    (prompt,) = read_prompts(tmp_path / "prompts.jsonl")
    tokenizer = ByteTokenizer()
    expected = tokenizer.encode_prompt("Hello")
    if key != "text":
        expected = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    for form in (row, prompt):
        assert prompt_ids(form, tokenizer, "generate").tolist() == expected.tolist()
        assert title(form, tokenizer) == "Hello"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\n \n", "prompts.jsonl"),
        ('{"prompt": "a"}\n{"prompt": 3}', '2 is {"prompt": 3};'),
        ('{"messages": [{"role": "user"}]}', "line 1"),
        ("[", "JSON"),
    ],
)
def test_a_file_of_something_else_is_refused_by_its_line(tmp_path, content, said):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_prompts(path)
    assert said in str(error.value)


def shown_of(texts, pieces, **settings):
    """Returns the texts that were written of these continuations, piece by piece."""
    kind = Sample if len(texts) > 2 else Greedy
    decoder = kind(max_decode_steps=99, eos_id=256, **settings)
    written = []
    titles = [f"title {i}" for i in range(len(texts) // decoder.num_hyps)]
    prompts = [np.zeros(0, np.int32)] * len(titles)
    shown = ContinuationPrinter(titles, prompts, ByteTokenizer(), decoder, written.append)
    for index, new, done in pieces:
        shown.add(NewTokens(index, np.array(new, np.int32), np.zeros(len(new)), done))
    return written


def in_pieces(texts, seed):
    """Yields random pieces of the texts' bytes, in turns, the last with the end of text."""
    rng = np.random.default_rng(seed)
    left = {index: [*text.encode(), 256] for index, text in enumerate(texts)}
    while left:
        index = rng.choice(list(left))
        size = rng.integers(1, 4)
        piece, left[index] = left[index][:size], left[index][size:]
        done = not left[index]
        if done:
            del left[index]
        yield index, piece, done


@pytest.mark.parametrize("seed", range(2))
def test_pieces_never_split_a_character_and_add_up_to_the_texts_in_order(seed):
    texts = ["né 😀 end", "zwei\nZeilen — ß"]
    written = shown_of(texts, in_pieces(texts, seed))
    assert "".join(written) == "".join(
        f"\nprompt {i + 1} of 2: title {i}\n{text}\n" for i, text in enumerate(texts)
    )
    assert not any("\ufffd" in item for item in written)
    assert sum(map(bool, written)) > 7


def test_a_single_continuation_has_no_heading_and_comes_as_it_is_made():
    pieces = [(0, list(b"ab"), False), (0, list(b"c"), False), (0, [256], True)]
    assert [item for item in shown_of(["abc"], pieces) if item] == ["ab", "c", "\n"]


@pytest.mark.parametrize("seed", range(2))
def test_a_stop_string_is_never_shown_not_even_its_beginning(seed):
    texts = ["one. END of it"]
    written = shown_of(texts, in_pieces(texts, seed), stop_strings=(" END",))
    assert "".join(written) == "one.\n"
    texts = ["one E N END"]
    assert "".join(shown_of(texts, in_pieces(texts, seed), stop_strings=("ENDE",))) == (
        "one E N END\n"
    )


@pytest.mark.slow
def test_a_conversation_is_read_line_by_line_and_each_answer_is_part_of_the_next_prompt(
    job, monkeypatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\nWhere?\n\nWho?\n"))
    done = succeed("--mode=decode", f"--job_log_dir={job.path}", "--chat")
    model = loaded(job)

    def answer(*message):
        roles = ("user", "assistant", "user")
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, message, strict=False)
        ]
        return model.generate([messages])[0]["continuation"]

    first = answer("Who?")
    shown = done.out[done.out.index("Ctrl-D") :].partition("\n")[2]
    assert shown == f"{first}\n{answer('Who?', first, 'Where?')}\n(a new conversation)\n{first}\n"


@pytest.mark.slow
def test_each_turn_of_a_chat_has_its_own_draws(job, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n\nWho?\n"))
    done = succeed(
        "--mode=decode",
        f"--job_log_dir={job.path}",
        "--chat",
        "--set",
        "task.decoder=praxis_lite.decode.Sample()",
        "task.decoder.temperature=9.0",
    )
    first, _, second = done.out.partition("Ctrl-D")[2].partition("(a new conversation)\n")
    assert first.partition("\n")[2] != second


def test_a_chat_needs_a_single_process(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 3)
    with pytest.raises(ConfigError, match="--chat requires a single process, but there are 3"):
        chat(None, None, ["hi"])
