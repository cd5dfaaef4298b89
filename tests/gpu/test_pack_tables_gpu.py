"""pack_tables on a CUDA device: the same tables as the cpu program, entry by entry."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit.catalog import registry
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.ops.select import SegmentRule
from cake_kda_jit.runtime.device import arch_of_device
from cake_kda_jit.runtime.load import get_kernel

from ..programs.pipeline import launch, record_of, table_values
from ..programs.test_pack_tables import BAD_ADDRESSES_AND_SIZES

pytestmark = pytest.mark.gpu

TABLES = ("chunk_table", "segment_table", "summary_offsets")


def launch_on_device(values: dict[str, object]) -> dict[str, torch.Tensor]:
    """Launch with copies of the tensors on the device; returns the tables."""
    values = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    del values["num_threads"]
    kernel = get_kernel(registry().get("pack_tables", "int64", "smxx"), arch_of_device(torch.device("cuda", 0)))
    addresses = {n: value.data_ptr() if isinstance(value, torch.Tensor) else value for n, value in values.items()}
    kernel.launch(addresses)
    torch.cuda.synchronize()
    return {name: values[name].cpu() for name in TABLES}


def assert_as_cpu(lengths, segment_tokens=0, *, spare=0, minimum=0, most_segments=0, summarize_all=0):
    rule = SegmentRule(segment_tokens, minimum, most_segments)
    values, tables = table_values(
        lengths,
        segment_tokens,
        max_chunks=sum(-(-length // 64) for length in lengths) + spare,
        max_segments=sum(map(rule.num_segments, lengths)) + spare,
        minimum=minimum,
        most_segments=most_segments,
        summarize_all=summarize_all,
    )
    found = launch_on_device(values)
    launch(record_of("pack_tables", "int64"), values)
    for name, table in found.items():
        assert torch.equal(table, getattr(tables, name)), name


@pytest.mark.parametrize("summarize_all", [0, 1])
@pytest.mark.parametrize("most_segments", [0, 2])
@pytest.mark.parametrize("minimum", [0, 200, 10_000])
@pytest.mark.parametrize("segment_tokens", [0, 64, 128])
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (64,), (65, 0, 1, 200, 63, 64, 3, 0), (128, 129, 385, 199)])
def test_small_packs(lengths, segment_tokens, minimum, most_segments, summarize_all):
    options = {"minimum": minimum, "most_segments": most_segments, "summarize_all": summarize_all}
    assert_as_cpu(lengths, segment_tokens, spare=3, **options)


@pytest.mark.parametrize("count", [31, 32, 33, 1023, 1024, 1025, 10_000])
@pytest.mark.parametrize("segment_tokens", [0, 128])
def test_many_documents(count, segment_tokens):
    lengths = torch.randint(0, 400, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    assert_as_cpu(lengths, segment_tokens, minimum=200)


def test_runs_of_empty_documents():
    """Whole batches of 1,024 documents without a chunk, between documents with some."""
    assert_as_cpu([0] * 1500 + [70] + [0] * 2500 + [1, 0, 64], 64, summarize_all=1, spare=5000)


@pytest.mark.parametrize("most_segments", [0, 16])
def test_one_document_of_a_million_tokens(most_segments):
    assert_as_cpu([5, 1_000_003, 7], 4096, minimum=16_384, most_segments=most_segments)


def test_tables_that_are_too_short_are_not_overrun():
    """The device does not tell the host what the boundaries say: rows past the tables are left out."""
    values, _ = table_values((150, 300), 128, max_chunks=8, max_segments=5)
    whole = launch_on_device(values)
    cut = launch_on_device(values | {"max_chunks": 3, "max_segments": 2})
    assert torch.equal(cut["chunk_table"][:3], whole["chunk_table"][:3])
    assert torch.equal(cut["segment_table"][:2], whole["segment_table"][:2])
    assert (cut["chunk_table"][3:] == -7).all() and (cut["segment_table"][2:] == -7).all()


BAD = BAD_ADDRESSES_AND_SIZES | {
    "misaligned": ({"segment_table": 8}, "segment_table is 0x8; give a tensor whose address is a multiple of 16"),
    "rows": ({"max_chunks": 2**31}, "chunk_table has 2147483648 rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case):
    change, message = BAD[case]
    values, _ = table_values((150, 10), 128, max_chunks=4, max_segments=3)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch_on_device(values | change)
