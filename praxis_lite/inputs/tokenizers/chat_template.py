"""Chat templates: conversations as the text that a model was taught to read.

They are programs of the files of a model, so they run in Jinja's sandbox. They find what
transformers gives them: https://huggingface.co/docs/transformers/chat_templating_writing.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.host.optional_packages import optional_module

# Around what `{% generation %}` encloses. No text has them: Unicode keeps them for internal use.
_BEGIN, _END = "\ufdd0", "\ufdd1"
MOST_FORMAT = 100  # Characters of a form of dates.


class RefusedConversation(ConfigError):
    """A template does not take a conversation, though it may take others."""


class Answers(NamedTuple):
    """A conversation's text, and the (start, stop) of the characters that the model is to write."""

    text: str
    spans: list[tuple[int, int]]


def chatml(begin: str, end: str) -> str:
    """Returns a template in the form of ChatML that marks answers, given what encloses a turn."""
    begin, end = json.dumps(begin), json.dumps(end)
    return (
        "{%- for message in messages %}{{- " + begin + " + message['role'] + '\\n' }}"
        "{%- if message['role'] == 'assistant' %}{%- generation %}"
        "{{- message['content'] + " + end + " }}{%- endgeneration %}"
        "{%- else %}{{- message['content'] + " + end + " }}{%- endif %}{{- '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- " + begin + " + 'assistant\\n' }}{%- endif %}"
    )


class ChatTemplate:
    """A Jinja template of conversations.

    Args:
      source: its text.
      variables: the texts of special tokens by name, such as bos_token.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None):
        self.source, self.variables = source, dict(variables or {})

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Returns a conversation's text.

        Raises:
          ConfigError: the template is wrong, or refuses the conversation; says what it said.
        """
        text = self._rendered(messages, add_generation_prompt, **variables)
        return text.replace(_BEGIN, "").replace(_END, "")

    @property
    def marks_answers(self) -> bool:
        """True if the template marks the model's words with `{% generation %}`."""
        return "generation" in self.source and self._marks

    def render_data(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        """Returns a text of training data: as `render`, on the same day whenever it is made."""
        return self.render(messages, add_generation_prompt, **_OF_DATA)

    def answers(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Answers:
        """Returns a conversation's text and where in it are what `{% generation %}` encloses."""
        text, spans = "", []
        for piece in self._rendered(messages, False, **_OF_DATA, **variables).split(_BEGIN):
            inside, is_end, after = piece.partition(_END)
            if is_end:
                spans.append((len(text), len(text) + len(inside)))
            text += inside + after
        return Answers(text, spans)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any
    ) -> str:
        from praxis_lite.inputs.tokenizers.templates.budget import bounded

        given = {"tools": None, "documents": None} | self.variables | variables
        template = self._template
        try:
            with bounded([messages, given]):
                text = template.render(
                    messages=messages, add_generation_prompt=add_generation_prompt, **given
                )
            text.encode()
            return text
        except ConfigError:
            raise
        except Exception as error:
            raise RefusedConversation(_why(error)) from error

    @functools.cached_property
    def _template(self) -> Any:
        return self._compiled("from_string")

    def _compiled(self, how: str) -> Any:
        """Returns the template as a method of the environment makes it."""
        try:
            return getattr(_environment(), how)(self.source)
        except ConfigError:
            raise
        # Of one that is nested too deeply Python's own compiler raises nearly anything.
        except Exception as error:
            raise ConfigError(
                f"The chat template is no Jinja template: {_said(error)}. Mend it, or take another."
            ) from error

    @functools.cached_property
    def _marks(self) -> bool:
        nodes = optional_module("jinja2.nodes", "A chat template")
        tree = self._compiled("parse")
        return any(
            isinstance(one.call, nodes.Call) and getattr(one.call.node, "name", "") == _marked_name
            for one in tree.find_all(nodes.CallBlock)
        )


_marked_name = "_marked"
# A template may ask for the day. Data made tomorrow have to be those of today: this is the day that
# Llama 3.1's template writes where it is told none.
_OF_DATA = {
    "strftime_now": lambda form: datetime.datetime(2024, 7, 26).strftime(form[:MOST_FORMAT])
}


def _why(error: Exception) -> str:
    """Returns the message for an error of a template that runs."""
    jinja2 = optional_module("jinja2", "A chat template")
    if isinstance(error, jinja2.TemplateError):
        return f"The chat template refuses the conversation: {_said(error)}"
    return (
        f"The chat template cannot read the conversation: {type(error).__name__}: {_said(error)}. "
        'Each message is {"role": ..., "content": ...}.'
    )


def _said(error: Exception) -> str:
    try:
        return shown(str(error) or type(error).__name__, 300).rstrip(".")
    except Exception:  # Texts of a stranger's making.
        return type(error).__name__


@functools.cache
def _environment() -> Any:
    jinja2 = optional_module("jinja2", "A chat template")
    from praxis_lite.inputs.tokenizers.templates.sandbox import Sandbox

    class Generation(optional_module("jinja2.ext", "A chat template").Extension):
        """Marks the text between `{% generation %}` and `{% endgeneration %}`."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            name = jinja2.nodes.Name(_marked_name, "load", lineno=line)
            call = jinja2.nodes.Call(name, [], [], None, None, lineno=line)
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form[:MOST_FORMAT]),
        _marked_name: lambda caller: f"{_BEGIN}{caller()}{_END}",
    }
    environment.bound_filters()
    return environment


def _refuse(message: str) -> None:
    jinja2 = optional_module("jinja2", "A chat template")
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
