"""Chat templates, which convert conversations to the text format that a model was trained on.

Templates run in Jinja's immutable sandbox, with the same variables and functions as in
transformers: https://huggingface.co/docs/transformers/chat_templating_writing.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.tokenizers.chat_messages import (
    ASSISTANT,
    USER,
    Message,
    RefusedConversation,
    ReservedText,
    UnreadKey,
    as_messages,
    strings_in,
    text_of,
    unread_candidates,
    with_text_arguments,
)

# Markers around the text in `{% generation %}` blocks. They are Unicode noncharacters, which are
# reserved for internal use. `checked` refuses conversations that contain them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_PROBE = "praxislite"  # Message content that does not occur in any template.

Rendered = TypeVar("Rendered")


class Answers(NamedTuple):
    """The text of a conversation, and the character spans (start, stop) of its answers."""

    text: str
    spans: list[tuple[int, int]]


class _Reads(NamedTuple):
    """Whether a template shows a message's content that is a string, or a list of parts."""

    text: bool
    parts: bool


def _as_parts(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


def chatml(begin: str, end: str) -> str:
    """Returns a ChatML template that marks answers, given the start and end tokens of a turn."""
    begin, end = json.dumps(begin), json.dumps(end)
    return (
        "{%- for message in messages %}{{- " + begin + " + message['role'] + '\\n' }}"
        "{%- if message['role'] == 'assistant' %}{%- generation %}"
        "{{- message['content'] + " + end + " }}{%- endgeneration %}"
        "{%- else %}{{- message['content'] + " + end + " }}{%- endif %}{{- '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- " + begin + " + 'assistant\\n' }}{%- endif %}"
    )


class ChatTemplate:
    """A Jinja template that formats conversations.

    Args:
      source: Source of the template.
      variables: Variables for the template: the text of each special token, keyed by role, such as
        "bos_token".
      tool_use: Source of the template named "tool_use", which is used for conversations with tools.
      reserved: Texts that the tokenizer reads as special tokens. `checked` refuses them in
        messages, tools and documents, except in the assistant's messages, which the model may have
        written.
      answers_may_be_reserved: Whether also answers to train on may contain reserved texts.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        tool_use: str | None = None,
        reserved: Iterable[str] = (),
        answers_may_be_reserved: bool = True,
    ):
        self.source, self.variables = source, dict(variables or {})
        self.reserved = tuple(sorted({text for text in reserved if text}))
        self.answers_may_be_reserved = answers_may_be_reserved
        self.tool_use: ChatTemplate | None = None
        if tool_use is not None:
            self.tool_use = ChatTemplate(
                tool_use, variables, None, self.reserved, answers_may_be_reserved
            )
        self._read_by_role: dict[str, _Reads] = {}  # The results of `_reads`.

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        # A worker process compiles the template again; compiled templates cannot be pickled.
        tool_use = self.tool_use and self.tool_use.source
        return ChatTemplate, (
            self.source,
            self.variables,
            tool_use,
            self.reserved,
            self.answers_may_be_reserved,
        )

    @property
    def sources(self) -> list[str]:
        """The source of this template, followed by the source of `tool_use` if there is one."""
        return [self.source, *([self.tool_use.source] if self.tool_use else [])]

    def chosen(self, variables: Mapping[str, Any]) -> "ChatTemplate":
        """Returns the template that transformers would choose for these variables."""
        return self.tool_use if self.tool_use and variables.get("tools") else self

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Formats a conversation as text.

        Raises:
          ConfigError: The template is invalid, or rejects the conversation. The message includes
            the template's error message.
        """
        text = self._rendered(messages, add_generation_prompt, **variables)
        return text.replace(_BEGIN, "").replace(_END, "") if self.marks_answers else text

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """Converts messages to the format that the template expects, without weights.

        This is the format of `as_messages`. If the template does not support lists of parts as
        content, the parts are joined into a string; if it supports only lists, as templates of
        models with images do, a string becomes a list.
        """
        result: list[Message] = []
        for message in as_messages(messages):
            fields = {key: item for key, item in message.items() if key != "weight"}
            content = fields.get("content")
            if isinstance(content, list) and not self._reads(fields["role"]).parts:
                fields["content"] = text_of(content)
            elif isinstance(content, str) and not self._reads(fields["role"]).text:
                fields["content"] = _as_parts(content)
            result.append(fields)
        return result

    def checked(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        rendered: Callable[[Sequence[Message]], Rendered],
        *,
        is_training: bool = False,
    ) -> Rendered:
        """Renders messages, and checks that the template does not ignore any part of them.

        The template must read each variable. Each message key must occur in the template's source
        or change the rendered text, and so must each role except user and assistant. The key `name`
        must change the text, because templates also mention the names of tools in their source. The
        content of each message must occur in the text or change it.

        Args:
          messages: Messages as returned by `prepared`.
          variables: The variables that `rendered` passes to the template.
          rendered: Function that renders messages as text or Answers.
          is_training: Whether the conversation is training data. Otherwise, it is a prompt.

        Returns:
          The result of `rendered` for the messages.

        Raises:
          UnreadKey: The template ignores a variable, key, role or content, which is named in the
            error message.
          ReservedText: A reserved text occurs where it must not.
          RefusedConversation: The template rejects the conversation, or it marks answers and the
            conversation contains one of the markers.
        """
        allows_assistant = self.answers_may_be_reserved or not is_training
        self._require_no_reserved_text(messages, variables, allows_assistant)
        for name, value in variables.items():
            if value not in (None, "", [], {}) and name not in self._read_variables:
                raise UnreadKey(
                    f"{name} is set, but the chat template does not use it. Remove {name}, or use "
                    "a template that supports it."
                )
        # A refusal is raised last, because an unread key is a better explanation of it.
        try:
            result, refusal = rendered(messages), None
            shown = result.text if isinstance(result, Answers) else str(result)
        except RefusedConversation as error:
            refusal = error

        # Returns whether the text stays the same without a message, or with a replacement for it.
        # If the template refuses the conversation, this is unknown, and is assumed.
        def is_lost(number: int, *replacement: Message) -> bool:
            if refusal is not None:
                return True
            try:
                others = [*messages[:number], *replacement, *messages[number + 1 :]]
                return rendered(others) == result
            except ConfigError:
                return False

        for number, message in enumerate(messages):
            role = message["role"]
            # Rendering only tests keys that do not occur in the source of the template, and `name`.
            for keys in unread_candidates(message):
                is_mentioned = not self._mentioned.isdisjoint(keys)
                if is_mentioned and (keys != ("name",) or refusal is not None):
                    continue
                without = {key: item for key, item in message.items() if key not in keys}
                if is_lost(number, without):
                    raise UnreadKey(
                        f"message {number} (role {role!a:.40}) has the key {keys[-1]!a:.60}, which "
                        "the chat template does not use. Remove the key, or use a template that "
                        "supports it."
                    ) from refusal
            if refusal is not None:
                continue
            content = message.get("content", "")
            text = text_of(content).strip()
            is_known = role in (USER, ASSISTANT) or role in self._mentioned
            if text and not is_known and is_lost(number):
                raise UnreadKey(
                    f"message {number} has the role {role!a:.40}, but the chat template omits "
                    "messages with this role. Change the role to user, remove the message, or use "
                    "a different template."
                )
            other = _PROBE if isinstance(content, str) else _as_parts(_PROBE)
            if text not in shown and is_lost(number, {**message, "content": other}):
                raise UnreadKey(
                    f"message {number} (role {role!a:.40}) has content that the chat template "
                    "omits, for example because of the message's other keys or its position. "
                    "Remove the content, or use a different template."
                )
        if refusal is not None:
            raise refusal
        return result

    def _require_no_reserved_text(
        self, messages: Sequence[Message], variables: Mapping[str, Any], allows_assistant: bool
    ) -> None:
        if self.marks_answers:
            for text in strings_in([messages, variables]):
                for marker in (_BEGIN, _END):
                    if marker in text:
                        raise RefusedConversation(
                            f"the conversation contains the noncharacter U+{ord(marker):X}, which "
                            "is reserved for marking answers. Remove it."
                        )
        if not self.reserved:
            return
        # Templates join the parts of a message, so check the joined text.
        values: dict[str, Any] = {
            f"message {number} (role {message['role']!a:.40})": {
                **message,
                "content": text_of(message.get("content")),
            }
            for number, message in enumerate(messages)
            if message["role"] != ASSISTANT or not allows_assistant
        }
        values |= {name: variables.get(name) for name in ("tools", "documents")}
        for name, value in values.items():
            for text in strings_in(value):
                if found := self._reserved_pattern.search(text):
                    raise ReservedText(
                        f"{name} contains {found[0]!r}, which the tokenizer reads as a special "
                        "token, as if the chat template had written it. Remove it, or pass the "
                        "rendered conversation as a string, which may contain it."
                    )

    @functools.cached_property
    def _reserved_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.reserved, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    @functools.cached_property
    def _read_variables(self) -> frozenset[str]:
        nodes = optional_module("jinja2.nodes", "A chat template")
        names = self._tree.find_all(nodes.Name)
        return frozenset(node.name for node in names if node.ctx == "load")

    @functools.cached_property
    def _mentioned(self) -> frozenset[str]:
        """The attribute names and string constants in the template's source."""
        nodes = optional_module("jinja2.nodes", "A chat template")
        found = self._tree.find_all((nodes.Getattr, nodes.Const))
        names = (node.attr if isinstance(node, nodes.Getattr) else node.value for node in found)
        return frozenset(name for name in names if isinstance(name, str))

    def _reads(self, role: str) -> _Reads:
        """Returns which kinds of content the template accepts from a role."""
        if role not in self._read_by_role:

            def text(word: str, form: Callable[[str], Any]) -> str:
                # Some templates require a user's message before an answer, or after a system
                # message.
                user = {"role": USER, "content": form("a")}
                before, after = [user] * (role == ASSISTANT), [user] * (role == "system")
                try:
                    return self.render([*before, {"role": role, "content": form(word)}, *after])
                except ConfigError:
                    return ""

            joined, parts = text(_PROBE, str), text(_PROBE, _as_parts)
            is_only_parts = _PROBE in parts and joined == text("a", str)
            is_same = _PROBE in parts and parts == joined
            self._read_by_role[role] = _Reads(not is_only_parts, is_only_parts or is_same)
        return self._read_by_role[role]

    @functools.cached_property
    def marks_answers(self) -> bool:
        """Whether the template marks answers with `{% generation %}`."""
        nodes = optional_module("jinja2.nodes", "A chat template")
        return "generation" in self.source and any(
            isinstance(block.call, nodes.Call)
            and getattr(block.call.node, "name", "") == _marked_name
            for block in self._tree.find_all(nodes.CallBlock)
        )

    def render_data(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Renders training data like `render`, but with a fixed current date."""
        return self.render(messages, add_generation_prompt, **{**_DATA_VARIABLES, **variables})

    def answers(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Answers:
        """Renders training data, and returns the spans enclosed by `{% generation %}`."""
        text, spans = "", []
        for piece in self._rendered(messages, False, **{**_DATA_VARIABLES, **variables}).split(
            _BEGIN
        ):
            inside, is_end, after = piece.partition(_END)
            # The markers themselves are left out of the text, so positions do not count them.
            if is_end:
                spans.append((len(text), len(text) + len(inside)))
            text += inside + after
        return Answers(text, spans)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any
    ) -> str:
        all_variables = {"tools": None, "documents": None} | self.variables | variables
        template = self._template
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **all_variables
            )
        except Exception as error:  # Templates may raise any exception.
            # Older templates concatenate call arguments as strings.
            with_texts = with_text_arguments(messages) if isinstance(error, TypeError) else messages
            if with_texts != messages:
                return self._rendered(with_texts, add_generation_prompt, **variables)
            jinja2 = optional_module("jinja2", "A chat template")
            message = shortened(str(error), 300).rstrip(".")
            if isinstance(error, jinja2.TemplateError):
                message = f"The chat template rejects the conversation: {message}"
            else:
                message = (
                    "The chat template cannot render the conversation: "
                    f"{type(error).__name__}: {message}. Check that each message is "
                    '{"role": ..., "content": ...}.'
                )
            raise RefusedConversation(message) from error

    @functools.cached_property
    def _template(self) -> Any:
        return self._compiled("from_string")

    @functools.cached_property
    def _tree(self) -> Any:
        return self._compiled("parse")

    def _compiled(self, method: str) -> Any:
        """Compiles the source with a method of the Jinja environment, "parse" or "from_string"."""
        jinja2 = optional_module("jinja2", "A chat template")
        try:
            return getattr(_environment(), method)(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"The chat template is not a valid Jinja template: {shortened(str(error), 300)}. "
                "Correct it, or use a different template."
            ) from error


_marked_name = "_marked"
# A template may insert the current date. Training data must not depend on the day on which it is
# generated, so the date is fixed to the default date of Llama 3.1's template.
_DATA_VARIABLES = {"strftime_now": lambda form: datetime.datetime(2024, 7, 26).strftime(form)}


@functools.cache
def _environment() -> Any:
    jinja2 = optional_module("jinja2", "A chat template")
    sandbox = optional_module("jinja2.sandbox", "A chat template")
    extension: Any = optional_module("jinja2.ext", "A chat template").Extension

    class Generation(extension):
        """Adds markers around the text between `{% generation %}` and `{% endgeneration %}`."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            # The block becomes a call of `mark`, whose caller renders the body.
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            name = jinja2.nodes.Name(_marked_name, "load", lineno=line)
            call = jinja2.nodes.Call(name, [], [], None, None, lineno=line)
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        _marked_name: mark,
    }
    return environment


def _refuse(message: str) -> None:
    jinja2 = optional_module("jinja2", "A chat template")
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
