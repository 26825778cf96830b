"""The text of a continuation, of every kind of tokenizer: its first space, characters and stops."""

import functools
import json
import tempfile

import pytest

from praxis_lite import ConfigError
from praxis_lite.decode import Greedy, continuation_text, for_tokenizer
from praxis_lite.decode.stop_strings import ContinuationText
from praxis_lite.inputs.text.pairs import pair_of, prompted
from praxis_lite.inputs.tokenizers import ByteTokenizer, CharacterTokenizer, load_tokenizer
from praxis_lite.inputs.tokenizers.streaming import UNKNOWN
from praxis_tools.serve.api_error import ApiError
from praxis_tools.serve.choice_text import ChoiceText
from praxis_tools.serve.engine import Piece
from praxis_tools.serve.requests import completion
from praxis_tools.serve.served_model import ServedModel

LINES = [f"the cat number {i} sat on the mat:\n yes, it said hello world" for i in range(200)]
# Characters that no line has are bytes, or unknown.
TEXTS = ["the cat said hello", "sat on the mat:\n yes\nthe world", "né 日本 the cat 😀, yes"]
STOP = "<|stop|>"


@functools.cache
def library(kind):
    """Returns a small tokenizer of the library `tokenizers`."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    name, _, scheme = kind.partition(", ")
    special = ["<unk>", "<s>", "</s>", STOP]
    settings = {"vocab_size": 400, "show_progress": False, "special_tokens": special}
    trainer, result = trainers.BpeTrainer, Tokenizer(models.BPE(unk_token="<unk>"))
    if name == "byte level":
        result = Tokenizer(models.BPE())
        result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        result.decoder = decoders.ByteLevel()
        settings["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    elif name == "metaspace":
        result.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        result.decoder = decoders.Metaspace(prepend_scheme=scheme)
    elif name == "llama":
        result = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        result.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        result.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        settings["special_tokens"] = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        settings["vocab_size"] += 256
    else:
        result = Tokenizer(models.WordPiece(unk_token="<unk>"))
        result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        result.decoder, trainer = decoders.WordPiece(), trainers.WordPieceTrainer
    # Without a pre-tokenizer a long line would become a single token.
    lines = [word for line in LINES for word in line.split()] if name == "llama" else LINES
    result.train_from_iterator([*lines, "\n", ":", ", "], trainer(**settings))
    if name == "llama":
        import json

        result.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
        # Bytes are ordinary tokens.

        fields = json.loads(result.to_str())
        fields["added_tokens"] = fields["added_tokens"][: len(special)]
        result = Tokenizer.from_str(json.dumps(fields))
    return result


KINDS = [
    "byte level",
    "metaspace, always",
    "metaspace, first",
    "metaspace, never",
    "llama",
    "wordpiece",
]


@functools.cache
def tokenizer_of(kind):
    if kind == "bytes":
        return ByteTokenizer()
    folder = tempfile.mkdtemp()
    library(kind).save(f"{folder}/tokenizer.json")
    with open(f"{folder}/tokenizer_config.json", "w") as file:
        file.write('{"bos_token": "<s>", "eos_token": "</s>"}')
    return load_tokenizer(folder)


def pieces_of(tokenizer, prompt, new, stops=()):
    text = ContinuationText(tokenizer, prompt, stops)
    pieces = [(text.push(token), text.take())[1] for token in new]
    text.end()
    return [*pieces, text.take()]


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_a_continuation_is_the_text_of_all_ids_without_that_of_the_prompt(kind):
    tokenizer, num_compared = tokenizer_of(kind), 0
    for text in TEXTS:
        ids = tokenizer.encode(text, False).tolist()
        for n in range(len(ids) + 1):
            expected, before = tokenizer.decode(ids, True), tokenizer.decode(ids[:n], True)
            prompt = [*tokenizer.document_start, *ids[:n]]
            pieces = pieces_of(tokenizer, prompt, ids[n:])
            before = before.rstrip(UNKNOWN)  # A prompt may end within a character.
            assert "".join(pieces) == expected[len(before) :], (text, n)
            assert not any(UNKNOWN in piece for piece in pieces)
            assert continuation_text(tokenizer, prompt, ids[n:]).text == "".join(pieces)
            num_compared += 1
    assert num_compared > 20


def test_a_byte_that_is_no_character_does_not_repeat_the_characters_before_it():
    tokenizer = tokenizer_of("llama")
    ids = tokenizer.encode("the cat 日é cat", False).tolist()
    byte = next(i for i in ids[::-1] if tokenizer.name_of(i).startswith("<0x"))
    end = len(ids) - ids[::-1].index(byte)
    assert tokenizer.name_of(ids[end - 2]) == "<0xC3>"  # The first byte of é.
    for n in range(end):
        new = [*ids[n:end], ids[end - 2], *ids[end:]]
        prompt, text = ids[:n], tokenizer.decode(ids[:n]).rstrip(UNKNOWN)
        expected = f"the cat 日é{UNKNOWN} cat"[len(text) :]
        assert "".join(pieces_of(tokenizer, prompt, new)) == expected, n


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_those_of_the_librarys_own_stream(kind):
    from tokenizers.decoders import DecodeStream

    tokenizer = tokenizer_of(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text, False).tolist()
        for n in range(1, len(ids)):
            if tokenizer.decode(ids[:n]).endswith(UNKNOWN):
                continue
            stream = DecodeStream(ids=ids[:n], skip_special_tokens=True)
            expected = [stream.step(library(kind), token) or "" for token in ids[n:]]
            assert pieces_of(tokenizer, ids[:n], ids[n:]) == [*expected, ""], (text, n)


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_a_stop_string_is_found_across_tokens_and_among_them_on_the_devices(kind):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(TEXTS[1], False).tolist()
    expected = tokenizer.decode(ids)
    for stop in ("mat:", "he wo", " yes", "at"):
        if stop in expected:
            text = continuation_text(tokenizer, ids[:2], ids[2:], (stop,))
            before = len(tokenizer.decode(ids[:2]))
            place = expected.index(stop, before)
            assert (text.text, text.is_stopped) == (expected[before:place], True), stop
    for stop in ("\n", "yes", " yes"):
        sequences = for_tokenizer(Greedy(stop_strings=(stop,)), tokenizer).stop_sequences
        has_one = any(
            tuple(ids[i : i + len(x)]) == tuple(x) for x in sequences for i in range(len(ids))
        )
        # BERT's tokenizer has no ends of lines.
        assert has_one == (stop in expected), (stop, sequences)


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ((" said", "ai"), " s"),
        (("ai", "said hello"), " s"),
        (("said", "sai"), " "),
        (("d h", "aid h", "d"), " sai"),
        (("d h", "id h", "zd h"), " sa"),
    ],
)
def test_overlapping_stop_strings_end_a_text_alike_in_any_tokenization(kind, stops, expected):
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode("the cat", False).tolist()
    ids = tokenizer.encode("the cat said hello", False).tolist()[len(prompt) :]
    text = continuation_text(tokenizer, prompt, ids, stops)
    assert (text.text, text.is_stopped) == (expected, True)


def test_a_vocabulary_of_few_characters_has_stop_strings_of_these_characters():
    tokenizer = CharacterTokenizer("0123456789=\n")
    decoder = for_tokenizer(Greedy(stop_strings=("\n", "=4")), tokenizer)
    assert decoder.stop_sequences == ((11,), (10, 4))
    with pytest.raises(ConfigError, match="'x'"):
        for_tokenizer(Greedy(stop_strings=("x",)), tokenizer)
    body = {"model": "m", "prompt": "1=", "stop": "x"}
    with pytest.raises(ApiError, match="'x'"):
        ServedModel("m", tokenizer, 12, 99, ()).tokenize(completion(json.dumps(body).encode()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [STOP, STOP + "the", " world" + STOP])
def test_a_special_token_in_a_stop_string_ends_the_text_before_it(kind, stop):
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode("the cat", False).tolist()
    ids = tokenizer.encode(f"the cat said hello world{STOP}the mat", False).tolist()[len(prompt) :]
    text = continuation_text(tokenizer, prompt, ids, (stop,))
    expected = " said hello" if "world" in stop else " said hello world"
    assert (text.text, text.is_stopped) == (expected, True)
    sequences = for_tokenizer(Greedy(stop_strings=(stop,)), tokenizer).stop_sequences
    assert any(tuple(ids[i : i + len(x)]) == x for x in sequences for i in range(len(ids)))
    without = continuation_text(tokenizer, prompt, ids).text
    assert STOP not in without and without.startswith(" said hello world")


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
@pytest.mark.parametrize("prompt, answer", [
    ("the cat said:", " yes"), ("the cat said: ", "yes"), ("the c", "at sat"), ("", "the mat"),
    ("said\n", "hello 日本"),
])  # fmt: skip
def test_prompt_and_answer_have_the_ids_of_one_text(kind, prompt, answer):
    tokenizer = tokenizer_of(kind)
    end = [tokenizer.eos_id]
    ids = [*tokenizer.document_start, *tokenizer.encode(prompt + answer, False), *end]
    tokens = prompted(prompt, answer, tokenizer)
    assert tokens.ids.tolist() == ids
    # The answer is learned, and its end; of the prompt at most what shares a token with it.
    learned = tokenizer.decode(tokens.ids[tokens.is_answer], True).replace(" ", "")
    expected = tokenizer.decode(tokenizer.encode(answer, False), True).replace(" ", "")
    assert learned.endswith(expected) and tokens.is_answer[-1]
    assert prompt != "" or tokens.is_answer[len(tokenizer.document_start) :].all()
    assert not prompt.endswith(":") or learned == expected
    example = {"prompt": prompt, "chosen": answer, "rejected": answer + "!"}
    assert pair_of(example, tokenizer, "line 1").chosen.ids.tolist() == ids


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_the_tokens_of_log_probs_are_the_text_and_their_bytes_too(kind):
    tokenizer = tokenizer_of(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text, False).tolist()
        choice = ChoiceText(tokenizer, ids[:1], (), (), has_logprobs=True)
        others = [[(token, -1.0), (ids[0], -2.0)] for token in ids[1:]]
        for token, likeliest in zip(ids[1:], others, strict=True):
            choice.add(Piece([token], [-1.0], [likeliest]))
        choice.end("length")
        said, tokens = choice.take()
        assert said and "".join(token.text for token in tokens) == said
        if kind != "wordpiece":  # Its <unk> has no text.
            assert b"".join(token.content for token in tokens) == said.encode()
        assert all(token.likeliest[0].text == token.text for token in tokens)


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
@pytest.mark.parametrize("stop", ["id hel", "d"])
def test_the_tokens_of_log_probs_end_before_a_stop_string(kind, stop):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(TEXTS[0], False).tolist()
    choice = ChoiceText(tokenizer, ids[:1], (stop,), (), has_logprobs=True)
    choice.add(Piece(ids[1:], [-1.0] * len(ids[1:]), None))
    said, tokens = choice.take()
    assert said and said == continuation_text(tokenizer, ids[:1], ids[1:], (stop,)).text
    assert "".join(token.text for token in tokens) == said


def test_a_token_with_a_space_and_one_without_are_two_entries():
    tokenizer = tokenizer_of("metaspace, first")
    ids = library("metaspace, first").get_vocab()
    name = next(name for name in sorted(ids) if "▁" + name in ids)
    spaced, plain = ids["▁" + name], ids[name]
    prompt = tokenizer.encode("the cat", False)
    choice = ChoiceText(tokenizer, prompt, (), (), has_logprobs=True)
    choice.add(Piece([plain], [-1.0], [[(plain, -1.0), (spaced, -2.0)]], done=True))
    (token,) = choice.take()[1]
    assert [(x.text, x.content) for x in token.likeliest] == [
        (name, name.encode()),
        (f" {name}", f" {name}".encode()),
    ]


def test_parts_of_a_character_are_named_by_their_bytes():
    for kind in ("byte level", "llama", "bytes"):
        tokenizer = tokenizer_of(kind)
        ids = tokenizer.encode("the 本", False).tolist()[-3:]
        choice = ChoiceText(tokenizer, [97], (), (), has_logprobs=True)
        choice.add(Piece(ids, [-1.0] * 3, [[(ids[1], -2.0)]] * 3, done=True))
        text, tokens = choice.take()
        assert [token.text for token in tokens] == ["", "", text], kind
        assert b"".join(token.content for token in tokens) == "本".encode()
        assert tokens[0].likeliest[0].text == "bytes:\\x9c" and tokens[1].likeliest[0].text == ""
