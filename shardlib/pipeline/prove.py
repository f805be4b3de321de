"""Proof of a lowered table by running it on names instead of numbers.

In: a `Lowered`. Out: nothing, or an `AssertionError` that names the tick, the rank and the slot. It knows only what
each kind of action reads and writes: not the table, not the ticks' construction, not how slots were chosen.

    check(lower(table))
"""

import collections
from dataclasses import dataclass

from shardlib.pipeline.lowered import NOTHING, READERS, Buffer, Lowered, values_written
from shardlib.pipeline.table import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from shardlib.pipeline.ticks import channel_index


@dataclass(slots=True)
class _Value:
    """What a slot holds: whose value it is, who still has to read it, from which tick to which it lives."""

    stage: int
    microbatch: int
    readers: set[str]
    since: int
    until: int | None = None


class _Run:
    """The buffers of all ranks while a lowered table runs."""

    def __init__(self, lowered: Lowered):
        self.lowered = lowered
        self.placement = lowered.table.placement
        self.last = len(self.placement.ranks) - 1
        self.microbatches = lowered.table.num_microbatches
        self.split = {
            (stage, microbatch)
            for work in lowered.work
            if work.kind == INPUT
            for tick in range(lowered.num_ticks)
            for stage, microbatch in self._cells(work.microbatch[tick], work.chunk[tick])
        }
        self.done = collections.Counter[tuple[str, int, int]]()
        self.slots: dict[tuple[str, int, int], _Value] = {}
        self.lives: dict[tuple[str, int], list[tuple[int, int]]] = collections.defaultdict(list)
        self.access = {
            (buffer.name, verb, access.by): access.slots
            for buffer in lowered.buffers
            for verb, accesses in (("write", buffer.writes), ("read", buffer.reads))
            for access in accesses
        }
        self.expected = dict.fromkeys(self.access, 0)

    def _cells(self, microbatches: tuple[int, ...], chunks: tuple[int, ...]) -> list[tuple[int, int]]:
        cells = []
        for rank, (microbatch, chunk) in enumerate(zip(microbatches, chunks)):
            assert (microbatch == NOTHING) == (chunk == NOTHING), f"rank {rank}: half an action"
            if microbatch != NOTHING:
                assert 0 <= chunk < self.placement.num_chunks, f"rank {rank}: chunk {chunk} does not exist"
                assert 0 <= microbatch < self.microbatches, f"rank {rank}: microbatch {microbatch} does not exist"
                cells.append((self.placement.stage(rank, chunk=chunk), microbatch))
        return cells

    def readers(self, name: str, *, stage: int, microbatch: int) -> set[str]:
        """Who will read a value: the kinds its backward is split into, minus an F that made it itself."""
        kinds = {FORWARD, INPUT, WEIGHT} if (stage, microbatch) in self.split else {FORWARD, BACKWARD}
        own = {FORWARD} if name == "saved_input" and stage == 0 else set[str]()
        return (kinds & set(READERS[name])) - own

    def read(self, buffer: Buffer, kind: str, *, stage: int, microbatch: int, tick: int) -> None:
        rank, where = self.placement.ranks[stage], f"tick {tick}: {kind} of {microbatch} on stage {stage}"
        slots = self.access.get((buffer.name, "read", kind))
        wanted = kind in self.readers(buffer.name, stage=stage, microbatch=microbatch) and not (
            buffer.name == "input" and stage == 0
        )
        if not wanted:
            assert slots is None or slots[tick][rank] == NOTHING, f"{where} reads {buffer.name} for nothing"
            return
        assert slots is not None, f"{where} has no slots to read {buffer.name} from"
        self.expected[buffer.name, "read", kind] += 1
        value = self.slots.get((buffer.name, rank, slots[tick][rank]))
        found = value and (value.stage, value.microbatch) == (stage, microbatch) and value.since <= tick
        assert value and found, f"{where} finds another value in {buffer.name}[{slots[tick][rank]}]: {value}"
        value.readers.discard(kind)
        if not value.readers:
            value.until = tick
            self.lives[buffer.name, rank].append((value.since, tick))

    def write(self, buffer: Buffer, by: str, *, stage: int, microbatch: int, tick: int, since: int) -> None:
        rank, where = self.placement.ranks[stage], f"tick {tick}: {by} writes {buffer.name} for {microbatch} on {stage}"
        slots = self.access.get((buffer.name, "write", by))
        assert slots is not None, f"{where}, but has no slots"
        self.expected[buffer.name, "write", by] += 1
        slot = slots[tick][rank]
        assert 0 <= slot < buffer.size, f"{where}, slot {slot} of {buffer.size}"
        old = self.slots.get((buffer.name, rank, slot))
        free = old is None or (old.until is not None and old.until < since)
        assert free, f"{where}, slot {slot}, over a value still needed: {old}"
        readers = self.readers(buffer.name, stage=stage, microbatch=microbatch)
        self.slots[buffer.name, rank, slot] = _Value(stage=stage, microbatch=microbatch, readers=readers, since=since)

    def act(self, kind: str, *, stage: int, microbatch: int, tick: int) -> None:
        """One action: its reads, then what it leaves on its own rank."""
        self.done[kind, stage, microbatch] += 1
        for buffer in self.lowered.buffers:
            self.read(buffer, kind, stage=stage, microbatch=microbatch, tick=tick)
            for target, arrives in values_written(buffer.name, kind, stage=stage, last=self.last):
                if not arrives:
                    self.write(buffer, kind, stage=target, microbatch=microbatch, tick=tick, since=tick)

    def deliver(self, kind: str, *, stage: int, microbatch: int, tick: int) -> None:
        """The message of one action, at the end of its tick."""
        number = channel_index(self.lowered.channels, self.placement, kind=kind, stage=stage)
        if number is None:
            return
        assert self.lowered.ticks.sends[number][tick], (
            f"tick {tick}: the permute {self.lowered.channels[number]} is off"
        )
        for buffer in self.lowered.buffers:
            for target, arrives in values_written(buffer.name, kind, stage=stage, last=self.last):
                if arrives:
                    by = self.lowered.channels[number].name
                    self.write(buffer, by, stage=target, microbatch=microbatch, tick=tick, since=tick + 1)


def check(lowered: Lowered) -> None:
    """Runs a lowered table on names.

    Raises:
        AssertionError: an action is missing or doubled, reads a slot that does not hold its value, destroys a value
            that is still needed, sends in a tick whose permute is off; a permute is on for nothing; an entry has no
            use; or a buffer has more slots than values ever live in it at once.
    """
    run = _Run(lowered)
    for tick in range(lowered.num_ticks):
        acted = list[tuple[str, int, int]]()
        for work in lowered.work:
            for stage, microbatch in run._cells(work.microbatch[tick], work.chunk[tick]):
                run.act(work.kind, stage=stage, microbatch=microbatch, tick=tick)
                acted.append((work.kind, stage, microbatch))
        for kind, stage, microbatch in acted:
            run.deliver(kind, stage=stage, microbatch=microbatch, tick=tick)
        for number, sends in enumerate(lowered.ticks.sends):
            senders = [
                channel_index(lowered.channels, run.placement, kind=kind, stage=stage) for kind, stage, _ in acted
            ]
            assert sends[tick] == (number in senders), f"tick {tick}: permute {lowered.channels[number]} for nothing"
    _check_complete(run)


def _check_complete(run: _Run) -> None:
    """Everything once, no entry without use, no value left over, no slot too many."""
    for stage in range(run.last + 1):
        for microbatch in range(run.microbatches):
            kinds = (FORWARD, INPUT, WEIGHT) if (stage, microbatch) in run.split else (FORWARD, BACKWARD)
            for kind in KINDS:
                times = run.done[kind, stage, microbatch]
                assert times == (kind in kinds), f"{kind} of {microbatch} on stage {stage} is done {times} times"
    for key, slots in run.access.items():
        used = sum(slot != NOTHING for row in slots for slot in row)
        assert used == run.expected[key], f"{'.'.join(key)} has {used} entries, {run.expected[key]} have a use"
    left = [value for value in run.slots.values() if value.readers]
    assert not left, f"never read: {left[0]}"
    for buffer in run.lowered.buffers:
        for rank, size in enumerate(buffer.sizes):
            changes = [(start, 1) for start, _ in run.lives[buffer.name, rank]]
            changes += [(end + 1, -1) for _, end in run.lives[buffer.name, rank]]
            alive = most = 0
            for _, change in sorted(changes):
                alive += change
                most = max(most, alive)
            assert size == most, f"{buffer.name} has {size} slots on rank {rank}, {most} would do"
        assert buffer.size == max(buffer.sizes), f"{buffer.name} has {buffer.size} slots, {max(buffer.sizes)} would do"
