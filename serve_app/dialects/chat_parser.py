"""Parses the text of a chat's answer piece by piece into reasoning, content and tool calls. Independent of HTTP."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import uuid4

from serve_app.dialects.call_readers import CLOSER, OPENER, CallReader, held_back

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call. `index` counts the answer's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that has begun is invalid, because its JSON is broken. The next event has the call's whole text as content."""

    index: int


Event = Reasoning | Content | CallBegun | CallArguments | CallBroken


class ChatParser:
    """Parses one answer. The events do not depend on how the text is cut into pieces, if neighbouring texts are joined.

    `<think>` opens the reasoning if no text is before it. `</think>` ends the reasoning; elsewhere it is dropped. A tool call
    also ends the reasoning. Whitespace at the borders of reasoning, content and calls is dropped. A tag without a call after it
    is text. A broken call becomes content, together with its tag.

    Attributes:
        is_reasoning: whether the text so far ends within the reasoning.
    """

    def __init__(self, *, thinks: bool, is_reasoning: bool = False, new_call: Callable[[], CallReader] | None) -> None:
        """
        Args:
            thinks: whether the model writes its reasoning between tags. If not, these tags are text.
            is_reasoning: whether the prompt has opened the reasoning.
            new_call: makes the reader of a call. None: the answer has no calls, and the tags of calls are text.
        """
        self.is_reasoning = is_reasoning
        self._new_call = new_call
        self._tags = ((THINK, END_THINK) if thinks else ()) + ((OPENER,) if new_call else ())
        self._text = ""  # text that was not parsed yet, because it may be a part of a tag
        self._space = ""  # whitespace at the end of the section, dropped if another section follows
        self._is_blank = True  # whether the section has only whitespace so far
        self._drops_space = is_reasoning  # whether to drop whitespace at the start of the section
        self._call: CallReader | None = None
        self._num_calls = 0
        self._index: int | None = None  # index of the open call, once the call has a name
        self._awaits_closer = False

    @property
    def reads_tags(self) -> bool:
        """Whether the answer may have anything except content."""
        return bool(self._tags)

    def push(self, text: str) -> list[Event]:
        """Returns the events of new text. Text that may be a part of a tag is held back until the next call."""
        if not self._tags:
            return [Content(text)] if text else []
        # The case of most texts. Every tag begins with "<".
        if "<" not in text and not self._text and self._call is None and not self._awaits_closer:
            return self._section(text)
        self._text += text
        return list(self._events())

    def finish(self) -> list[Event]:
        """Returns the events of the text that was held back, at the end of the answer. Closing tags may be missing."""
        events = list(self._events())
        while self._call is not None:  # the text of an invalid call may contain another tag
            self._call.finish()
            events += [*self._read_call(self._call), *self._events()]
        if not self._awaits_closer:  # else the text is a part of the closing tag
            events += self._section(self._text)
        self._text = ""
        if self._space and not (self._is_blank and self._drops_space):
            events.append(self._of_section(self._space))
        return events

    def _events(self) -> Iterator[Event]:
        while True:
            if self._call is not None:
                self._text = self._text[self._call.read(self._text) :]
                yield from self._read_call(self._call)
                if self._call is not None:
                    return
            if self._awaits_closer:
                self._text = self._text.lstrip()
                if len(self._text) < len(CLOSER) and CLOSER.startswith(self._text):
                    return
                self._text = self._text.removeprefix(CLOSER)
                self._awaits_closer = False
            start, tag = min(((at, tag) for tag in self._tags if (at := self._text.find(tag)) >= 0), default=(-1, ""))
            if not tag:
                end = len(self._text) - held_back(self._text, self._tags)
                yield from self._section(self._text[:end])
                self._text = self._text[end:]
                return
            yield from self._section(self._text[:start])
            self._text = self._text[start + len(tag) :]
            yield from self._tag(tag)

    def _tag(self, tag: str) -> Iterator[Event]:
        if tag == OPENER:
            assert self._new_call is not None, "the tag of a call is only found if calls are allowed"
            self._call = self._new_call()
        elif tag == THINK:
            if self._is_blank:
                self._begin_section(is_reasoning=True)
            else:
                yield from self._section(tag)
        elif self.is_reasoning or self._is_blank:
            self._begin_section(is_reasoning=False)

    def _begin_section(self, *, is_reasoning: bool) -> None:
        self.is_reasoning, self._is_blank, self._drops_space, self._space = is_reasoning, True, True, ""

    def _section(self, text: str) -> list[Event]:
        """Adds text to the section, without whitespace that may be the section's end."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if not body:
            return []
        if self._is_blank and self._drops_space:
            body = body.lstrip()
        self._is_blank = False
        return [self._of_section(body)]

    def _of_section(self, text: str) -> Event:
        return Reasoning(text) if self.is_reasoning else Content(text)

    def _read_call(self, call: CallReader) -> Iterator[Event]:
        """The new events of the call. Removes a call that has ended."""
        if call.name is not None and self._index is None:
            self._index = self._num_calls
            self._num_calls += 1
            yield CallBegun(self._index, f"call_{uuid4().hex[:24]}", call.name)
        arguments = call.take_arguments()
        if self._index is not None and arguments:
            yield CallArguments(self._index, arguments)
        if call.status == "open":
            return
        index, self._call, self._index = self._index, None, None
        if call.status == "done":
            self._awaits_closer = True
            self._begin_section(is_reasoning=False)
            return
        if call.status == "broken":
            if self.is_reasoning:
                self._begin_section(is_reasoning=False)
            if index is not None:
                yield CallBroken(index)
        yield from self._section(OPENER + call.raw)
