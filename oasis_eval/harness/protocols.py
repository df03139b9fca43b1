"""Perplexity protocols: which tokens are scored, given which context.

A protocol turns text into windows; it knows no model. Its name fixes everything that changes a
number: the layout of the text, the window, the prefix, the scored part, the normalisation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from oasis_eval.corpus import Corpus, encode, head_tokens
from oasis_eval.errors import DataError, SpecError, UnknownNameError
from oasis_eval.parsing import content_hash

Kind = Literal[
    "gptq", "rolling-word", "qualcomm", "openattnres", "llamacpp", "context", "gsm8k", "passkey"
]
_NAME = re.compile(
    r"^(gptq|qualcomm|openattnres|llamacpp|context)-(\d+)$|^(rolling-word)(?:-(\d+))?$"
)
_PASSKEY = re.compile(r"^passkey-(\d+)$")
_GSM8K = re.compile(r"^gsm8k-(\d+)shot$")
_ENDS_IN_NUMBER = re.compile(r"^(.*?)[-_ ]?(\d+(?:shot)?)$")
VERSIONS: dict[Kind, int] = {
    "gptq": 1,
    "rolling-word": 1,
    "qualcomm": 1,
    "openattnres": 1,
    "llamacpp": 1,
    "context": 1,
    "gsm8k": 3,
    "passkey": 1,
}
"""Raised when a change of the code changes a protocol's numbers."""
_OPENATTNRES_WINDOWS = 200
_QUALCOMM_GROUP = 1000
_SHORTEST_PASSKEY = 256
_MOST_PASSKEY_LENGTHS = 4
CONTEXT_UNIT = 1024
"""Scored tokens that a limit of 1 means under `context-N`, whatever N."""
DEFAULTS = (
    "gptq-2048",
    "rolling-word",
    "qualcomm-512",
    "openattnres-2048",
    "llamacpp-512",
    "context-1024",
)


TASKS: dict[str, str] = {
    "wikitext2": "gptq-2048",
    "wiki40b": "qualcomm-512",
    "bookcorpus": "qualcomm-512",
    "text": "gptq-2048",
    "gsm8k": "gsm8k-5shot",
    "mini_ppl": "gptq-256",
    "mini_gsm": "gsm8k-0shot",
    "passkey": "passkey-1024",
}
"""Task names of `evaluate` and their default protocols."""
QUESTION_TASKS = tuple(task for task, protocol in TASKS.items() if _GSM8K.match(protocol))
"""Tasks that ask questions in GSM8K's form, with examples from a training split."""
ASKING: tuple[Kind, ...] = ("gsm8k", "passkey")
"""Kinds of protocols that ask and score answers; the others score text."""
DEFAULT_NEW_TOKENS = 256
_NEW_TOKENS = {"mini_gsm": 64, "passkey": 16}

Details = dict[str, str | int | float | bool | None]
"""What a run decided that changes its numbers."""


class Window(NamedTuple):
    """One forward pass: what goes in, and which outputs are scored against what."""

    input_ids: list[int]
    targets: list[int]
    """Token that output `offset + i` is scored against."""
    offset: int
    by_position: bool = False
    """Whether losses are also summed by position in the window (see `positions`)."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A named way to measure; see the module's docstring."""

    name: str
    kind: Kind
    window: int | None
    """Tokens of one forward pass; None: every position the model was made for."""
    shots: int = 0

    @property
    def version(self) -> int:
        """Raised when a change of the code changes its numbers."""
        return VERSIONS[self.kind]

    @property
    def asks(self) -> bool:
        """Whether it asks and scores answers; if not, it scores text."""
        return self.kind in ASKING

    @property
    def lengths(self) -> tuple[int, ...]:
        """Context lengths of `passkey-N`: N and its halves, at most four, from 256 on."""
        if self.kind != "passkey" or self.window is None:
            return ()
        halves = [self.window >> at for at in range(_MOST_PASSKEY_LENGTHS)]
        kept = [length for length in halves[1:] if length >= _SHORTEST_PASSKEY]
        return (*reversed(kept), self.window)

    @property
    def sha256(self) -> str:
        """Hash of name, version and summary."""
        return content_hash([self.name, self.version, self.summary])

    @property
    def per_document(self) -> bool:
        """Whether each document is scored by itself."""
        return self.kind == "rolling-word"

    @property
    def summary(self) -> str:
        """One line for footnotes."""
        size = f"{self.window}" if self.window else "model-length"
        return {
            "gptq": "one token stream, rows joined with two newlines, non-overlapping "
            f"{size}-token windows, tail dropped, {(self.window or 1) - 1} scored tokens each, "
            "per token",
            "rolling-word": f"documents detokenised, rolling {size} windows, each token scored "
            "once, first token given one prefix token, per word of the original text",
            "qualcomm": f"documents tokenised alone, concatenated per {_QUALCOMM_GROUP}, "
            f"{size}-token blocks, remainder dropped, per token",
            "openattnres": f"one token stream, first {_OPENATTNRES_WINDOWS} {size}-token windows, "
            "short tail included, per token",
            "llamacpp": f"file's text, {size}-token windows, first token replaced by BOS where the "
            "tokenizer adds one, second half scored, per token",
            "context": f"one token stream, windows of {size} tokens, each headed by the "
            "tokenizer's start tokens, every token but the stream's first scored once whatever "
            "the window, tail included, per token",
            "passkey": f"a five-digit number in generated prose at five depths, contexts of "
            f"{', '.join(str(length) for length in self.lengths)} tokens with the answer, greedy, "
            "first number of the completion compared digit by digit",
            "gsm8k": f"{self.shots}-shot, greedy, first completion, numbers compared as numbers",
        }[self.kind]


def parse_protocol(name: str) -> Protocol:
    """Return the protocol of that name; the window is part of it (`gptq-1024`).

    Raises:
        UnknownNameError: No protocol is called that.
        SpecError: The window is too short to score anything.
    """
    if match := _GSM8K.match(name):
        return Protocol(name=name, kind="gsm8k", window=None, shots=int(match[1]))
    if match := _PASSKEY.match(name):
        return Protocol(name=name, kind="passkey", window=int(match[1]))
    match = _NAME.match(name)
    if match is None:
        meant = _ENDS_IN_NUMBER.sub(r"\1-\2", name.lower())
        if meant != name and any(form.match(meant) for form in (_NAME, _PASSKEY, _GSM8K)):
            raise UnknownNameError("protocol", name, [meant])
        raise UnknownNameError("protocol", name, [*DEFAULTS, "gsm8k-5shot", "passkey-1024"])
    kind: Any = match[1] or match[3]
    size = match[2] or match[4]
    window = int(size) if size else None
    if window is not None and window < (4 if kind == "llamacpp" else 2):
        raise SpecError(f"protocol {name!r}: a window of {window} tokens scores nothing")
    return Protocol(name=name, kind=kind, window=window)


def fits(protocol: Protocol, task: str) -> bool:
    """Tell whether a protocol can score a task: texts, questions and passkeys are apart."""
    own = parse_protocol(TASKS[task])
    return protocol.kind == own.kind if protocol.asks or own.asks else True


def new_tokens(task: str) -> int:
    """Return how long a task's answers may be by default, in tokens."""
    return _NEW_TOKENS.get(task, DEFAULT_NEW_TOKENS)


def with_window(protocol: Protocol, window: int) -> Protocol:
    """Return the protocol with another window, which is another name; GSM8K has none."""
    if protocol.kind == "gsm8k":
        return protocol
    return parse_protocol(f"{protocol.kind}-{window}")


@dataclass(frozen=True, slots=True)
class Plan:
    """The windows of one text and what was decided while cutting them."""

    windows: list[Window]
    details: Details


def prefix_token(tokenizer: Any) -> tuple[int | None, str]:
    """Return the token that conditions a document's first token: start token, else end token.

    Returns:
        Its id (None where the tokenizer has neither) and what it is.
    """
    if tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id), "bos"
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id), "eos"
    return None, "none"


def plan(
    protocol: Protocol,
    texts: Sequence[str],
    tokenizer: Any,
    *,
    context_length: int | None,
    limit: int | None = None,
) -> Plan:
    """Cut text into windows.

    Args:
        protocol: How.
        texts: The stream or file as one string, or documents (`qualcomm`), or one document
            (`rolling-word`).
        tokenizer: A transformers tokenizer.
        context_length: Positions of the model.
        limit: Keep this many windows.

    Raises:
        DataError: The text yields no whole window, or the window exceeds the positions.
    """
    window = protocol.window or context_length
    if window is None:
        raise DataError(
            f"{protocol.name}: the model states no number of positions; give --window N"
        )
    if context_length is not None and window > context_length:
        raise DataError(
            f"{protocol.name}: window of {window} tokens, the model has {context_length} "
            f"positions; give --window {context_length} or less"
        )
    cut = {
        "gptq": _gptq,
        "rolling-word": _rolling,
        "qualcomm": _qualcomm,
        "openattnres": _openattnres,
        "llamacpp": _llamacpp,
        "context": _context,
    }[protocol.kind]
    return cut(texts, tokenizer, window, limit)


def texts_of(protocol: Protocol, corpus: Corpus) -> list[list[str]]:
    """Return what is scored as a unit: one list of texts per harness document."""
    if protocol.kind == "rolling-word":
        return [[document] for document in corpus.documents()]
    if protocol.kind == "qualcomm":
        return [corpus.documents()]
    if protocol.kind == "llamacpp":
        return [[corpus.raw()]]
    return [[corpus.stream()]]


def _block(ids: list[int]) -> Window:
    return Window(input_ids=ids, targets=ids[1:], offset=0)


def _short(name: str, have: int, need: int) -> DataError:
    return DataError(
        f"{name}: the text has {have} tokens, a window needs {need}; "
        "give a longer text or a smaller --window"
    )


def _gptq(texts: Sequence[str], tokenizer: Any, window: int, limit: int | None) -> Plan:
    ids = encode(tokenizer, texts[0], special_tokens=True)
    starts = range(0, len(ids) - window + 1, window)[:limit]
    if not starts:
        raise _short(f"gptq-{window}", len(ids), window)
    windows = [_block(ids[start : start + window]) for start in starts]
    return Plan(windows, {"window": window, "prefix": _head(tokenizer, ids), "tail": "dropped"})


def _openattnres(texts: Sequence[str], tokenizer: Any, window: int, limit: int | None) -> Plan:
    ids = encode(tokenizer, texts[0], special_tokens=True)
    if len(ids) < 2:
        raise _short(f"openattnres-{window}", len(ids), 2)
    most = min(limit or _OPENATTNRES_WINDOWS, _OPENATTNRES_WINDOWS)
    starts = range(0, len(ids) - 1, window)[:most]
    windows = [_block(ids[start : start + window]) for start in starts]
    return Plan(windows, {"window": window, "prefix": _head(tokenizer, ids), "tail": "included"})


def _qualcomm(texts: Sequence[str], tokenizer: Any, window: int, limit: int | None) -> Plan:
    windows: list[Window] = []
    skipped = tokens = 0
    for start in range(0, len(texts), _QUALCOMM_GROUP):
        ids: list[int] = []
        for text in texts[start : start + _QUALCOMM_GROUP]:
            document = encode(tokenizer, text, special_tokens=True)
            skipped += not document
            ids += document
        tokens += len(ids)
        windows += [_block(ids[at : at + window]) for at in range(0, len(ids) - window + 1, window)]
        if limit is not None and len(windows) >= limit:
            break
    if not windows:
        raise _short(f"qualcomm-{window}", tokens, window)
    head = encode(tokenizer, "", special_tokens=True)
    details: Details = {
        "window": window,
        "prefix": f"tokenizer default {head}",
        "skipped": skipped,
    }
    return Plan(windows[:limit], details)


def _llamacpp(texts: Sequence[str], tokenizer: Any, window: int, limit: int | None) -> Plan:
    ids = encode(tokenizer, texts[0], special_tokens=True)
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and bool(ids) and ids[0] == bos
    first = window // 2
    starts = range(0, len(ids) - window + 1, window)[:limit]
    if not starts:
        raise _short(f"llamacpp-{window}", len(ids), window)
    windows = []
    for start in starts:
        chunk = ids[start : start + window]
        if adds_bos:
            chunk[0] = int(bos)
        windows.append(Window(input_ids=chunk, targets=chunk[first + 1 :], offset=first))
    prefix = "bos replaces the first token of a window" if adds_bos else "none"
    return Plan(windows, {"window": window, "prefix": prefix, "tail": "dropped"})


def _context(texts: Sequence[str], tokenizer: Any, window: int, limit: int | None) -> Plan:
    # Each window begins with the last target of the one before it, which it is not asked again: the
    # same tokens are scored whatever the window.
    ids = encode(tokenizer, texts[0], special_tokens=False)
    head = head_tokens(tokenizer)
    body = window - len(head)
    scored = len(ids) - 1 if limit is None else min(len(ids) - 1, limit * CONTEXT_UNIT)
    if body < 1 or len(ids) <= body:
        raise _short(f"context-{window}", len(ids), max(body, 1) + 1)
    if scored < body:
        raise DataError(f"context-{window}: --limit {limit} is {scored} tokens; give one window's")
    windows = []
    for start in range(0, scored, body):
        stop = min(start + body, scored)
        inputs, targets = [*head, *ids[start:stop]], ids[start + 1 : stop + 1]
        windows.append(Window(inputs, targets, offset=len(head), by_position=True))
    prefix = "start tokens head every window" if head else "none"
    details: Details = {"window": window, "prefix": prefix, "tail": "included", "scored": scored}
    return Plan(windows, details)


def _rolling(texts: Sequence[str], tokenizer: Any, window: int, _limit: int | None) -> Plan:
    # A limit counts documents here; the harness applies it.
    ids = encode(tokenizer, texts[0], special_tokens=False)
    prefix, name = prefix_token(tokenizer)
    windows = list(rolling_windows(ids, prefix, window))
    return Plan(windows, {"window": window, "prefix": name})


def rolling_windows(ids: list[int], prefix: int | None, window: int) -> Iterator[Window]:
    """Cut a document so that each token is scored once, with as much context as a window holds.

    Args:
        ids: Tokens of the document.
        prefix: Token that conditions the first one; None: scoring starts at the second.
        window: Most tokens of one forward pass.
    """
    stream = ids if prefix is None else [prefix, *ids]
    scored = 1  # stream[0] is context only
    while scored < len(stream):
        end = min(scored + window, len(stream)) if scored > 1 else min(window + 1, len(stream))
        start = max(0, end - 1 - window)
        inputs = stream[start : end - 1]
        yield Window(input_ids=inputs, targets=stream[scored:end], offset=scored - 1 - start)
        scored = end


def _head(tokenizer: Any, ids: list[int]) -> str:
    bos = tokenizer.bos_token_id
    return "bos" if bos is not None and ids and ids[0] == bos else "none"


def detokenizer(corpus_name: str) -> Callable[[str], str]:
    """Return what undoes a data set's tokenisation before word-level scoring (WikiText only)."""
    if corpus_name != "wikitext2":
        return str
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    detokenize: Callable[[str], str] = lambda text: wikitext_detokenizer({"page": text})  # noqa: E731
    return detokenize
