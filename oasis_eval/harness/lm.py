"""A prepared model as an lm-eval language model.

Scores and completions are ordinary floats and strings to lm-eval; they carry what our own tasks
need besides (windows, token counts, whether a completion was cut), so any stock task runs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from oasis_eval import progress, ranks
from oasis_eval.corpus import encode, head_tokens
from oasis_eval.errors import DataError, SpecError
from oasis_eval.harness import protocols
from oasis_eval.harness.protocols import Details, Plan, Window, parse_protocol, plan, prefix_token
from oasis_eval.harness.scoring import Scorer, WindowScore
from oasis_eval.prepared import PreparedModel

_KNOWN_GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class TextScore(float):
    """Log-likelihood of a text in nats (a negative number), with the windows behind it."""

    windows: list[WindowScore]
    details: Details

    @classmethod
    def of(cls, windows: list[WindowScore], details: Details) -> TextScore:
        """Sum the windows' losses in float64."""
        score = cls(-sum(window.nll_nats for window in windows))
        score.windows = windows
        score.details = details
        return score

    @property
    def num_tokens(self) -> int:
        """Tokens that were scored."""
        return sum(window.num_tokens for window in self.windows)


class PairScore(tuple[float, bool]):
    """`(log-likelihood, is greedy)` of a continuation, with its number of scored tokens."""

    num_tokens: int

    @classmethod
    def of(cls, score: WindowScore) -> PairScore:
        """Turn a window's loss into what lm-eval expects."""
        pair = cls((-score.nll_nats, score.is_greedy))
        pair.num_tokens = score.num_tokens
        return pair


class Completion(str):
    """A generated text, cut at its first stop string."""

    __slots__ = ("cut", "num_tokens", "prompt_tokens", "prompt_truncated")

    cut: bool
    """Whether the token limit ended it, not a stop string or end token."""
    num_tokens: int
    prompt_tokens: int
    prompt_truncated: bool
    """Whether the prompt lost its beginning to fit the window."""


class OasisLM(TemplateLM):
    """lm-eval's interface over one prepared model."""

    def __init__(
        self, prepared: PreparedModel, *, batch_size: int = 1, quiet: bool = False
    ) -> None:
        """Wrap a model that stays prepared for as long as this object is used.

        Args:
            prepared: Model, tokenizer and scheme.
            batch_size: Sequences of one forward pass.
            quiet: Whether to hide progress bars.
        """
        super().__init__()
        self.prepared = prepared
        self.tokenizer = prepared.tokenizer
        self.batch_size = batch_size
        self.scorer = Scorer(prepared.model, device=prepared.device)
        self._device = torch.device(prepared.device)
        self._quiet = quiet
        self._model: Any = prepared.model

    # --- what lm-eval asks of a model -------------------------------------------------------

    @property
    def max_length(self) -> int:
        """Positions of the model.

        Raises:
            DataError: Neither card nor configuration says.
        """
        if self.prepared.context_length is None:
            name = self.prepared.card.name
            raise DataError(f"{name}: no number of positions is known; give one in its card")
        return self.prepared.context_length

    @property
    def eot_token_id(self) -> int | None:
        """End-of-text token."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int | None:
        """Token that conditions a text without context: start token, else end token."""
        return prefix_token(self.tokenizer)[0]

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches rendered chat prompts."""
        return self.prepared.digest

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the tokenizer's template."""
        if self.tokenizer.chat_template is None:
            raise DataError(f"{self.prepared.card.name}: the tokenizer has no chat template")
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Tokenize; the default special tokens are added unless the text begins with them."""
        if add_special_tokens is None:
            start = self.tokenizer.bos_token
            add_special_tokens = not (start and string.startswith(start))
        ids = encode(self.tokenizer, string, special_tokens=False)
        return [*head_tokens(self.tokenizer), *ids] if add_special_tokens else ids

    def set_cache_hook(self, cache_hook: object) -> None:
        """Refuse lm-eval's response cache.

        Raises:
            SpecError: Always; the cache knows the request only, so a W4A4 run would be given a
                floating-point answer.
        """
        raise SpecError(
            "--use_cache keys on the request's text alone, so another scheme or checkpoint would "
            "get this one's answers; run without it (`oasis-eval evaluate` keeps records)"
        )

    # --- perplexity -------------------------------------------------------------------------

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts under the protocol that each document names, else `rolling-word`."""
        plans = [self._plan(request) for request in requests]
        windows = [window for item in plans for window in item.windows]
        scores = self._score(windows, disable_tqdm)
        results: list[float] = []
        start = 0
        for item in plans:
            end = start + len(item.windows)
            details = {**item.details, "head": "tiled" if self.scorer.tiled else "whole"}
            results.append(TextScore.of(scores[start:end], details))
            start = end
        return results

    def _plan(self, request: Instance) -> Plan:
        doc = request.doc if isinstance(request.doc, dict) else {}
        name = doc.get("oasis_protocol")
        texts = doc["documents"] if name else [request.args[0]]
        return plan(
            parse_protocol(name or "rolling-word"),
            texts,
            self.tokenizer,
            context_length=self.prepared.context_length,
            limit=doc.get("oasis_limit"),
        )

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Score continuations given contexts, without lm-eval's bar over tokenization."""
        result: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return result

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int | None], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: object,
    ) -> list[tuple[float, bool]]:
        """Score continuations given contexts; a context too long loses its beginning."""
        windows = []
        for _, given, continuation in requests:
            # lm-eval writes None for a prefix token that does not exist, and hands white space at
            # the end of a context, which may be all of it, on to the continuation.
            context = [token for token in given if token is not None] or self._prefix()
            if len(continuation) > self.max_length or not continuation:
                raise DataError(
                    f"a continuation has {len(continuation)} tokens; expected 1 to "
                    f"{self.max_length}, the model's positions"
                )
            inputs = (context + continuation)[-(self.max_length + 1) :][:-1]
            offset = len(inputs) - len(continuation)
            windows.append(Window(input_ids=inputs, targets=continuation, offset=offset))
        return [PairScore.of(score) for score in self._score(windows, False)]

    def _prefix(self) -> list[int]:
        token = self.prefix_token_id
        if token is None:
            raise DataError("the tokenizer has neither a start nor an end token to begin with")
        return [token]

    def _score(self, windows: Sequence[Window], disable_tqdm: bool) -> list[WindowScore]:
        hidden = self._quiet or disable_tqdm
        with progress.bar(what="scoring", quiet=hidden, total=len(windows), unit="window") as bar:
            return self.scorer.score(windows, batch_size=self.batch_size, on_batch=bar.update)

    # --- generation -------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate completions, longest prompts first, in batches of equal options."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        batches: list[tuple[list[int], _Generation]] = []
        prompts: dict[int, tuple[list[int], bool]] = {}
        for indices in groups.values():
            options = _Generation.parse(requests[indices[0]].args[1])
            prompts.update({i: self._prompt(requests[i].args[0], options) for i in indices})
            order = sorted(indices, key=lambda i: (-len(prompts[i][0]), i))
            for start in range(0, len(order), self.batch_size):
                batches.append((order[start : start + self.batch_size], options))
        if ranks.current().count > 1 and any(item.sampling["do_sample"] for _, item in batches):
            raise SpecError("sampled completions depend on the order of draws: use one process")
        hidden = self._quiet or disable_tqdm
        with progress.bar(
            what="answering", quiet=hidden, total=len(requests), unit="question"
        ) as bar:
            found = ranks.current().share(
                batches,
                lambda batch: self._generate([prompts[i][0] for i in batch[0]], batch[1]),
                on_done=lambda batch: bar.update(len(batch[0])),
            )
        results: dict[int, Completion] = {}
        for (batch, _), texts in zip(batches, found, strict=True):
            for i, text in zip(batch, texts, strict=True):
                text.prompt_tokens, text.prompt_truncated = len(prompts[i][0]), prompts[i][1]
                results[i] = text
        return [results[index] for index in range(len(requests))]

    def _prompt(self, text: str, options: _Generation) -> tuple[list[int], bool]:
        """Tokenize a prompt and cut its beginning where the window demands it."""
        ids = self.tok_encode(text) or self._prefix()
        room = self.max_length - options.max_new_tokens
        if room < 1:
            raise SpecError(
                f"{options.max_new_tokens} new tokens do not fit the model's {self.max_length} "
                "positions; ask for fewer with --max-new-tokens"
            )
        if len(ids) <= room:
            return ids, False
        head = head_tokens(self.tokenizer)[: room - 1]
        return [*head, *ids[len(ids) - room + len(head) :]], True

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], options: _Generation) -> list[Completion]:
        width = max(len(prompt) for prompt in prompts)
        pad = _first(self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        ids_BT = torch.full((len(prompts), width), pad, device=self._device)
        mask_BT = torch.zeros_like(ids_BT)
        for row, prompt in enumerate(prompts):
            ids_BT[row, width - len(prompt) :] = torch.tensor(prompt, device=self._device)
            mask_BT[row, width - len(prompt) :] = 1
        ends = self._end_tokens(options.until)
        stopped = _StopStrings(self.tokenizer, options.until, shape=(len(prompts), width))
        # A checkpoint's own generation defaults (a short max_length, a repetition penalty, ...)
        # must not reach a measurement, so ours replace them while it runs.
        config = GenerationConfig(
            max_new_tokens=options.max_new_tokens,
            pad_token_id=pad,
            eos_token_id=ends or None,
            **options.sampling,
        )
        output_BT = self._generate_ids(ids_BT, mask_BT, config, stopped)
        completions = []
        for row, length in zip(output_BT[:, width:].tolist(), stopped.lengths, strict=True):
            ended = next((at for at, token in enumerate(row) if token in ends), None)
            kept = row[:ended][:length]  # padding follows where the rest of a batch went on
            text, found = _cut(self.tokenizer.decode(kept, skip_special_tokens=True), options.until)
            completion = Completion(text)
            completion.cut = ended is None and not found and len(kept) >= options.max_new_tokens
            completion.num_tokens = len(kept)
            completions.append(completion)
        return completions

    def _generate_ids(
        self,
        ids_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        config: GenerationConfig,
        stopped: _StopStrings,
    ) -> torch.Tensor:
        before = self._model.generation_config
        self._model.generation_config = config
        try:
            output: torch.Tensor = self._model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([stopped]),
            )
        finally:
            self._model.generation_config = before
        return output

    def _end_tokens(self, until: list[str]) -> list[int]:
        """Return the model's end tokens, and stop strings that are special tokens.

        Decoding drops special tokens, so they are not to be found in the text.
        """
        given = getattr(self._model.generation_config, "eos_token_id", None)
        listed = given if isinstance(given, list) else [given]
        added = self.tokenizer.added_tokens_decoder.items()
        special = [index for index, token in added if token.special and token.content in until]
        found = {*listed, self.tokenizer.eos_token_id, *special}
        return sorted(token for token in found if token is not None)


class _Generation:
    """Options of one generation request."""

    def __init__(self, until: list[str], max_new_tokens: int, sampling: dict[str, Any]) -> None:
        self.until = until
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling

    @classmethod
    def parse(cls, options: dict[str, Any]) -> _Generation:
        unknown = set(options) - _KNOWN_GENERATION
        if unknown:
            raise SpecError(
                f"generation option {sorted(unknown)[0]!r} is not supported; "
                f"known: {', '.join(sorted(_KNOWN_GENERATION))}"
            )
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        sampling: dict[str, Any] = {"do_sample": bool(options.get("do_sample", False))}
        if sampling["do_sample"]:
            for name in ("temperature", "top_p", "top_k"):
                if name in options:
                    sampling[name] = options[name]
        new_tokens = int(options.get("max_gen_toks", protocols.DEFAULT_NEW_TOKENS))
        return cls([stop for stop in stops if stop], new_tokens, sampling)


class _StopStrings(StoppingCriteria):
    """Stops each row when its decoded text holds a stop string, however it is tokenized."""

    def __init__(self, tokenizer: Any, until: list[str], *, shape: tuple[int, int]) -> None:
        """Take what to look for and the shape of the prompts, [sequences, tokens]."""
        self._tokenizer = tokenizer
        self._until = until
        self._start = shape[1]
        self.lengths: list[int | None] = [None] * shape[0]
        """New tokens of each row when its stop string was complete; None: not found."""

    def __call__(
        self, input_ids: torch.Tensor, scores: object, **kwargs: object
    ) -> torch.BoolTensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._start :], skip_special_tokens=True)
        done = [any(stop in text for stop in self._until) for text in texts]
        for row, is_done in enumerate(done):
            if is_done and self.lengths[row] is None:
                self.lengths[row] = input_ids.shape[1] - self._start
        return torch.tensor(done, device=input_ids.device)  # type: ignore[return-value]


def _cut(text: str, until: list[str]) -> tuple[str, bool]:
    """Return the text before its first stop string, and whether there was one."""
    places = [text.find(stop) for stop in until if stop in text]
    return (text[: min(places)], True) if places else (text, False)


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
