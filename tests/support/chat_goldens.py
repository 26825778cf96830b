"""Writes tests/goldens/chats, the answer tokens according to transformers.

python tests/support/chat_goldens.py tests/goldens/chats
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]
# The parts of each model's template for users and assistants. The text between `[[` and `]]` is
# enclosed in {% generation %} and {% endgeneration %}, or used without them.
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == "
        "'assistant' %}[[{{ m['content'] + '<|im_end|>' }}]]{% else %}{{ m['content'] + "
        "'<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama2": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + "
        "m['content'].strip() + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
        "[[{{ ' ' + m['content'].strip() + ' ' + eos_token }}]]{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + "
        "'<|end_header_id|>\n\n' %}{% if loop.index0 == 0 %}{% set content = bos_token + content "
        "%}{% endif %}{{ content }}{% if m['role'] == 'assistant' %}[[{{ m['content'] | trim + "
        "'<|eot_id|>' }}]]{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant"
        "<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + "
        "m['content'] + ' [/INST]' }}{% else %}[[{{ m['content'] + eos_token }}]]{% endif %}"
        "{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ "
        "'<start_of_turn>model\n' }}[[{{ m['content'] | trim + '<end_of_turn>' }}]]{{ '\n' }}"
        "{% else %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + "
        "'<end_of_turn>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>\n' }}"
        "[[{{ m['content'] + eos_token }}]]{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + "
        "eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] == 'assistant' %}"
        "[[{{ m['content'] + '<|end|>' }}]]{% else %}{{ m['content'] + '<|end|>' }}{% endif %}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "qwen_with_system": (
        "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\nBe brief.<|im_end|>\n' "
        "}}{%- endif %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' %}[[{{- m.content + '<|im_end|>' }}]]{%- else %}"
        "{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    "vicuna": (  # The space before an answer and the first word of the answer form one token.
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}"
        "ASSISTANT:[[ {{ m.content + eos_token }}]]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "vicuna, blank outside": (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}"
        "ASSISTANT: [[{{ m.content + eos_token }}]]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    ),
    "no end": (  # The end of an answer is not marked here, so it is not learned.
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}[[{{ m.content.strip() "
        "}}]]{% else %}{{ m.content }}{% endif %}{{ '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
}


def said(*turns: str) -> list[dict[str, str]]:
    """Returns a conversation that starts with the user."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


CONVERSATIONS = [
    said("hello", "yes it is", "there", "fine"),
    said("Who is there?", "né 😀, a fox!\n\nTwo lines.", "Where?", "There."),
    said("a", "  blanks around ", "b", "\nlines\n", "c", "1234 (x) [y] <s> </s>"),
    said("x", "y", "and then?"),
]


def tokenizers() -> dict[str, Tokenizer]:
    """Returns small tokenizers like those of GPT-2, GPT-2 with trimmed offsets, and Llama 2."""
    texts = [turn["content"] for turns in CONVERSATIONS for turn in turns]
    texts += ["USER: hello there ASSISTANT: yes it is fine", "[INST] hello [/INST] yes it is"] * 20
    result = {}
    for name, trims in (("byte_level", None), ("byte_level_trimmed", True), ("metaspace", None)):
        tokenizer = Tokenizer(models.BPE(byte_fallback=name == "metaspace", unk_token=None))
        if name == "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.decoder = decoders.Sequence(
                [
                    decoders.ByteFallback(),
                    decoders.Metaspace(),
                    decoders.Fuse(),
                ]
            )
            alphabet, special = [], [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            alphabet, special = pre_tokenizers.ByteLevel.alphabet(), SPECIAL
        tokenizer.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=420,
                special_tokens=special,
                show_progress=False,
                initial_alphabet=alphabet,
            ),
        )
        if trims:
            from tokenizers import processors

            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        result[name] = tokenizer
    return result


def main(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    answers = []
    for name, tokenizer in tokenizers().items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / name / "tokenizer.json"), pretty=False)
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(special) + "\n")
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        for template, text in TEMPLATES.items():
            marked = text.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
            for number, messages in enumerate(CONVERSATIONS):
                result = fast.apply_chat_template(
                    messages,
                    chat_template=marked,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
                mask = "".join(map(str, result["assistant_masks"]))
                answers.append([name, template, number, list(result["input_ids"]), mask])
    actual = {"templates": TEMPLATES, "conversations": CONVERSATIONS}
    lines = ",\n".join(json.dumps(answer) for answer in answers)
    text = json.dumps(actual, indent=1)[:-2] + f',\n "answers": [\n{lines}\n]}}\n'
    (folder / "answers.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
