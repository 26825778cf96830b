"""Chat templates: conversations as the text that a model was taught to read.

They are programs of the files of a model, so they run in Jinja's sandbox. They find what
transformers gives them: https://huggingface.co/docs/transformers/chat_templating_writing.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from praxis_lite.errors import ConfigError

# Around what `{% generation %}` encloses. No text has them: Unicode keeps them for internal use.
_BEGIN, _END = "\ufdd0", "\ufdd1"


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
        """True if the template says with `{% generation %}` what the model writes."""
        return "generation" in self.source and self._marks

    def answers(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Answers:
        """Returns a conversation's text and where in it are what `{% generation %}` encloses."""
        text, spans = "", []
        for piece in self._rendered(messages, False, **variables).split(_BEGIN):
            inside, is_end, after = piece.partition(_END)
            if is_end:
                spans.append((len(text), len(text) + len(inside)))
            text += inside + after
        return Answers(text, spans)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any
    ) -> str:
        import jinja2

        given = {"tools": None, "documents": None} | self.variables | variables
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **given
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"The chat template refuses the conversation: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"The chat template cannot read the conversation: {type(error).__name__}: {error}. "
                'Each message is {"role": ..., "content": ...}.'
            ) from error

    @functools.cached_property
    def _template(self) -> Any:
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"The chat template is no Jinja template: {error}") from error

    @functools.cached_property
    def _marks(self) -> bool:
        from jinja2 import nodes

        tree = _environment().parse(self.source)
        return any(
            isinstance(one.call, nodes.Call) and getattr(one.call.node, "name", "") == _marked_name
            for one in tree.find_all(nodes.CallBlock)
        )


_marked_name = "_marked"


@functools.cache
def _environment() -> Any:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Marks what is between `{% generation %}` and `{% endgeneration %}`."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            name = jinja2.nodes.Name(_marked_name, "load", lineno=line)
            call = jinja2.nodes.Call(name, [], [], None, None, lineno=line)
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        _marked_name: lambda caller: f"{_BEGIN}{caller()}{_END}",
    }
    return environment


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
