"""The token that a template writes behind an answer ends decoding; data have one day."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from praxis_lite import ConfigError
from praxis_lite.decode import Greedy, continuation_text, for_tokenizer
from praxis_lite.inputs import ByteTokenizer
from praxis_lite.inputs.text.conversations import tokens_of
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.inputs.tokenizers.chat_messages import as_messages
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate, chatml

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Returns a directory of a tokenizer without a template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["hi yes"],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>", "End of turn"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.add_tokens(["<|not_special|>"])
    tokenizer.save(f"{folder}/tokenizer.json")
    return folder


def with_template(bare, folder, template, generation=None):
    shutil.copytree(bare, folder)
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("template", "ends", "all_ends"),
    [
        (chatml("<|im_start|>", "<|im_end|>"), (3,), (1, 3)),
        (chatml("<|im_start|>", "End of turn"), (4,), (1, 4)),
        (chatml("<|im_start|>", "<|not_special|>"), (265,), (1, 265)),
        (LLAMA2, (1,), (1,)),
        (PLAIN, (), (1,)),
        ("{{ raise_exception('no') }}", (), (1,)),
    ],
)
def test_the_token_behind_an_answer_ends_decoding(bare, tmp_path, template, ends, all_ends):
    tokenizer = load_tokenizer(with_template(bare, tmp_path / "t", template))
    assert tokenizer.turn_end_ids == ends
    assert tokenizer.eos_ids == all_ends
    ids = [*tokenizer.encode("yes", False), *all_ends[-1:]]
    assert continuation_text(tokenizer, [], ids).text == "yes"


def test_an_end_of_turn_of_several_tokens_is_a_stop_string(bare, tmp_path):
    template = chatml("<|im_start|>", "<|unknown|>")
    tokenizer = load_tokenizer(with_template(bare, tmp_path / "t", template))
    decoder = for_tokenizer(Greedy(stop_strings=("hi",)), tokenizer)
    assert (decoder.stop_strings, decoder.eos_ids) == (("hi", "<|unknown|>"), (1,))
    ids = tokenizer.encode("yes<|unknown|>\n", False)
    assert continuation_text(tokenizer, [], ids, decoder.stop_strings).text == "yes"
    assert for_tokenizer(Greedy(eos_id=7), tokenizer).stop_strings == ()


def test_byte_3_ends_answers_and_is_not_part_of_them():
    class Custom(ByteTokenizer):
        chat = ChatTemplate(PLAIN)

    assert ByteTokenizer().eos_ids == (256, 3) and Custom().eos_ids == (256,)
    text = continuation_text(ByteTokenizer(), [], b"yes\x03")
    assert (text.text, text.text_of(3)) == ("yes", "\x03")
    assert continuation_text(Custom(), [], b"yes\x03").text == "yes\x03"


def test_a_tokenizer_adds_its_tokens_before_and_after_a_document(bare, tmp_path):
    tokenizer = Tokenizer.from_file(f"{bare}/tokenizer.json")
    names = {"<s>": 0, "</s>": 1, "<|im_end|>": 3}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|> </s>", special_tokens=[*names.items()]
    )
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    loaded = load_tokenizer(tmp_path)
    assert (loaded.begin_ids, loaded.end_ids) == ((0,), (3, 1))
    assert (loaded.document_start, loaded.document_end) == ((0,), (3, 1))


@pytest.mark.parametrize("marks", [True, False])
def test_data_of_a_template_that_asks_for_the_day_are_the_same_every_day(marks):
    begin, end = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{{ m['role'] + ':' }}"
        "{% if m['role'] == 'assistant' %}"
        + begin
        + "{{ m['content'] + '\n' }}"
        + end
        + "{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )

    class Bytes(ByteTokenizer):
        chat = template

    ids, is_answer = tokens_of(MESSAGES, Bytes(), "line 1")
    text = bytes(ids.astype(np.uint8).tolist()).decode()
    assert text.startswith("26 Jul 2024\nuser:hi\nassistant:yes")
    assert bytes(ids[is_answer].astype(np.uint8).tolist()).decode().strip() == "yes"


def test_a_repeated_key_in_the_arguments_of_a_call_is_refused():
    function = {"name": "f", "arguments": '{"x": 1, "x": 2}'}
    calls = [{"type": "function", "function": function}]
    messages = [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(ConfigError, match="the key 'x' occurs twice in an object"):
        as_messages(messages)
