"""How a record becomes a prompt, which has no loss, and the text after it, which has one.

A field with the text alone; a prompt that is filled with fields; or the turns of a conversation, by a chat template.
"""

from collections.abc import Mapping
from numbers import Number
from pathlib import Path
from string import Formatter
from typing import Any

from dpexp.errors import ConfigError, in_one_line
from dpexp.training.data.raw import text_of

Row = Mapping[Any, Any]


class TextAlone:
    """A text without a prompt; a new input is the beginning of a text.

    Attributes:
        fields: those of a record, each with the option that names it.
        asked: those of a new input, which the model continues.
        adds_special: whether the tokenizer puts its special tokens around a prompt, and an end after a text.
        asks_nothing: whether a text has no prompt, and may begin with nothing.
    """

    adds_special = True
    asks_nothing = True

    def __init__(self, text: str) -> None:
        self._text, self.fields, self.asked = text, {text: "data.text"}, [text]

    def prompt(self, row: Row) -> str:
        """What a new input begins with; "" if it has nothing."""
        return text_in(row[self._text])

    def parts(self, row: Row) -> tuple[str, str]:
        """The prompt and the text of a record; without a text, the record contributes nothing."""
        return "", text_in(row[self._text])

    def input_of(self, prompt: Any) -> dict[str, Any]:
        """The new input that `prompt` names: its fields, or the value of the only one."""
        if isinstance(prompt, Mapping) and {*prompt} == {*self.asked}:
            return dict(prompt)
        if len(self.asked) > 1 or isinstance(prompt, Mapping):
            raise ConfigError(f"data.prompts: {prompt} must have the fields {', '.join(self.asked)}.")
        return {self.asked[0]: prompt}

    def record_of(self, row: Row, text: str) -> dict[str, Any]:
        """The record whose prompt is that of an input, and which goes on as the model wrote."""
        return {self._text: self.prompt(row) + text}


class FilledPrompt(TextAlone):
    """A prompt such as "A review of {product}:", filled with a record's fields; or a field that holds it.

        Examples:
            >>> FilledPrompt("text", "{label} → ").parts({"label": "games", "text": "Chess"})
            ('games → ', 'Chess')

    Raises:
        ConfigError: the prompt is no format of fields by name.
    """

    asks_nothing = False

    def __init__(self, text: str, prompt: str) -> None:
        super().__init__(text)
        self._prompt = prompt if "{" in prompt else f"{{{prompt}}}"
        try:
            found = [*Formatter().parse(self._prompt)]
        except ValueError as error:
            raise ConfigError(f"data.prompt={prompt} is no text with fields such as {{label}}: {error}.") from error
        names = [name for _, name, _, _ in found if name is not None]
        if not all(names) or any(spec or conversion for _, _, spec, conversion in found):
            raise ConfigError(f"data.prompt={prompt}: braces must hold the name of a field, as in {{label}}.")
        # Its pieces: what is written, and the field after it.
        self._pieces = [(words, name and text_of(name)) for words, name, _, _ in found]
        self.asked = [*dict.fromkeys(map(text_of, names))]
        self.fields |= dict.fromkeys(self.asked, "data.prompt")

    def prompt(self, row: Row) -> str:
        values = {name: _text_or_number(row[name]) for name in self.asked}
        if not all(values.values()):
            return ""
        return "".join(words + values.get(name or "", "") for words, name in self._pieces)

    def parts(self, row: Row) -> tuple[str, str]:
        prompt = self.prompt(row)
        return prompt, text_in(row[self._text]) if prompt else ""

    def record_of(self, row: Row, text: str) -> dict[str, Any]:
        return {name: row[name] for name in self.asked} | {self._text: text.strip()}


class Conversation(TextAlone):
    """Turns [{role: user, content: …}, …], by the tokenizer's chat template or one of your own; the last turn, of the
    assistant, is the text.

    Args:
        field: the one with the turns.
        tokenizer: of transformers.
        template: a file with a Jinja template; None: the tokenizer's.

    Raises:
        ConfigError: there is no template, or it cannot be used.
    """

    adds_special = False  # the template writes them
    asks_nothing = False

    def __init__(self, field: str, tokenizer: Any, template: str | None) -> None:
        self.fields, self.asked, self._tokenizer, self._template = {field: "data.messages"}, [field], tokenizer, None
        if template is None and not tokenizer.chat_template:
            raise ConfigError(
                "data.chat_template=null: the model's tokenizer has no chat template; give a file with one in Jinja."
            )
        try:
            self._template = template and Path(template).expanduser().read_text()
            self._rendered([{"role": "user", "content": "a"}], True)
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"data.chat_template={template} cannot be used: {in_one_line(error)[:200]}.") from error

    def input_of(self, prompt: Any) -> dict[str, Any]:
        """A conversation, or what a user says first."""
        return {self.asked[0]: [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}

    def prompt(self, row: Row) -> str:
        return self._tried(row[self.asked[0]], True)

    def parts(self, row: Row) -> tuple[str, str]:
        turns = row[self.asked[0]]
        last = turns[-1] if isinstance(turns, list) and turns else None
        if not isinstance(last, dict) or last.get("role") != "assistant" or not text_in(last.get("content")):
            return "", ""
        prompt, whole = self._tried(turns[:-1], True), self._tried(turns, False)
        # Some templates change earlier turns by what follows.
        return (prompt, whole.removeprefix(prompt)) if prompt and whole.startswith(prompt) else ("", "")

    def record_of(self, row: Row, text: str) -> dict[str, Any]:
        return {self.asked[0]: [*row[self.asked[0]], {"role": "assistant", "content": text.strip()}]}

    def _tried(self, turns: Any, asks: bool) -> str:
        try:
            return text_in(self._rendered(turns, asks))
        except Exception:  # a template may raise anything for turns that it does not know
            return ""

    def _rendered(self, turns: Any, asks: bool) -> str:
        return self._tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            turns, chat_template=self._template, tokenize=False, add_generation_prompt=asks
        )


def text_in(value: Any) -> str:
    """The text that a value is; "" of another value, and of blanks alone."""
    text = value if isinstance(value, str) and value.strip() else ""
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text


def _text_or_number(value: Any) -> str:
    return text_of(value) if isinstance(value, Number) else text_in(value)
