"""Sections on their way to a device: pinned first, queued beside what computes, used only behind their event."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from redknot.artifact.schema import boundary_section, layer_section
from redknot.comm.group import OneProcess
from redknot.errors import CorruptSectionError, RequestReason
from redknot.plan.rows import KnownRun
from redknot.runtime.library import Refused
from redknot.runtime.reading import GROUP_LAYERS, Reading
from redknot.runtime.restore import Source
from redknot.runtime.staging import CopyStream, StagedSections
from tests.kit.streams import Streams

LAYERS = GROUP_LAYERS + 1
NAMES = (*(layer_section(layer, "window") for layer in range(LAYERS)), boundary_section("streams"))


class Artifact:
    """Sections that are made when they are read; one may be damaged."""

    def __init__(self, damaged: str = "") -> None:
        self.damaged = damaged
        self.made = {name: torch.full((2, 3), float(number)) for number, name in enumerate(NAMES)}

    def section(self, name: str) -> Tensor:
        if name == self.damaged:
            raise CorruptSectionError(f"{name} is damaged")
        return self.made[name]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Copies go to the CPU; what they went through is written down."""
    found = Streams()

    def pin_memory(tensor: Tensor) -> Tensor:
        found.log.append((found.current[-1], "pin", None))
        return tensor.clone()

    native = Tensor.to

    def to(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        if kwargs.get("non_blocking"):
            found.log.append((found.current[-1], "copy", None))
        return native(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: found.used.append(stream))
    return found


def reading(streams: Streams, artifact: Artifact) -> tuple[Reading, StagedSections]:
    copies = CopyStream(torch.device("cpu"), streams)
    sections = StagedSections(artifact, copies)
    source = Source(KnownRun("a", 0, 0, 2, 2), sections, names=NAMES)
    with ThreadPoolExecutor(1) as threads:  # all groups are read when it ends
        return Reading(threads, OneProcess(), LAYERS, [source], copies=copies), sections


def test_a_group_is_used_behind_its_event(streams: Streams) -> None:
    made, _ = reading(streams, Artifact())
    queued = [(stream, what) for stream, what, _ in streams.log]
    first = [("compute", "pin"), ("copy 1", "copy")] * GROUP_LAYERS + [("copy 1", "record")]
    assert queued == [*first, ("compute", "pin"), ("copy 1", "copy"), ("copy 1", "record")]
    events = [event for _, what, event in streams.log if what == "record"]
    made.ready(0)
    assert streams.log[len(queued) :] == [("compute", "wait", events[0])]
    made.ready(GROUP_LAYERS - 1)  # waited for already
    made.ready(GROUP_LAYERS)
    assert streams.log[len(queued) :] == [("compute", "wait", event) for event in events]


def test_staged_sections_are_copies_that_are_used_here(streams: Streams) -> None:
    artifact = Artifact()
    made, sections = reading(streams, artifact)
    for name in NAMES[:-1]:
        found = sections.section(name)
        assert torch.equal(found, artifact.made[name])
        assert found is not artifact.made[name]
    assert streams.used == ["compute"] * LAYERS
    assert sections.section(NAMES[-1]) is artifact.made[NAMES[-1]]  # rows of it are taken on the host
    made.close()
    assert sections.section(NAMES[0]) is artifact.made[NAMES[0]]  # nothing is held behind the request


def test_a_damaged_section_is_a_refusal_as_without_a_device(streams: Streams) -> None:
    made, _ = reading(streams, Artifact(damaged=NAMES[GROUP_LAYERS]))
    made.ready(0)
    with pytest.raises(Refused) as found:
        made.ready(GROUP_LAYERS)
    assert found.value.reason is RequestReason.CORRUPT_SECTION
