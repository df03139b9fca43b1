"""What no table does: mix protocols, schemes, checkpoints or runs."""

from __future__ import annotations

import pytest

from oasis_eval.errors import RecordError
from oasis_eval.record import ProtocolInfo, RunRecord
from oasis_eval.report.tables import build_table
from oasis_eval.spec import TableSpec, TaskRef
from tests.report.samples import loss, record, scheme

PPL = TableSpec(metrics=("token_perplexity",))
PLAIN = TableSpec(metrics=("token_perplexity",), columns=("task", "metric", "scheme"))


def with_protocol(base: RunRecord, **changes: object) -> RunRecord:
    info = ProtocolInfo.model_validate(base.protocols[0].model_dump() | changes)
    return base.model_copy(update={"protocols": (info,)})


def pair(**second: object) -> list[RunRecord]:
    """Return two models' records that differ as given."""
    numbers = {"token_perplexity": 5.0}
    return [record("a", metrics=numbers), record("b", metrics=numbers, **second)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("records", "field"),
    [
        (pair(limit=8), "limit"),
        (pair(data_text="other"), "data_sha256"),
        (pair(protocol_name="gptq-2048"), "protocol"),
        ([pair()[0], with_protocol(pair()[1], version=2)], "protocol_version"),
        ([pair()[0], with_protocol(pair()[1], sha256="f" * 64)], "protocol_sha256"),
        ([pair()[0], with_protocol(pair()[1], details={"window": 512})], "window"),
    ],
)
def test_two_ways_of_measuring_in_a_column_are_refused(
    records: list[RunRecord], field: str
) -> None:
    """The message names the field that differs, both models, and the filter."""
    with pytest.raises(RecordError, match=rf"mixes {field} .*\(a, fp32\).*where: \{{{field}:"):
        build_table(records, PLAIN)


def test_refused_across_schemes_of_one_task_too() -> None:
    """Columns side by side invite comparing: another limit under another scheme is refused."""
    numbers = {"token_perplexity": 5.0}
    records = [record(metrics=numbers, limit=8), record("tiny", "w8a8", metrics=numbers, limit=16)]
    with pytest.raises(RecordError, match="mixes limit"):
        build_table(records, PPL)


def test_differing_details_are_named() -> None:
    """Where only the hash of a protocol differs, the decisions behind it are named."""
    records = pair()
    records[1] = with_protocol(
        records[1], sha256="f" * 64, details={"window": 1024, "prefix": "bos"}
    )
    with pytest.raises(RecordError, match="they differ in prefix bos, none"):
        build_table(records, PLAIN)


def test_unknown_settings_of_imported_numbers_are_noted() -> None:
    """Records without protocol and data are shown beside others, and the note says so."""
    records = pair()
    records[1] = records[1].model_copy(update={"protocols": (), "data": ()})
    table = build_table(records, PPL)

    assert any("not recorded" in note.text for note in table.footnotes)


def test_generation_settings_are_compared() -> None:
    """Two token limits are two ways to measure Pass@1, and none to measure perplexity."""
    numbers = {"pass@1": 0.5}
    records = [record(name, task="gsm8k", metrics=numbers) for name in "ab"]
    task = TaskRef(name="gsm8k", protocol="gsm8k-5shot", max_new_tokens=64)
    spec = records[1].spec.model_copy(update={"task": task})
    records[1] = records[1].model_copy(update={"spec": spec})
    with pytest.raises(RecordError, match="mixes max_new_tokens"):
        build_table(records, TableSpec(metrics=("pass@1",)))


def test_two_schemes_of_one_name_are_refused() -> None:
    """A column is one scheme; another description alone is no other scheme."""
    numbers = {"token_perplexity": 5.0}
    own = scheme("w8a8", skip=("*.down_proj",))
    with pytest.raises(RecordError, match="scheme 'w8a8' mixes scheme_sha256"):
        build_table([record("a", "w8a8", metrics=numbers), record("b", own, metrics=numbers)], PPL)
    same = scheme("w8a8", description="said otherwise")
    build_table([record("a", "w8a8", metrics=numbers), record("b", same, metrics=numbers)], PPL)


def test_two_checkpoints_in_a_row_are_refused() -> None:
    """A retrained model does not mix with its old numbers."""
    numbers = {"token_perplexity": 5.0}
    records = [record(metrics=numbers), record("tiny", "w8a8", metrics=numbers, checkpoint="b")]
    with pytest.raises(RecordError, match="mixes checkpoint_sha256"):
        build_table(records, PPL)


def test_each_seed_has_its_checkpoint() -> None:
    """Trained with another seed, a model of one name is another checkpoint: a mean of two."""
    records = [
        record(metrics={"token_perplexity": 5.0 + seed}, seed=seed, checkpoint=f"{seed}")
        for seed in (1, 2)
    ]
    table = build_table(records, PPL)

    (found,) = table.cells[0]

    assert found.value == 5.0 + 1.5
    assert found.num_seeds == 2


def test_two_runs_of_one_seed_are_refused() -> None:
    """The batch size changes numbers: two of them are not two seeds."""
    numbers = {"token_perplexity": 5.0}
    records = [record(metrics=numbers), record(metrics=numbers, batch_size=8)]
    with pytest.raises(RecordError, match=r"mixes batch_size 1 .* and 8 .*where: \{batch_size:"):
        build_table(records, PPL)


def test_dimension_that_is_left_out_is_refused() -> None:
    """Schemes in neither rows nor columns would be averaged."""
    numbers = {"token_perplexity": 5.0}
    records = [record(metrics=numbers), record("tiny", "w8a8", metrics=numbers)]
    with pytest.raises(RecordError, match=r"mixes scheme .*add 'scheme' to the rows or columns"):
        build_table(records, TableSpec(metrics=("token_perplexity",), columns=("task", "metric")))


def test_perplexity_is_derived_from_the_summed_loss() -> None:
    """Loss and token count alone give the perplexity."""
    table = build_table([record(metrics={"nll_nats": 0.0, "num_tokens": 7.0})], PPL)

    assert table.cells[0][0].value == 1.0


def test_stored_perplexity_must_be_that_of_its_loss() -> None:
    """A record whose numbers contradict each other is not printed."""
    with pytest.raises(RecordError, match="stored token_perplexity"):
        build_table([record(metrics=loss(2.0) | {"token_perplexity": 7.0})], PPL)


def test_same_record_from_two_folders_counts_once() -> None:
    """One key is one result; with other numbers it is refused."""
    numbers = {"token_perplexity": 5.0}
    one = record(metrics=numbers)

    assert build_table([one, one], PPL).cells[0][0].num_seeds == 1
    with pytest.raises(RecordError, match="twice with different numbers"):
        build_table([one, record(metrics={"token_perplexity": 6.0})], PPL)
