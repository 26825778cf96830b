"""Tokenizers: the ids of the real transformers, and text that comes back, whole or in pieces."""

import json
import logging
import random
import shutil

import numpy as np
import pytest

from praxis_lite import ConfigError, huggingface
from praxis_lite.inputs import Documents, JsonLines, TextCorpus, TextPrompts
from praxis_lite.inputs.numpy_data import TextWindows
from praxis_lite.inputs.text.encoding import encoded
from praxis_lite.inputs.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    StreamingDecoder,
    TokenIds,
    as_tokenizer,
    load_tokenizer,
)
from tests.support.commands import praxis
from tests.support.goldens import GOLDENS, golden

LLAMA = GOLDENS / "tokenizers" / "llama3"
OF_LLAMA = "tokenizers/llama3/goldens.json"
TEXTS = [
    "Hello, world!",
    " two  blanks ",
    "né — 😀 ½\n\ttab",
    "",
    "日本語のテキスト",
    "a\r\n\r\nb",
    "\u200bx\u0301",
]


def made_lines(count):
    words = ["the", "quick", "brown", "fox", "over", "dog", "né", "😀", "and", "then", "another"]
    return [" ".join(random.Random(i).choices(words, k=9)) for i in range(count)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A BPE of a text made here, by the command."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text("\n".join(made_lines(400)), "utf-8")
    assert (
        praxis(
            "tokenizers", "train", str(folder / "*.txt"), str(folder / "bpe"), "--vocab-size=300"
        )
        == 0
    )
    return folder / "bpe"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A SentencePiece model with bytes for what it has no piece of."""
    import sentencepiece

    pytest.importorskip("transformers", minversion="5.24")
    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(made_lines(300)),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder


@pytest.fixture(params=["llama3", "trained", "pieces", "bytes", "characters"])
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "characters":
        return CharacterTokenizer("".join(sorted(set("".join([*TEXTS, *made_lines(40)])))))
    known = {"llama3": lambda: LLAMA}
    path = (
        known[request.param]() if request.param in known else request.getfixturevalue(request.param)
    )
    return load_tokenizer(path)


def test_ids_and_texts_are_those_of_transformers():
    tokenizer = huggingface.load_tokenizer(LLAMA)
    for item in golden(OF_LLAMA)["strings"]:
        assert tokenizer.encode(item["text"]).tolist() == item["ids"]
        assert tokenizer.encode(item["text"], False).tolist() == item["ids_without_special"]
        assert tokenizer.decode(item["ids"]) == item["decoded"]
        assert tokenizer.decode(item["ids"], True) == item["decoded_skipping_special"]
    special = golden(OF_LLAMA)["special_ids"]
    actual = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    assert actual == {name: special[name] for name in actual}
    assert tokenizer.vocab_size == golden(OF_LLAMA)["size_with_added_tokens"]


def test_chats_are_those_of_transformers():
    tokenizer = huggingface.load_tokenizer(LLAMA)
    for item in golden(OF_LLAMA)["conversations"]:
        given = item["messages"], item["add_generation_prompt"]
        assert tokenizer.apply_chat_template(*given, tokenize=False) == item["text"]
        assert tokenizer.apply_chat_template(*given).tolist() == item["ids"]


def test_text_comes_back_whole(tokenizer):
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, False)) == text
        assert tokenizer.encode(text).dtype == np.int32
    documents = tokenizer.encode_documents([text.encode() for text in TEXTS])
    for text, document in zip(TEXTS, documents, strict=True):
        assert document.tolist() == tokenizer.encode(text, False).tolist()


def test_what_is_no_text_is_refused(tokenizer):
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
        with pytest.raises(ConfigError, match=r"'\\ud800'.*1"):
            encode("a\ud800b")
        with pytest.raises(ConfigError, match="None.*str"):
            encode(None)


def test_tokens_know_where_they_stand_in_the_text(tokenizer):
    text = "né 😀 the fox"
    ids, spans = tokenizer.encode_with_offsets(text)
    assert ids.tolist() == tokenizer.encode(text, False).tolist()
    places = spans[:, 0]
    # Together they are the whole text, and each begins where the one before it ends, or with it.
    assert spans.min() == 0 and spans[:, 1].max() == len(text)
    assert (spans[1:, 0] <= spans[:-1, 1]).all() and (spans[:, 1] > places).all()
    # From each token that begins a character on, its ids are the rest of the text.
    for i in np.flatnonzero(np.diff(places, prepend=-1) > 0):
        actual = tokenizer.decode(ids[i:])
        assert text[places[i] :] in (actual, f" {actual}"), (i, actual)


def test_pieces_of_a_stream_are_whole_characters_and_add_up(tokenizer):
    rng = np.random.default_rng(7)
    streams = [tokenizer.encode(text).tolist() for text in TEXTS]
    # Bytes end with the first end of a text.
    pool = range(256)
    if not isinstance(tokenizer, ByteTokenizer):  # Of a run of bytes all are unknown if one is.
        names = map(tokenizer.name_of, range(tokenizer.vocab_size))
        pool = [i for i, name in enumerate(names) if not (name or "").startswith("<0x")]
    streams += [rng.choice(pool, 40).tolist() for _ in range(20)]
    for skips in (False, True):
        for ids in streams:
            stream = StreamingDecoder(tokenizer, skips)
            actual = [stream.push(item) for item in ids]
            assert "".join([*actual, stream.flush()]) == tokenizer.decode(ids, skips)
    whole = "é 😀"
    stream = StreamingDecoder(tokenizer)
    assert not any("\ufffd" in stream.push(element) for element in tokenizer.encode(whole).tolist())


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system, please') }}", "no system, please"),
        ("{{ messages[0]['content'].__class__.__mro__ }}", "unsafe"),
        ("{% for", "Jinja"),
        ("{{ messages[0]['content'] + 3 }}", '"int"'),
        ("\udcff", "chat_template.jinja cannot be read"),
    ],
)
def test_a_template_is_sandboxed_and_its_words_reach_the_user(tmp_path, template, said):
    shutil.copytree(LLAMA, tmp_path / "one")
    file = tmp_path / "one" / "chat_template.jinja"
    file.write_text(template, "utf-8", "surrogateescape")
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(tmp_path / "one").apply_chat_template([{"role": "user", "content": "a"}])


def test_a_command_trains_one_with_a_template_that_marks_answers(trained):
    tokenizer = load_tokenizer(trained)
    assert tokenizer.vocab_size == 300 and len(tokenizer.encode(" the the")) == 2
    message = [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]
    text, spans = tokenizer.chat.answers(message)
    assert [text[slice(*span)] for span in spans] == ["dog<|end_of_turn|>"]
    assert text == tokenizer.apply_chat_template(message, tokenize=False)
    asked = tokenizer.apply_chat_template(message[:1], True, tokenize=False)
    assert text.startswith(asked + "dog")
    # An answer ends with its turn.
    assert set(tokenizer.eos_ids) == {tokenizer.eos_id, int(tokenizer.encode("<|end_of_turn|>")[0])}


def test_a_byte_order_mark_is_not_part_of_a_template(trained, tmp_path):
    (tmp_path / "a.jinja").write_text("{{ messages[0].content }}", "utf-8-sig")
    options = ["--vocab-size=300", "--chat-template", tmp_path / "a.jinja"]
    files = trained.parent / "*.txt"
    assert praxis("tokenizers", "train", files, tmp_path / "new", *options) == 0
    message = [{"role": "user", "content": "fox?"}]

    def rendered():
        return load_tokenizer(tmp_path / "new").apply_chat_template(message, tokenize=False)

    assert rendered() == "fox?"
    (tmp_path / "new" / "chat_template.jinja").write_bytes((tmp_path / "a.jinja").read_bytes())
    assert rendered() == "fox?"


def test_the_command_says_what_it_cannot_do(trained, tmp_path, capsys):
    text = str(trained.parent / "*.txt")
    assert praxis("tokenizers", "train", text, trained) == 2
    assert str(trained) in capsys.readouterr().err
    assert praxis("tokenizers", "train", text, tmp_path / "new", "--vocab-size=200") == 2
    assert "259" in capsys.readouterr().err
    assert praxis("tokenizers", "train", tmp_path / "none*", tmp_path / "new") == 2


@pytest.mark.parametrize("token", [
    "a", "é", "Ġ", "7", "123", " ", "\n", "\t ", "", "\udcff", "<|a\ud83d|>", "the", " the",
    "@user", "###", "hello world", "\u00a0", " <|a|>", "<|a|>\n", "🙂", "<|b|>", "<|end_of_text|>",
], ids=ascii)  # fmt: skip
def test_a_special_token_that_text_may_have_is_refused_before_anything_is_written(
    trained, tmp_path, token, capsys
):
    options = ["--vocab-size=300", "--special", "<|b|>", token]
    assert (
        praxis(
            "tokenizers", "train", str(trained.parent / "*.txt"), str(tmp_path / "new"), *options
        )
        == 2
    )
    message = " ".join(capsys.readouterr().err.split())
    assert "--special" in message
    assert not (tmp_path / "new").exists()


def test_a_special_token_is_a_single_id_and_the_rest_of_a_text_as_without(trained, tmp_path):
    special = ["<|done|>", "[INST]", "</s>", "<｜User｜>", "<s>", "[end of turn]"]
    files = str(trained.parent / "*.txt")
    assert praxis("tokenizers", "train", files, tmp_path / "new", "--special", *special) == 0
    tokenizer = load_tokenizer(tmp_path / "new")
    for token in special:
        (number,) = tokenizer.encode(token)
        assert number in tokenizer.special_ids
        assert tokenizer.decode([number, *tokenizer.encode(" a the")]) == f"{token} a the"


def test_a_corpus_and_its_prompts_have_the_tokens_of_their_tokenizer(trained):
    files = f"{trained.parent}/*.txt"
    corpus, of_bytes = TextCorpus(files, 0, str(trained)), TextCorpus(files, 0)
    tokenizer = load_tokenizer(trained)
    tokens, texts = corpus.tokens("train"), [text for _, text in of_bytes.documents("train")]
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id))
    assert [tokenizer.decode(document[1:]).encode() for document in documents[1:-1]] == texts
    windows = TextWindows(corpus, "train", 4, 16, shuffle=True)
    assert windows.largest_id() < tokenizer.vocab_size == 300
    assert windows.baselines()["tokens_per_byte"] == (len(tokens) - 1) / (
        sum(map(len, texts)) + len(texts)
    )
    # Other tokens are other data; those of bytes are as ever.
    assert corpus.fingerprint() != of_bytes.fingerprint()
    assert set(of_bytes.fingerprint()) == {"heldout_percent", "sha256"}
    prompts = TextPrompts(corpus, "train", 2, 1, 10, 40)
    (batch,) = prompts.batches()
    prompt = batch["ids"][0, : batch["prefix_lengths"][0]]
    assert any(text.startswith(tokenizer.decode(prompt).encode()) for text in texts)


@pytest.mark.parametrize("holds", ["text", "completion"])
def test_the_log_reports_special_tokens_within_texts(tmp_path, caplog, holds):
    caplog.set_level(logging.INFO)
    texts = ["plain", "<|begin_of_text|>rendered<|eot_id|>", "one<|eot_id|>two", "<|eot_id|>x"]
    rows = [{"text": text, "prompt": "", "completion": text} for text in texts]
    if holds == "completion":
        rows = [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = JsonLines(f"{tmp_path}/*.jsonl")
    Documents(source, holds, tokenizer=str(LLAMA)).check()
    assert "jsonl: 2 texts contain" in caplog.text and "'<|eot_id|>' in" in caplog.text
    assert "a.jsonl:3" in caplog.text
    caplog.clear()
    Documents(source, holds).check()
    assert "special tokens" not in caplog.text


def test_the_log_reports_special_tokens_within_a_corpus(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for name, text in {"a": "plain", "b": "one<|eot_id|>two", "c": "<|eot_id|>"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    TextCorpus(f"{tmp_path}/*.txt", 0, str(LLAMA)).tokens("train")
    assert "2 documents" in caplog.text and "'<|eot_id|>' in b.txt#0" in caplog.text
    caplog.clear()
    TextCorpus(f"{tmp_path}/*.txt", 0).tokens("train")
    assert not caplog.text


def test_a_prompt_within_the_first_character_is_refused(trained, tmp_path):
    (tmp_path / "a.txt").write_text("日本語", "utf-8")
    corpus = TextCorpus(f"{tmp_path}/*.txt", 0, str(trained))
    with pytest.raises(ConfigError, match="first 2 bytes of '日本語'.*min_prompt_bytes"):
        list(TextPrompts(corpus, "train", 2, 1, 2, 2).batches())


def test_a_model_with_a_beginning_of_a_text_has_it_before_each_document(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    tokens = TextCorpus(f"{tmp_path}/*.txt", 0, str(LLAMA)).tokens("train")
    tokenizer = load_tokenizer(LLAMA)
    item = tokenizer.encode("one", False).tolist()
    assert tokens.tolist() == [tokenizer.eos_id, tokenizer.bos_id, *item, tokenizer.eos_id]
    assert tokenizer.encode_prompt("one").tolist() == [tokenizer.bos_id, *item]
    # A text that a template has rendered has its BOS and its EOS once.
    (tmp_path / "a.txt").write_text("<|begin_of_text|>one<|eot_id|>")
    rendered = TextCorpus(f"{tmp_path}/*.txt", 0, str(LLAMA)).tokens("train")
    assert rendered.tolist() == tokens.tolist()
    document = encoded("text", None, {"text": "<|begin_of_text|>one<|eot_id|>"}, tokenizer, "here")
    assert document.ids.tolist() == [tokenizer.bos_id, *item, tokenizer.eos_id]
    assert TokenIds().decode([3, 17]) == "3 17"


def test_a_setting_that_is_no_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="7.*Tokenizer.*None"):
        as_tokenizer(7)


def test_a_character_without_an_id_is_refused():
    tokenizer = CharacterTokenizer("ab")
    assert tokenizer.vocab_size == 2 and tokenizer.encode("abba").tolist() == [0, 1, 1, 0]
    with pytest.raises(ConfigError, match="'c'.*'ab'"):
        tokenizer.encode("abc")


@pytest.mark.parametrize("text", ["1,2,3", "hello", "3 99999999999", "1.5"])
def test_a_text_that_is_no_numbers_is_refused_where_tokens_are_numbers(text):
    with pytest.raises(ConfigError, match="'3 17 5'"):
        TokenIds().encode(text)
