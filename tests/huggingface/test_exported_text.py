"""An export has the tokenizer, template and end tokens of the job, as transformers reads them."""

import functools
import json
import shutil
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig

from praxis_lite.decode import Greedy, for_tokenizer
from praxis_lite.huggingface.exported_text import write_text_files
from praxis_lite.inputs import ByteTokenizer
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.inputs.tokenizers.chat_template import chatml

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
OF_BASE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
OF_JOB = chatml("<|im_start|>", "<|im_end|>")
GENERATION = {
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 9,
    "top_p": 0.5,
    "max_new_tokens": 7,
    "suppress_tokens": [5],
    "decoder_start_token_id": 3,
}
CONFIG = {"vocab_size": 400, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 9}


@functools.cache
def trained(words):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = SPECIAL if words == "hi yes" else SPECIAL[::-1]
    tokenizer.train_from_iterator(
        [words],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer.to_str()


def directory(folder, template=None, *, words="hi yes", where="config", config=None, **files):
    """Returns a directory of a tokenizer whose template is `where` transformers may read it."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(trained(words))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        **(config or {}),
    }
    if where == "config" and template:
        fields["chat_template"] = template
    if where == "list":
        fields["chat_template"] = [
            {"name": "default", "template": template},
            {"name": "tool_use", "template": "tools!"},
        ]
    if where in ("jinja", "more"):
        (folder / "chat_template.jinja").write_text(template)
    if where == "more":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text("tools!")
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def exported(tmp_path, base, tokenizer, decoder=None, config=None):
    """Returns the directory of an export, its config.json, and its notes."""
    tokenizer = tokenizer if isinstance(tokenizer, ByteTokenizer) else load_tokenizer(tokenizer)
    task = SimpleNamespace(
        tokenizer=tokenizer, decoder=for_tokenizer(decoder or Greedy(), tokenizer)
    )
    (tmp_path / "out").mkdir()
    notes = []
    config = write_text_files(tmp_path / "out", base, task, config or CONFIG, notes.append)
    return tmp_path / "out", config, notes


def rendered(folder):
    """Returns what transformers makes of a conversation, and its special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    return (
        asked,
        tokenizer(asked).input_ids,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.eos_token_id,
        len(tokenizer),
    )


@pytest.mark.parametrize("of_job", ["config", "jinja", "list", "more"])
@pytest.mark.parametrize("of_base", ["config", "jinja", "more", None])
def test_the_template_is_the_jobs_wherever_it_and_that_of_the_base_are(tmp_path, of_base, of_job):
    base = directory(tmp_path / "base", OF_BASE, where=of_base, generation_config=GENERATION)
    job = directory(tmp_path / "job", OF_JOB, where=of_job)
    out, config, notes = exported(tmp_path, base, job)
    assert rendered(out) == rendered(job) and not notes
    assert config == {
        "vocab_size": 400,
        "eos_token_id": [1, 3],
        "bos_token_id": 0,
        "pad_token_id": 4,
    }
    generation = GenerationConfig.from_pretrained(out)
    assert set(generation.eos_token_id) == {1, 3} and generation.pad_token_id == 4
    assert (generation.top_p, generation.max_new_tokens) == (0.5, 7)
    assert generation.suppress_tokens is None and generation.decoder_start_token_id is None


@pytest.mark.parametrize("changed", ["words", "special tokens", "added tokens", "special map"])
def test_the_tokenizer_is_the_jobs(tmp_path, changed):
    base = directory(
        tmp_path / "base",
        OF_BASE,
        where="jinja",
        special_tokens_map={"cls_token": "<s>"},
        added_tokens={"<|base|>": 265},
        generation_config=GENERATION,
    )
    given = {
        "words": {"words": "no never"},
        "special tokens": {"config": {"eos_token": "<|im_end|>", "bos_token": None}},
        "added tokens": {"config": {"additional_special_tokens": ["<|new|>"]}},
        "special map": {"special_tokens_map": {"eos_token": "<|im_end|>"}},
    }[changed]
    job = directory(tmp_path / "job", OF_JOB, **given)
    out, config, _ = exported(tmp_path, base, job)
    assert rendered(out) == rendered(job)
    expected = AutoTokenizer.from_pretrained(job)
    assert config["bos_token_id"] == expected.bos_token_id
    assert expected.eos_token_id in GenerationConfig.from_pretrained(out).eos_token_id
    assert set(load_tokenizer(out).eos_ids) == set(load_tokenizer(job).eos_ids)


def test_ends_that_the_job_names_itself_are_exported(tmp_path):
    base = directory(tmp_path / "base", OF_BASE, generation_config=GENERATION)
    out, config, _ = exported(tmp_path, base, base, Greedy(eos_id=(2, 3)))
    generation = GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == config["eos_token_id"] == [2, 3]
    assert generation.suppress_tokens == [5] and config["pad_token_id"] == 9
    assert rendered(out) == rendered(base)


def test_a_tokenizer_that_was_not_changed_is_exported_byte_for_byte(tmp_path):
    base = directory(tmp_path / "base", OF_BASE, where="more", generation_config=GENERATION)
    # As a job keeps it.
    shutil.copytree(base, tmp_path / "copy")
    out, config, notes = exported(tmp_path, base, tmp_path / "copy")
    files = {path.relative_to(base) for path in base.rglob("*") if path.is_file()}
    assert files == {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
    assert all((out / path).read_bytes() == (base / path).read_bytes() for path in files)
    assert config == CONFIG and not notes


@pytest.mark.parametrize("generation", [None, {"eos_token_id": 1, "top_p": 0.5}, {"top_p": 0.5}])
def test_the_end_of_a_turn_is_exported_beside_what_generation_config_has(tmp_path, generation):
    files = {} if generation is None else {"generation_config": generation}
    base = directory(tmp_path / "base", OF_JOB, **files)
    out, config, _ = exported(tmp_path, base, base)
    fields = json.loads((out / "generation_config.json").read_text())
    assert fields == {**(generation or {}), "eos_token_id": [1, 3]} and config == CONFIG


def test_a_job_of_bytes_is_not_exported_with_the_tokenizer_of_its_base(tmp_path):
    base = directory(tmp_path / "base", OF_BASE, generation_config=GENERATION)
    out, config, notes = exported(tmp_path, base, ByteTokenizer())
    assert not (out / "tokenizer.json").exists() and "ByteTokenizer" in notes[0]
    assert config == CONFIG


def test_ends_that_the_model_has_no_row_for_are_left_out_and_said(tmp_path):
    base = directory(tmp_path / "base", OF_BASE)
    job = directory(tmp_path / "job", OF_JOB, words="no never")
    out, config, notes = exported(
        tmp_path,
        base,
        job,
        config={
            "text_config": {
                "vocab_size": 3,
                "eos_token_id": 7,
                "hidden_size": 5,
            }
        },
    )
    # "no never" has its special tokens in another order: <|im_end|> is 1 and </s> is 3.
    assert config["eos_token_id"] == config["text_config"]["eos_token_id"] == 1
    assert config["text_config"]["hidden_size"] == 5 and "3" in notes[0]
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1]
