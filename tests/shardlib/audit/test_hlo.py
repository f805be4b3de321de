"""Real programs compiled for 8 emulated devices: what was written must be what is read."""

import functools
import itertools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib.audit.hlo import parse
from shardlib.audit.program import Program, axes_of, totals

CUBE = MeshShape.parse("data=2,fsdp=2,tensor=2")
SPEC = P("data", "fsdp", "tensor")
LOCAL_BYTES = 4 * 4 * 4 * 4  # a float32 array of 8x8x8, cut in two along each dim


@functools.cache
def cube():
    assert len(jax.devices()) >= 8, "these tests need 8 emulated devices"
    return jax.make_mesh(CUBE.sizes, CUBE.names, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:8])


def compiled_text(body: Callable, *, out_specs=SPEC) -> str:
    """Program text of `body` under shard_map on the cube, for a float32 array of 8x8x8."""
    mapped = jax.shard_map(body, mesh=cube(), in_specs=SPEC, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)).compile().as_text()


def nested_scans(x):
    def inner(carry, _):
        return jax.lax.psum(carry, "data") * 0.5, None

    def outer(carry, _):
        carry, _ = jax.lax.scan(inner, carry, None, length=3)
        return jax.lax.ppermute(carry, "tensor", [(0, 1), (1, 0)]), None

    return jax.lax.scan(outer, x, None, length=5)[0]


def two_branches(x):
    branches = [lambda x: jax.lax.psum(x, "data"), lambda x: x * 2, lambda x: jax.lax.psum(x, "tensor")]
    return jax.lax.switch(x[0, 0, 0].astype(jnp.int32), branches, x)


@functools.cache
def nested_text() -> str:
    return compiled_text(nested_scans)


@functools.cache
def branches_text() -> str:
    return compiled_text(two_branches)


def only(program: Program):
    assert len(program.collectives) == 1, program.collectives
    return program.collectives[0]


# ---- one collective each


@pytest.mark.newest
@pytest.mark.parametrize("axes", [c for n in (1, 2, 3) for c in itertools.combinations(CUBE.names, n)])
def test_psum_over_each_set_of_axes(axes: tuple[str, ...]):
    program = parse(compiled_text(lambda x: jax.lax.psum(x, axes)))
    found = only(program)
    size = 2 ** len(axes)
    assert program.num_devices == 8
    assert (found.kind, found.group_size, axes_of(found, CUBE).axes) == ("all-reduce", size, axes)
    assert (found.operand_bytes, found.result_bytes) == (LOCAL_BYTES, LOCAL_BYTES)
    assert found.bytes_per_device == 2 * LOCAL_BYTES * (size - 1) / size
    assert (found.loops, found.branches, found.times_executed, found.is_async) == ((), (), 1, False)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("body", "kind", "axis", "result_bytes", "sent"),
    [
        (lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), "all-gather", "fsdp", 2 * LOCAL_BYTES, LOCAL_BYTES),
        (lambda x: jax.lax.psum_scatter(x, "tensor", tiled=True), "reduce-scatter", "tensor", LOCAL_BYTES // 2,
         LOCAL_BYTES / 2),
        (lambda x: jax.lax.all_to_all(x, "data", 0, 1, tiled=True), "all-to-all", "data", LOCAL_BYTES, LOCAL_BYTES / 2),
        (lambda x: jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]), "collective-permute", "fsdp", LOCAL_BYTES,
         LOCAL_BYTES),
    ],
)  # fmt: skip
def test_each_kind(body: Callable, kind: str, axis: str, result_bytes: int, sent: float):
    found = only(parse(compiled_text(body)))
    assert (found.kind, axes_of(found, CUBE).axes) == (kind, (axis,))
    assert (found.operand_bytes, found.result_bytes) == (LOCAL_BYTES, result_bytes)
    assert found.bytes_per_device == sent
    assert {shape.dtype for shape in (*found.operands, *found.results)} == {"f32"}


def test_a_half_permute_lists_its_pairs():
    found = only(parse(compiled_text(lambda x: jax.lax.ppermute(x, "fsdp", [(0, 1)]))))
    assert set(found.pairs) == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert found.groups == ()


def test_a_merged_all_reduce_keeps_all_operands():
    text = compiled_text(lambda x: jax.lax.psum((x, x * 3, x[0, 0, 0]), "data"), out_specs=(SPEC, SPEC, P()))
    found = only(parse(text))
    assert [str(shape) for shape in found.operands] == ["f32[4,4,4]", "f32[4,4,4]", "f32[]"]
    assert found.operand_bytes == found.result_bytes == 2 * LOCAL_BYTES + 4


@pytest.mark.newest
def test_a_sharded_matrix_product_reduces_over_the_contracted_axis():
    def abstract(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(cube(), P(*spec)))

    arguments = abstract((16, 32), "data", "tensor"), abstract((32, 8), "tensor", "fsdp")
    found = only(parse(jax.jit(jnp.dot).lower(*arguments).compile().as_text()))
    assert (found.kind, axes_of(found, CUBE).axes, found.operand_bytes) == ("all-reduce", ("tensor",), 8 * 4 * 4)


def test_operation_and_source_line_are_kept():
    found = only(parse(compiled_text(lambda x: jax.lax.psum(x, "data"))))
    assert found.op_name is not None and found.op_name.endswith("/psum")
    assert found.source[0][0] == __file__


def test_a_program_without_collectives():
    text = jax.jit(lambda x: x * 2).lower(jnp.ones(4)).compile().as_text()
    assert parse(text) == Program(num_devices=1, collectives=(), loops=())
    assert parse(text).totals == {}


# ---- loops and branches


@pytest.mark.newest
@pytest.mark.parametrize("noted", [True, False])
def test_trip_counts_of_nested_scans_multiply(noted: bool):
    text = nested_text()
    if not noted:  # read from the loops' counters, as TPU programs need
        text = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"no":"note"', text)
    program = parse(text)
    (reduce,), (permute,) = program.of_kind("all-reduce"), program.of_kind("collective-permute")
    assert [loop.trip_count for loop in reduce.loops] == [5, 3]
    assert (reduce.loop_depth, reduce.times_executed) == (2, 15)
    assert (permute.loop_depth, permute.times_executed) == (1, 5)
    assert permute.loops == reduce.loops[:1]
    assert [loop.trip_count for loop in program.loops] == [5, 3]
    assert program.totals["all-reduce"].operand_bytes == 15 * LOCAL_BYTES
    assert program.totals["all-reduce"].bytes_per_device == 15 * LOCAL_BYTES
    assert program.totals["collective-permute"].times_executed == 5


@pytest.mark.newest
def test_branches_are_named():
    program = parse(branches_text())
    branches = {axes_of(each, CUBE).axes: each.branches for each in program.collectives}
    assert [re.sub(r".*\[", "[", branch) for (branch,) in branches.values()] == ["[0]", "[2]"]
    assert set(branches) == {("data",), ("tensor",)}
    assert all(each.in_branch and each.loop_depth == 0 for each in program.collectives)
    assert program.totals["all-reduce"].num_in_branch == 2


def test_cond_inside_scan_is_under_both():
    def body(carry, _):
        return jax.lax.cond(carry.sum() > 0, lambda x: jax.lax.psum(x, "data"), lambda x: x * 2, carry), None

    found = only(parse(compiled_text(lambda x: jax.lax.scan(body, x, None, length=6)[0])))
    assert (found.loop_depth, found.times_executed, len(found.branches)) == (1, 6, 1)


def test_a_loop_that_depends_on_data_is_unknown_not_one():
    def until_large(x):
        return jax.lax.while_loop(lambda x: jax.lax.psum(x.sum(), "tensor") < 1e5, lambda x: jax.lax.psum(x, "data"), x)

    program = parse(compiled_text(until_large))
    assert {each.loops[0].part for each in program.collectives} == {"body", "condition"}
    assert {each.times_executed for each in program.collectives} == {None}
    total = program.totals["all-reduce"]
    assert (total.num_instructions, total.times_executed, total.operand_bytes, total.bytes_per_device) == (
        2,
        *[None] * 3,
    )
    assert total.unknown == (program.loops[0].name,)


def test_a_condition_runs_once_more_than_the_body():
    def count(x):
        def more(state):
            return (state[0] < 4) & (jax.lax.psum(state[1].sum(), "tensor") > 0)

        return jax.lax.while_loop(more, lambda state: (state[0] + 1, jax.lax.psum(state[1], "data")), (0, x))[1]

    text = compiled_text(count)
    noted = re.sub(r"( while\(.*)", r'\1, backend_config={"known_trip_count":{"n":"4"}}', text)
    assert {each.loops[0].part: each.times_executed for each in parse(noted).collectives} == {"body": 4, "condition": 5}


def test_a_loop_that_skips_is_counted_by_its_step():
    def every_third(x):
        return jax.lax.while_loop(lambda s: s[0] < 11, lambda s: (s[0] + 3, jax.lax.psum(s[1], "data")), (2, x))[1]

    text = compiled_text(every_third)
    unnoted = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"no":"note"', text)
    assert only(parse(text)).times_executed == only(parse(unnoted)).times_executed == 3


def test_totals_of_a_selection():
    program = parse(nested_text())
    both = totals(program.collectives)
    assert (both.num_instructions, both.times_executed, both.operand_bytes) == (2, 20, 20 * LOCAL_BYTES)
    assert totals(()).bytes_per_device == 0


# ---- hand-written text

SYNTHETIC = """HloModule synthetic, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16]{0:T(256)} parameter(0)
  %y = bf16[4,2]{1,0:T(8,128)(2,1)S(1)} custom-call(%x), custom_call_target="all-reduce(not one), replica_groups={{0}}"
LINES
  ROOT %out = f32[16]{0} copy(%x)
}
"""
WRAPPED = """
%wrapped (p: f32[16]) -> f32[8] {
  %p = f32[16]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), use_global_device_ids=true, channel_id=9, replica_groups=[4,2]<=[8]
}
"""
GLOBAL = "channel_id=1, use_global_device_ids=true"


def synthetic(*lines: str, after: str = "") -> Program:
    return parse(SYNTHETIC.replace("LINES", "\n".join(f"  {line}" for line in lines)) + after)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_groups_in_three_spellings(groups: str, expected: tuple):
    found = only(synthetic(f"%r = f32[16]{{0}} all-reduce(%x), {GLOBAL}, replica_groups={groups}, to_apply=%add"))
    assert found.groups == expected


def test_asynchronous_pairs_count_once():
    groups = f"replica_groups=[4,2]<=[8], {GLOBAL}"
    program = synthetic(
        f"%ar = f32[16]{{0}} all-reduce-start(%x), {groups}, to_apply=%add",
        "%ard = f32[16]{0} all-reduce-done(%ar)",
        f"%ag = (f32[16]{{0}}, f32[32]{{0}}) all-gather-start(%x), {groups}, dimensions={{0}}",
        "%agd = f32[32]{0} all-gather-done(%ag)",
        "%cp = (bf16[4,2], bf16[4,2], u32[]) collective-permute-start(%y), source_target_pairs={{0,1},{1,0}}",
        "%cpd = bf16[4,2]{1,0} collective-permute-done(%cp)",
        "%aa = ((bf16[4,2]), bf16[4,2], u32[]) all-to-all-start(%y), channel_id=4, replica_groups={{0,1,2,3,4,5,6,7}}",
        "%aad = bf16[4,2]{1,0} all-to-all-done(%aa)",
    )
    assert [each.kind for each in program.collectives] == [
        "all-reduce", "all-gather", "collective-permute", "all-to-all"]  # fmt: skip
    assert [each.operand_bytes for each in program.collectives] == [64, 64, 16, 16]
    assert [each.result_bytes for each in program.collectives] == [64, 128, 16, 16]
    assert all(each.is_async for each in program.collectives)


def test_a_generic_asynchronous_call_is_followed_once():
    program = synthetic(
        "%s = ((f32[16]{0}), f32[8]{0}, u32[]) async-start(%x), calls=%wrapped",
        "%u = ((f32[16]{0}), f32[8]{0}, u32[]) async-update(%s), calls=%wrapped",
        "%d = f32[8]{0} async-done(%u), calls=%wrapped",
        after=WRAPPED,
    )
    found = only(program)
    assert (found.kind, found.is_async, found.bytes_per_device) == ("reduce-scatter", True, 32)


def test_a_ragged_all_to_all_counts_data_not_offsets():
    offsets = ", ".join(f"%o{index}" for index in range(4))
    program = synthetic(
        *(f"%o{index} = s64[8]{{0}} custom-call(), custom_call_target=\"o\"" for index in range(4)),
        f"%r = f32[16]{{0}} ragged-all-to-all(%x, %x, {offsets}), channel_id=1, replica_groups=mesh['e'=8] {{'e'}}",
    )  # fmt: skip
    found = only(program)
    assert (found.operand_bytes, found.bytes_per_device) == (64, 56)


def test_operands_with_types_and_comments_and_no_percent_signs():
    operands = "f32[16]{0} %x, /*index=1*/bf16[4,2]{1,0} y"
    found = only(synthetic(f"r = (f32[16], bf16[4,2]) all-reduce({operands}), {GLOBAL}, replica_groups={{}}"))
    assert [str(shape) for shape in found.operands] == ["f32[16]", "bf16[4,2]"]
    assert found.groups == (tuple(range(8)),)


def test_a_reduction_with_a_result_of_another_dtype():
    """As the TPU compiler makes of a maximum in bfloat16."""
    found = only(synthetic(f"r = bf16[16] all-reduce(%x), {GLOBAL}, replica_groups={{}}"))
    assert (found.operand_bytes, found.result_bytes) == (64, 32)


def test_groups_of_replicas_join_all_partitions():
    text = SYNTHETIC.replace("num_partitions=8", "replica_count=2, num_partitions=4")
    joined = "%r = f32[16]{0} all-reduce(%x), channel_id=1, replica_groups={{0},{1}}, to_apply=%add"
    apart = "%r = f32[16]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add"
    within = "%r = f32[16]{0} all-to-all(%x), channel_id=1, replica_groups={{0,1},{2,3}}"
    groups = [only(parse(text.replace("LINES", f"  {line}"))).groups for line in (joined, apart, within)]
    assert groups[0] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups[1] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups[2] == ((0, 1), (2, 3), (4, 5), (6, 7))


# ---- what must not pass

BROKEN = {
    "no groups": ("%r = f32[16] all-reduce(%x), channel_id=1, to_apply=%add", "exactly one replica_groups="),
    "bad groups": (f"%r = f32[16] all-reduce(%x), {GLOBAL}, replica_groups={{{{0,1}}", "none of the three spellings"),
    "a device is missing": (f"%r = f32[16] all-reduce(%x), {GLOBAL}, replica_groups={{{{0,1}}}}", "each of 8 ids once"),
    "unknown operand": (f"%r = f32[16] all-reduce(%z), {GLOBAL}, replica_groups={{}}", "operand 'z' is not defined"),
    "unknown type": (f"%r = f23[16] all-reduce(%x), {GLOBAL}, replica_groups={{}}", "not an array type"),
    "sizes": (f"%r = f32[17] all-reduce(%x), {GLOBAL}, replica_groups={{}}", "contradict each other"),
    "gather sizes": (f"%r = f32[32] all-gather(%x), {GLOBAL}, replica_groups={{}}", "64 bytes in, 128 bytes out"),
    "new kind": ("%r = f32[16] all-shuffle(%x)", "looks like a collective that this reader does not know"),
    "misspelt": (f"%r = f32[16] al-reduce(%x), {GLOBAL}, replica_groups={{}}", "names groups of devices"),
    "cut": (f"%r = f32[16] all-reduce(%x, {GLOBAL}, replica_groups={{}}", "does not close"),
    "half a line": ("%r = f32[16] all-redu", "not an instruction"),
    "no type": ("%r = all-reduce(%x), replica_groups={}", "not an instruction|is not a type"),
    "pairs": ("%r = f32[16] collective-permute(%x), source_target_pairs={{0,1,2}}", "not a list of pairs"),
    "far pair": ("%r = f32[16] collective-permute(%x), channel_id=1, source_target_pairs={{0,8}}", "beyond the 8"),
    "send": ("%r = (f32[16], u32[], token[]) send(%x), channel_id=1", "'send' between devices is not counted"),
    "no callee": ("%r = f32[16] call(%x), to_apply=%nothing", "calls 'nothing', which the program does not define"),
    "no calls": ("%r = f32[16] fusion(%x), kind=kLoop", "'fusion' has no calls="),
    "itself": ("%r = f32[16] call(%x), to_apply=%main", "'main' calls itself"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_collective_that_cannot_be_read_is_an_error_with_its_line(case: str):
    line, message = BROKEN[case]
    with pytest.raises(ShardingError, match=message) as error:
        synthetic(line)
    assert "compiled program, line 12: " in str(error.value) or case == "itself"
    assert line[:30] in str(error.value) or case == "itself"


def test_an_unreached_collective_is_an_error():
    with pytest.raises(ShardingError, match="no call reaches the computation 'wrapped'"):
        synthetic(after=WRAPPED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is not a compiled program"),
        ("HloModule m\n", "no ENTRY computation"),
        ("HloModule m\nENTRY %e () -> f32[] {\n  ROOT %c = f32[] constant(0)\n", "ends inside this computation"),
        ("HloModule m\nENTRY %e () -> f32[] {\n  %c = f32[] constant(0)\n}\n", "no ROOT"),
        ("HloModule m\n  ROOT %c = f32[] constant(0)\n}\n", "outside of any computation"),
    ],
)
def test_cut_texts_are_errors(text: str, message: str):
    with pytest.raises(ShardingError, match=message):
        parse(text)


def test_a_broken_trip_count_is_an_error():
    with pytest.raises(ShardingError, match="known_trip_count is not a number"):
        parse(nested_text().replace('"known_trip_count":{"n":"3"}', '"known_trip_count":{"n":"many"}'))


def test_unknown_kinds_are_errors():
    with pytest.raises(ShardingError, match="did you mean 'all-reduce'"):
        parse(nested_text()).of_kind("all_reduce")


# ---- mutated text

COLLECTIVE_LINE = re.compile(r" (all-reduce|collective-permute)\(")


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_programs_never_crash(data):
    lines = data.draw(st.sampled_from([nested_text(), branches_text(), SYNTHETIC.replace("LINES\n", "")])).splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(lines) - 1))
        lines[index] = mutated(lines[index], data)
    try:
        parse("\n".join(lines))
    except ShardingError as error:
        assert str(error)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_broken_collective_line_never_changes_a_count_silently(data):
    text = data.draw(st.sampled_from([nested_text(), branches_text()]))
    lines = text.splitlines()
    index = data.draw(st.sampled_from([i for i, line in enumerate(lines) if COLLECTIVE_LINE.search(line)]))
    # A line that is gone altogether cannot be missed; anything left of it must be read or refused.
    lines[index] = mutated(lines[index], data)
    if not lines[index].strip():
        return
    try:
        program = parse("\n".join(lines))
    except ShardingError:
        return
    before = parse(text)
    assert [(each.kind, each.times_executed) for each in program.collectives] == [
        (each.kind, each.times_executed) for each in before.collectives
    ]
    assert [each.operand_bytes for each in program.collectives] == [each.operand_bytes for each in before.collectives]


def mutated(line: str, data) -> str:
    """The line with a few characters deleted, doubled, replaced or cut off."""
    start = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(start, min(len(line), start + 6)))
    how = data.draw(st.sampled_from(["delete", "repeat", "replace", "cut", "swap"]))
    if how == "delete":
        return line[:start] + line[end:]
    if how == "repeat":
        return line[:end] + line[start:]
    if how == "replace":
        return line[:start] + data.draw(st.text(alphabet='{}()[]=,"%0123 abc-\\', max_size=4)) + line[end:]
    if how == "cut":
        return line[:start]
    return line[:start] + line[start:end][::-1] + line[end:]
