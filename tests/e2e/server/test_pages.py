"""Few pages and small chunks: chunked and mixed prefills, eviction all the time, and retraction change no answer."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.server.conftest import World
from tests.e2e.server.reference import FILE, LENGTH, prompts
from tests.kit.requests import BOS, document
from tests.kit.server import Server, differs, serving

OFF = {"reuse": "off"}
PAGES = 56
RETRACT_EVERY = 19  # forwards, while SGLang tests its own retraction


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
    heads = document(3, 911), document(40, 912)
    known = [[BOS, *head, *world.documents["seam-129"], *document(9, 913)] for head in heads]
    bodies = [small.body(ids, 260, OFF) for ids in asked] + [small.body(ids, 60) for ids in known]
    answers = small.together(bodies)
    for ids, answer in zip(asked, answers[:6], strict=True):
        assert len(answer.ids) == 260
        assert world.reference.wrong(ids, answer.ids) == []
    for ids, answer in zip(known, answers[6:], strict=True):
        alone = world.engine().generate(token_ids=ids, max_new_tokens=60, stop_at_eos=False)
        assert answer.report["reused_tokens"] == alone.report.reused_tokens > 0
        assert not differs(answer.ids, answer.margins, alone.token_ids)
    assert (
        small.log.read_text(encoding="utf-8").count("Retract requests")
        + small.log.read_text(encoding="utf-8").count("retract")
        > 0
    )
    small.at_rest()


def test_requests_aborted_at_every_stage_leave_nothing(small: Server, world: World):
    """Waiting, in the middle of a prefill, and answering."""
    small.flush()
    known = [*world.documents["document-02"], *world.documents["seam-257"]]
    bodies = []
    for number in range(14):
        ids = [BOS, *document(70 + number, 920), *known, *document(9, 921)]
        bodies.append(small.body(ids, 100, OFF if number % 2 else None, rid=f"stage-{number:02}-"))
    with ThreadPoolExecutor(14) as pool:
        asked = [pool.submit(small.call, "POST", "/generate", json=body) for body in bodies]
        time.sleep(1)
        for number in random.Random(3).sample(range(14), 12):
            small.call("POST", "/abort_request", json={"rid": f"stage-{number:02}-"})
            time.sleep(0.1)
        found = [one.result() for one in asked]
    assert {response.status_code for response in found} <= {200, 400, 503}
    small.at_rest()
