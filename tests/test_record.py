"""Argument layouts, records and the registry."""

from __future__ import annotations

import struct

import pytest

from cake_kda_jit.catalog import registry
from cake_kda_jit.config import TRANSFER_WALKS
from cake_kda_jit.record import Entry, Field, make_params


def test_packing_follows_the_offsets():
    entry = Entry((Field("a", "ptr"), Field("s", "strides(2)"), Field("x", "f64"), Field("n", "i32")))
    assert entry.size == 40  # 8 + 16 + 8 + 4, rounded up to 8
    assert [offset for _, offset in entry.offsets()] == [0, 8, 24, 32]
    block = entry.pack({"a": None, "s": (3, -1), "x": 0.5, "n": 7})
    assert block == bytes(8) + (3).to_bytes(8, "little") + b"\xff" * 8 + b"\0\0\0\0\0\0\xe0\x3f" + b"\7\0\0\0" + bytes(
        4
    )


def test_arrays_are_packed_in_order_and_count_as_their_scalars():
    entry = Entry((Field("a", "ptr(2)"), Field("b", "ptr"), Field("n", "i64(2)"), Field("m", "i32(3)")))
    assert (entry.num_pointers, entry.size) == (3, 56)  # 3 * 8 + 2 * 8 + 3 * 4, rounded up to 8
    assert [field.declaration for field in entry.fields] == ["void* a[2]", "void* b", "int64_t n[2]", "int32_t m[3]"]
    block = entry.pack({"a": (1, 0), "b": None, "n": (2, -1), "m": (3, 4, 5)})
    assert block == struct.pack("=qqqqqiiixxxx", 1, 0, 0, 2, -1, 3, 4, 5)


@pytest.mark.parametrize("values, message", [({}, "missing"), ({"a": 1, "b": 2}, "unknown arguments \\['b'\\]")])
def test_packing_refuses_missing_and_unknown_arguments(values, message):
    with pytest.raises(TypeError, match=message):
        Entry((Field("a", "i64"),)).pack(values)


def test_fields_stand_in_decreasing_size_pointers_first_and_have_distinct_names():
    with pytest.raises(ValueError, match="decreasing size"):
        Entry((Field("n", "i32"), Field("a", "ptr")))
    with pytest.raises(ValueError, match="pointers must stand before"):
        Entry((Field("n", "i64"), Field("a", "ptr")))
    assert Entry((Field("a", "ptr"), Field("b", "ptr"), Field("n", "i64"), Field("m", "i32"))).num_pointers == 2
    with pytest.raises(ValueError, match="one name"):
        Entry((Field("a", "ptr"), Field("a", "ptr")))


def test_layout_digest_depends_on_names_and_kinds():
    base = Entry((Field("a", "i64"), Field("b", "i32")))
    assert base.abi == Entry((Field("a", "i64", "a comment"), Field("b", "i32"))).abi
    assert base.abi != Entry((Field("a", "i64"), Field("c", "i32"))).abi
    assert base.abi != Entry((Field("a", "i64"), Field("b", "f32"))).abi


def test_params_do_not_depend_on_their_order():
    assert make_params(b=1, a=2) == make_params(a=2, b=1)


def test_registry_names_are_unique_and_sorted():
    names = [record.name for record in registry().records()]
    assert len(names) == len(set(names))
    keys = [(r.program, r.family, r.variant) for r in registry().records()]
    assert keys == sorted(keys)
    assert set(registry().records()) == {*registry().shipped(), *registry().test_only()}


def test_walks_of_the_knob_are_records_and_the_default_is_shipped():
    for family in ("cpu", "smxx"):
        shipped = [registry().get("transfer_walk", walk, family).shipped for walk in TRANSFER_WALKS]
        assert shipped == [True, False, False]


def test_get_names_what_there_is():
    with pytest.raises(KeyError, match="cpu/transfer_walk__bf16x3_hw64"):
        registry().get("transfer_walk", "bf16x4", "cpu")


def test_at_most_six_shipped_records_per_program_and_architecture():
    for program in registry().programs:
        for arch in {arch for record in program.records for arch in record.archs}:
            shipped = [r for r in program.records if r.shipped and arch in r.archs]
            assert len(shipped) <= 6


def test_shipped_tiles_have_the_dtype_that_ops_allocate():
    for record in registry().shipped():
        if "tile_dtype" in record.constants:
            assert record.constants["tile_dtype"] == ("fp32" if record.family == "cpu" else "bf16"), record.name
