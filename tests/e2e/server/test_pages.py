"""Few pages and small chunks: chunked and mixed prefills, eviction all the time, and retraction change no answer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from tests.e2e.server.conftest import World
from tests.e2e.server.reference import FILE, LENGTH, prompts
from tests.kit.requests import BOS, document
from tests.kit.server import Server, differs, serving

OFF = {"reuse": "off"}
PAGES = 56
RETRACT_EVERY = 9  # forwards, while SGLang tests its own retraction


@pytest.fixture(scope="module")
def small(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = [
        *("--chunked-prefill-size", 64, "--enable-mixed-chunk", "--max-total-tokens", PAGES * 32),
        *("--context-length", 1024, "--max-running-requests", 6),
    ]
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(RETRACT_EVERY)}
    with serving(tmp_path_factory.mktemp("small"), world.store, *options, environment=retract) as server:
        yield server


def test_chunks_of_two_pages_change_no_answer(small: Server, world: World):
    small.flush()
    for length in (63, 64, 65, 128, 129, 500):
        ids = [BOS, *document(length - 1, 900)]
        answer = small.generate(ids, 4, OFF)
        assert answer.report["forwarded_rows"] == length - answer.report["cached_tokens"]
        assert world.reference.wrong(ids, answer.ids) == []
    ids = [BOS, *document(40, 901), *world.documents["document-01"], *document(70, 902)]
    answer = small.generate(ids, 4)
    alone = world.engine().generate(token_ids=ids, max_new_tokens=4, stop_at_eos=False)
    assert answer.report["reused_tokens"] == alone.report.reused_tokens > 0
    assert answer.report["forwarded_rows"] == len(ids) - answer.report["reused_tokens"]
    assert answer.report["counters"]["rows"] == {str(k): v for k, v in alone.report.counters.rows.items()}
    assert not differs(answer.ids, answer.margins, alone.token_ids)


def test_eviction_all_the_time_changes_no_answer(small: Server, world: World):
    """The prompts take many times the pages there are; a shuffled half of them comes twice."""
    known = json.loads(FILE.read_text(encoding="utf-8"))["answers"]
    asked = prompts()
    order = random.Random(2).sample(range(len(asked)), len(asked))
    order += order[::2]
    answers = small.together([small.body(asked[number], LENGTH, OFF) for number in order], clients=10)
    assert sum(len(asked[number]) for number in order) > 4 * PAGES * 32
    for number, answer in zip(order, answers, strict=True):
        assert not differs(answer.ids, known[number]["margins"], known[number]["answer"]), number
    small.at_rest()


def test_retracted_requests_go_on_as_if_nothing_had_been(small: Server, world: World):
    """Long answers of more tokens than there is room for."""
    asked = [[BOS, *document(30 + number, 910)] for number in range(6)]
    known = [BOS, *document(3, 911), *world.documents["seam-129"], *document(9, 912)]
    bodies = [small.body(ids, 260, OFF) for ids in asked]
    bodies += [small.body(known, 60), small.body(known, 60)]
    answers = small.together(bodies)
    for ids, answer in zip(asked, answers[:6], strict=True):
        assert len(answer.ids) == 260
        assert world.reference.wrong(ids, answer.ids) == []
    alone = world.engine().generate(token_ids=known, max_new_tokens=60, stop_at_eos=False)
    for answer in answers[6:]:
        assert answer.report["reused_tokens"] == alone.report.reused_tokens > 0
        assert not differs(answer.ids, answer.margins, alone.token_ids)
    assert (
        small.log.read_text(encoding="utf-8").count("Retract requests")
        + small.log.read_text(encoding="utf-8").count("retract")
        > 0
    )
    small.at_rest()
