"""Completions: where they stop, what prompt they get, and that nothing else shapes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from oasis_eval import corpus
from oasis_eval.errors import DataError, SpecError
from oasis_eval.harness import run as harness
from oasis_eval.harness.lm import Completion, OasisLM
from oasis_eval.harness.run import Outcome, TaskData
from oasis_eval.loading import Reference, prepare
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant import schemes
from oasis_eval.spec import DirSource, ModelCard, TaskRef
from tests import tiny
from tests.harness.conftest import load_folder, metric

STOPS = ["\n\nQuestion:"]
EMITTED = (
    "First restate the Question: how many clips? So 48+24.\n#### 72"
    "\n\nQuestion: Next one?\nAnswer: 5\n#### 5"
)


class Scripted(PreTrainedModel, GenerationMixin):
    """A model that answers a prompt which holds a key with that key's script, then its end token.

    It reads where it is from its input: the longest tail of the tokens that begins the script.
    """

    config_class = LlamaConfig
    base_model_prefix = "none"
    _supports_cache_class = False

    def __init__(self, scripts: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(LlamaConfig(vocab_size=400, max_position_embeddings=4096))
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.scripts = scripts

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: object
    ) -> CausalLMOutputWithPast:
        logits_BTV = torch.zeros(*input_ids.shape, 400)
        for row, tokens in enumerate(input_ids.tolist()):
            logits_BTV[row, -1, self._next(tokens)] = 50.0
        return CausalLMOutputWithPast(logits=logits_BTV)

    def _next(self, tokens: list[int]) -> int:
        for key, script in self.scripts.items():
            if any(tuple(tokens[i : i + len(key)]) == key for i in range(len(tokens))):
                done = max(k for k in range(len(script)) if k == 0 or tokens[-k:] == script[:k])
                return script[done]
        return 3

    def get_output_embeddings(self) -> None:
        return None

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}


def scripted(tokenizer: Any, scripts: dict[str, str], *, batch_size: int = 1) -> OasisLM:
    """The lm-eval model over a script."""
    ids = {
        tuple(tokenizer(key).input_ids): [*tokenizer(text).input_ids, 2]
        for key, text in scripts.items()
    }
    return wrapped(Scripted(ids), tokenizer, batch_size=batch_size)


def wrapped(model: Any, tokenizer: Any, *, batch_size: int = 1, positions: int = 4096) -> OasisLM:
    """The lm-eval model over a ready-made model object."""
    prepared = PreparedModel(
        model=model,
        tokenizer=tokenizer,
        card=ModelCard(name="m", family="any", source=DirSource(path="."), label="m"),
        digest="0",
        scheme=schemes.resolve("fp32"),
        dtype="fp32",
        device="cpu",
        context_length=positions,
        attention="eager",
    )
    return OasisLM(prepared, batch_size=batch_size, quiet=True)


def ask(model: OasisLM, prompts: Sequence[str], **options: object) -> list[Completion]:
    """Complete prompts through lm-eval's interface."""
    requests = [
        Instance("generate_until", {}, (prompt, dict(options)), index)
        for index, prompt in enumerate(prompts)
    ]
    return model.generate_until(requests)  # type: ignore[return-value]


# --- stop strings -----------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [STOPS[0], STOPS, ["@", *STOPS], (STOPS[0],)])
def test_a_stop_string_is_the_boundary_not_its_words(stop: object) -> None:
    """The word inside the reasoning does not stop it; a string and a list behave alike."""
    model = scripted(tiny.build_tokenizer(), {"clips": EMITTED})

    (text,) = ask(model, ["Question: clips?\nAnswer: "], until=stop, max_gen_toks=200)

    assert text == "First restate the Question: how many clips? So 48+24.\n#### 72"
    assert not text.cut


def _subword_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of up to three characters, so that a stop string begins and ends inside tokens."""
    alphabet = sorted(set(EMITTED) | set("Qclips? "))
    merges = [("\n", "\n"), ("2", "\n\n"), ("Q", "u"), (":", " "), ("o", "n")]
    names = ["<unk>", "<s>", "</s>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("stop", ["\n\nQuestion:", "\nQ", "estion:", "ion: N"])
def test_a_stop_string_may_begin_and_end_inside_tokens(stop: str) -> None:
    """The kept text is what stands before the stop string, however it is tokenized."""
    tokenizer = _subword_tokenizer()
    answer = EMITTED.removeprefix("First restate the Question: ")
    assert any("2\n\n" in token for token in tokenizer.tokenize(answer))
    model = scripted(tokenizer, {"Q": answer})

    (text,) = ask(model, ["Q"], until=[stop], max_gen_toks=200)

    assert text == answer[: answer.index(stop)]


def test_the_scripted_answer_is_scored_as_its_first_number(
    tmp_path: Path, gsm8k_row: Callable[[str, str], str]
) -> None:
    """Through the task file and lm-eval: 72 is the answer, though the text went on to 5."""
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(gsm8k_row("How many clips?", "48+24\n#### 72") * 2)
    model = scripted(tiny.build_tokenizer(), {"clips": EMITTED})
    ref = TaskRef(name="gsm8k", protocol="gsm8k-0shot", data=str(path), max_new_tokens=150)
    data = TaskData((corpus.load("gsm8k", data=str(path)),))

    outcome = harness.evaluate(model.prepared, ref, data, batch_size=2, quiet=True)

    assert metric(outcome, "pass@1") == 1.0
    assert metric(outcome, "pass@1_flexible") == 1.0
    assert "#### 72" in str(outcome.samples[0]["completion"])
    assert "#### 5" not in str(outcome.samples[0]["completion"])
    assert outcome.protocol.details["num_cut"] == 0


def test_a_stop_string_that_is_a_special_token_stops(tmp_path: Path) -> None:
    """Special tokens vanish from decoded text, so they are recognised by their id."""
    tokenizer = tiny.build_tokenizer(padding="own")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = tokenizer("one").input_ids
    model = wrapped(
        Scripted({tuple(tokenizer("Q").input_ids): [*answer, turn, *answer, 2]}), tokenizer
    )

    (text,) = ask(model, ["Q"], until=["<|im_end|>"], max_gen_toks=20)

    assert text == "one"


@pytest.mark.parametrize("padding", ["own", "end", "none"])
def test_a_batch_gives_each_prompt_its_own_completion(padding: tiny.Padding) -> None:
    """Texts, lengths and cut marks are those of asking one by one, whoever stops first."""
    scripts = {
        "ape": "short" + STOPS[0] + " more",
        "bee": "no stop, but an end",
        "cat": "a text that the token limit will cut off at some point",
        "dog": "medium" + STOPS[0] + "x" * 50,
    }
    prompts = ["an ape", "see a bee here", "cat", "what does a dog do all day?"]
    tokenizer = tiny.build_tokenizer(padding=padding)
    options = {"until": STOPS, "max_gen_toks": 30}

    batched = ask(scripted(tokenizer, scripts, batch_size=4), prompts, **options)

    def facts(text: Completion) -> tuple[object, ...]:
        return str(text), text.cut, text.num_tokens, text.prompt_tokens, text.prompt_truncated

    single = [ask(scripted(tokenizer, scripts), [prompt], **options)[0] for prompt in prompts]
    assert [facts(text) for text in batched] == [facts(text) for text in single]
    assert [str(text) for text in batched] == [
        "short",
        "no stop, but an end",
        "a text that the token limit wi",
        "medium",
    ]
    assert [text.cut for text in batched] == [False, False, True, False]


@pytest.mark.parametrize("padding", ["own", "end", "none"])
def test_batching_a_real_model_changes_no_text(tmp_path: Path, padding: tiny.Padding) -> None:
    """Left padding of a batch is hidden from the model, with any pad token or none."""
    tokenizer = tiny.build_tokenizer(padding=padding)
    reference = load_folder(tiny.save(tmp_path / "m", tokenizer=tokenizer))
    prompts = [tiny.prose(length, seed=length) for length in (3, 40, 17, 60, 40)]
    made = []
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        for size in (1, 2, 5):
            model = OasisLM(prepared, batch_size=size, quiet=True)
            made.append([str(text) for text in ask(model, prompts, max_gen_toks=24)])

    assert made[0] == made[1] == made[2]
    assert len(set(made[0])) > 1


def test_options_of_one_call_are_kept_apart() -> None:
    """Requests with other stops or limits never share a batch's options."""
    model = scripted(tiny.build_tokenizer(), {"Q": "abc@def@ghi"}, batch_size=4)
    requests = [
        Instance("generate_until", {}, ("Q", {"until": until, "max_gen_toks": limit}), index)
        for index, (until, limit) in enumerate(
            [(["@"], 20), (["d"], 20), ([], 20), ([], 5), (["", "g"], 20)]
        )
    ]

    texts = [str(text) for text in model.generate_until(requests)]

    assert texts == ["abc", "abc@", "abc@def@ghi", "abc@d", "abc@def@"]


def test_an_unknown_option_is_refused() -> None:
    """An option that would change the text is never ignored."""
    with pytest.raises(SpecError, match="'num_beams' is not supported"):
        ask(scripted(tiny.build_tokenizer(), {"Q": "a"}), ["Q"], num_beams=4)


# --- the checkpoint's own generation defaults -------------------------------------------------


@pytest.mark.parametrize(
    "defaults",
    [
        {"max_length": 20},
        {"max_new_tokens": 3},
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"do_sample": True, "temperature": 9.0},
        {"do_sample": True, "top_k": 3, "top_p": 0.5},
        {"num_beams": 3},
        {"bad_words_ids": [[5], [6], [7]]},
        {"suppress_tokens": [3, 4, 5, 6, 7, 8]},
        {"min_new_tokens": 40, "min_length": 100},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 2},
        {"use_cache": False},
    ],
    ids=lambda item: next(iter(item)),
)
def test_generation_defaults_of_a_checkpoint_do_not_leak(
    tmp_path: Path, tiny_reference: Reference, defaults: dict[str, object]
) -> None:
    """A checkpoint's `generation_config.json` changes no completion."""
    reference = load_folder(tiny.save(tmp_path / "m", generation=defaults))

    texts = _complete(reference)

    assert texts == _complete(tiny_reference)
    assert reference.model.generation_config.to_dict().items() >= defaults.items()


def _complete(reference: Reference) -> list[str]:
    prompts = [tiny.prose(30, seed=seed) for seed in range(3)]
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        model = OasisLM(prepared, batch_size=2, quiet=True)
        return [str(text) for text in ask(model, prompts, max_gen_toks=30)]


def test_end_tokens_of_the_checkpoint_do_count(tmp_path: Path, tiny_reference: Reference) -> None:
    """Which tokens end a text is the model's to say: several may."""
    plain = _complete(tiny_reference)
    first = tiny_reference.tokenizer(plain[0][4]).input_ids[0]
    folder = tiny.save(tmp_path / "m", generation={"eos_token_id": [2, first]})

    texts = _complete(load_folder(folder))

    assert texts[0] == plain[0][: plain[0].index(plain[0][4])]


# --- prompts that do not fit ------------------------------------------------------------------


def _questions(
    reference: Reference, folder: Path, max_new_tokens: int, *, shots: int = 5
) -> Outcome:
    row = json.dumps({"question": tiny.prose(60), "answer": f"{tiny.prose(50)}\n#### 12"}) + "\n"
    path = folder / "gsm8k.jsonl"
    path.write_text(row * 6)
    loaded = corpus.load("gsm8k", data=str(path))
    ref = TaskRef(
        name="gsm8k",
        protocol=f"gsm8k-{shots}shot",
        data=str(path),
        limit=2,
        max_new_tokens=max_new_tokens,
    )
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        data = TaskData((loaded, loaded) if shots else (loaded,))
        return harness.evaluate(prepared, ref, data, batch_size=2, quiet=True)


@pytest.mark.parametrize("budget", [128, 129, 256, 100_000])
def test_a_budget_beyond_the_positions_is_refused(
    tmp_path: Path, tiny_reference: Reference, budget: int
) -> None:
    """One line with both numbers, never an empty prompt."""
    with pytest.raises(SpecError, match=f"{budget} new tokens do not fit the model's 128"):
        _questions(tiny_reference, tmp_path, budget)


@pytest.mark.parametrize("budget", [100, 64, 127])
def test_a_long_prompt_keeps_its_tail(
    tmp_path: Path, tiny_reference: Reference, budget: int
) -> None:
    """The question stays, the examples go, and the number of such prompts is in the result."""
    outcome = _questions(tiny_reference, tmp_path, budget)

    assert outcome.protocol.details["num_prompt_truncated"] == 2
    assert any("2 prompts lost their beginning" in text for text in outcome.warnings)
    assert [row["prompt_tokens"] for row in outcome.samples] == [128 - budget] * 2
    assert metric(outcome, "prompt_truncated") == 1.0


def test_a_prompt_that_fits_is_not_counted(tmp_path: Path, tiny_reference: Reference) -> None:
    """No mark on a prompt that is whole."""
    outcome = _questions(tiny_reference, tmp_path, 20, shots=0)

    assert outcome.protocol.details["num_prompt_truncated"] == 0
    assert outcome.warnings == ()


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("budget", [1, 50, 100, 126, 127])
def test_the_tail_that_is_kept_is_the_end_of_the_prompt(
    tiny_reference: Reference, starting_reference: Reference, budget: int, starts: bool
) -> None:
    """With a model object handed in: the last tokens, behind the start token if one is added."""
    reference = starting_reference if starts else tiny_reference
    model = wrapped(reference.model, reference.tokenizer, positions=128)
    prompt = tiny.prose(700)

    ids, truncated = model._prompt(prompt, SimpleNamespace(max_new_tokens=budget))  # type: ignore[arg-type]

    room = 128 - budget
    head = [1] if starts and room > 1 else []
    tail = reference.tokenizer(prompt, add_special_tokens=False).input_ids[-(room - len(head)) :]
    assert truncated
    assert ids == [*head, *tail]


def test_an_empty_prompt_begins_with_the_prefix_token(
    tmp_path: Path, tiny_reference: Reference
) -> None:
    """Generation without context starts from the start token; without one it is refused."""
    (text,) = ask(wrapped(tiny_reference.model, tiny_reference.tokenizer), [""], max_gen_toks=4)
    assert text.prompt_tokens == 1

    bare = tiny.build_tokenizer(specials="none")
    with pytest.raises(DataError, match="neither a start nor an end token"):
        ask(wrapped(tiny_reference.model, bare), [""], max_gen_toks=4)


# --- continuations ----------------------------------------------------------------------------


def _loglikelihood(model: OasisLM, context: str, continuation: str) -> tuple[float, bool]:
    request = Instance("loglikelihood", {}, (context, continuation), 0)
    return model.loglikelihood([request])[0]


@pytest.mark.parametrize("length", [1, 30, 126, 127, 128, 200])
@pytest.mark.parametrize("context", ["", " ", "Q: what?", tiny.prose(100), tiny.prose(400)])
def test_a_continuation_is_scored_given_its_context(
    tiny_reference: Reference, context: str, length: int
) -> None:
    """Equal to the loss by hand; a context too long loses its beginning, never the continuation."""
    model = wrapped(tiny_reference.model, tiny_reference.tokenizer, positions=128)
    continuation = " " + tiny.prose(length)[:-1] if length > 1 else "x"
    encode = tiny_reference.tokenizer
    before, after = encode(context).input_ids, encode(continuation).input_ids
    if not context.strip():  # lm-eval hands a trailing space of the context to the continuation
        before, after = [1], [*before, *after]
    if len(after) > 128:
        with pytest.raises(DataError, match="expected 1 to 128"):
            _loglikelihood(model, context, continuation)
        return

    score, _ = _loglikelihood(model, context, continuation)

    inputs = (before + after)[-129:][:-1]
    with torch.no_grad():
        logits_TV = tiny_reference.model(input_ids=torch.tensor([inputs])).logits[0].double()
    rows_RV = logits_TV[len(inputs) - len(after) :].log_softmax(-1)
    expected = float(rows_RV.gather(-1, torch.tensor(after)[:, None]).sum())
    assert score == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("context", ["", "  "])
def test_a_continuation_without_context_needs_a_prefix_token(
    tiny_reference: Reference, context: str
) -> None:
    """Without start and end token the first token has nothing to be conditioned on."""
    model = wrapped(tiny_reference.model, tiny.build_tokenizer(specials="none"))

    with pytest.raises(DataError, match="neither a start nor an end token"):
        _loglikelihood(model, context, "abc")


def test_chat_template_is_refused_where_there_is_none(tiny_reference: Reference) -> None:
    """A missing template is one clear error."""
    model = wrapped(tiny_reference.model, tiny_reference.tokenizer)

    with pytest.raises(DataError, match="no chat template"):
        model.apply_chat_template([{"role": "user", "content": "hello"}])
