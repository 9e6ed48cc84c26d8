"""The serving engine under a server in miniature: pages, a prefix tree, chunks, mixed batches, retraction."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from redknot.errors import ConfigError, InputError, ReuseUnavailableError
from redknot.serving.batch import Ask
from redknot.serving.engine import ServingEngine
from tests.kit.miniserver import Job, MiniServer
from tests.kit.requests import BOS, ROOT, document
from tests.serving.conftest import World

PAGES = 128
OFF = Ask(reuse="off")


@pytest.fixture(params=["rowsparse", "turbo"])
def engine(world: World, request: pytest.FixtureRequest) -> Iterator[ServingEngine]:
    """Its books balance when a test ends, and nothing is held then but pages of the tree."""
    with ServingEngine(world.checkpoint, world.store, request.param, pages=PAGES, requests=8, context=1024) as made:
        yield made
        assert made.check_books() == []
        made.clear_pages()
        assert made.check_books() == []


def prompt(world: World, *parts: int, question: int = 17, head: int = 5, seed: int = 5) -> list[int]:
    """BOS, new text, documents by number with new text between them, and a question."""
    ids = [BOS, *document(head, seed)]
    for number in parts:
        ids += world.documents[number]
    return ids + document(question, seed + 1)


def expected(world: World, profile: str, ids: list[int], length: int, reuse: str = "auto") -> list[int]:
    engine = world.engines[profile]
    found = engine.generate(token_ids=ids, reuse=reuse, max_new_tokens=length, stop_at_eos=False)
    return list(found.token_ids)


def agrees(job: Job, answer: list[int]) -> bool:
    """Whether a job gave an answer, up to the first token that two others are equally likely to be."""
    assert job.failure is None, job.failure
    for found, wanted, margin in zip(job.answer, answer, job.margins, strict=True):
        if found != wanted:
            return margin < 1e-3
    return True


@pytest.mark.parametrize("chunk", [32, 64, 1024])
def test_a_dense_request_answers_as_the_embedded_engine_does(world, engine, chunk):
    ids = prompt(world, 3)
    job = MiniServer(engine, PAGES, chunk).answer("a", ids, 40, OFF)
    assert agrees(job, expected(world, "turbo", ids, 40, "off"))
    assert job.report["arm"] == "dense"
    assert job.report["reason"] == "reuse_off"
    assert job.report["forwarded_rows"] == len(ids)
    assert job.report["ledgers"]["token_rows"]["saved"] == 0
    assert job.report["ledgers"]["arithmetic"]["saved"] == 0


@pytest.mark.parametrize("chunk", [32, 96, 1024])
def test_a_reusing_request_answers_as_the_embedded_engine_does(world, engine, chunk):
    ids = prompt(world, 0, 3, 1)
    job = MiniServer(engine, PAGES, chunk).answer("a", ids, 40)
    assert agrees(job, expected(world, engine.profile.name, ids, 40))
    report = job.report
    alone = world.engines[engine.profile.name].generate(token_ids=ids, max_new_tokens=1).report
    assert report["arm"] == "reuse"
    assert report["reused_tokens"] == alone.reused_tokens > 0
    assert report["forwarded_rows"] == len(ids) - report["reused_tokens"]
    assert report["counters"]["rows"] == alone.counters.rows
    assert report["counters"]["flops"] == alone.counters.flops


@pytest.mark.parametrize("seed", range(3))
def test_what_the_tree_has_is_not_run_again(world, engine, seed):
    server = MiniServer(engine, PAGES, 64)
    ids = prompt(world, 3, seed=seed)
    server.answer("first", ids, 1, OFF)
    again = server.answer("again", ids, 8, OFF)
    assert again.cached == (len(ids) - 1) // 32 * 32
    assert again.report["cached_tokens"] == again.cached
    assert again.report["forwarded_rows"] == len(ids) - again.cached
    assert again.report["ledgers"]["arithmetic"]["saved"] == 0
    assert agrees(again, expected(world, "turbo", ids, 8, "off"))
    longer = ids[:200] + document(90, seed + 50)
    other = server.answer("other", longer, 8, OFF)
    assert other.cached == 192
    assert agrees(other, expected(world, "turbo", longer, 8, "off"))


def test_an_answer_is_prefix_too(world, engine):
    server = MiniServer(engine, PAGES, 64)
    ids = prompt(world, 0)
    first = server.answer("first", ids, 70, OFF)
    turn = [*first.ids, *document(20, 9)]
    second = server.answer("second", turn, 8, OFF)
    assert second.cached == (len(first.ids) - 1) // 32 * 32  # the last token never ran
    assert agrees(second, expected(world, "turbo", turn, 8, "off"))


def test_what_reuse_left_serves_the_same_reuse_alone(world, engine):
    server = MiniServer(engine, PAGES, 64)
    ids = prompt(world, 0, 3)
    first = server.answer("first", ids, 40)
    same = server.answer("same", ids, 8)
    assert same.key == first.key is not None
    assert same.cached == (len(ids) - 1) // 32 * 32
    assert same.report["cached_tokens"] == same.cached
    assert same.report["forwarded_rows"] == len(ids) - same.cached - same.report["reused_tokens"]
    assert agrees(same, first.answer[:8])
    exact = server.answer("exact", ids, 8, OFF)
    assert exact.cached == 0
    assert agrees(exact, expected(world, "turbo", ids, 8, "off"))
    question = server.answer("question", [*ids[:-17], *document(23, 77)], 8)
    assert question.key == first.key
    assert question.cached >= len(ids) - 17 - 32
    assert question.failure is None


def test_the_longer_exact_prefix_wins(world, engine):
    server = MiniServer(engine, PAGES, 64)
    ids = prompt(world, 0, 3, head=70)
    server.answer("head", ids[:68], 1, OFF)  # in front of the documents
    job = server.answer("a", ids, 8)
    assert job.report["cached_tokens"] == 64
    assert job.report["forwarded_rows"] == len(ids) - 64 - job.report["reused_tokens"]
    again = server.answer("again", ids, 8)
    assert again.cached > again.report["cached_tokens"] - 32 > 64  # its own branch is longer by now
    server = MiniServer(engine, PAGES, 64)
    engine.clear_pages()
    server.answer("half", ids[:300], 1, OFF)  # into the second document
    part = server.answer("b", ids, 8)
    assert part.key not in (None, job.key)
    assert part.report["cached_tokens"] == 288
    assert [one["reason"] for one in part.report["documents"]] == ["exact_prefix", None]
    server.answer("all", ids, 1, OFF)
    whole = server.answer("c", [*ids[:-1], ids[-1] + 1], 8)
    assert whole.key is None
    assert whole.report["reason"] == "nothing_to_reuse"
    assert whole.cached == (len(ids) - 1) // 32 * 32


def test_requests_run_together_and_apart_alike(world, engine):
    jobs = [prompt(world, 0, seed=1), prompt(world, 3, 1, seed=2), prompt(world, 2, seed=3), prompt(world, 1, seed=4)]
    alone = [MiniServer(engine, PAGES, 1024).answer(f"alone{n}", ids, 12).answer for n, ids in enumerate(jobs)]
    engine.clear_pages()
    server = MiniServer(engine, PAGES, 32)
    together = [server.submit(f"t{n}", ids, 12, OFF if n == 2 else None) for n, ids in enumerate(jobs)]
    server.run()
    for number in (0, 1, 3):
        assert agrees(together[number], alone[number])
    assert agrees(together[2], expected(world, "turbo", jobs[2], 12, "off"))


@pytest.mark.parametrize("seed", range(4))
def test_retraction_eviction_and_aborts_change_no_answer(world, engine, seed):
    draw = random.Random(seed)
    server = MiniServer(engine, PAGES, 32)
    wanted: dict[str, tuple[Job, list[int]]] = {}
    for number in range(6):
        parts = draw.sample(range(4), draw.randint(0, 2))
        ids = prompt(world, *parts, head=draw.randint(1, 80), question=draw.randint(3, 60), seed=seed * 10 + number)
        ask = draw.choice([OFF, OFF, Ask()])
        answer = expected(world, engine.profile.name, ids, 40, ask.reuse)
        wanted[f"j{number}"] = server.submit(f"j{number}", ids, 40, ask), answer
    jobs = list(server.running)
    while server.running:
        server.step(draw.sample(server.running, draw.randint(1, len(server.running))))
        event = draw.random()
        if server.running and event < 0.05:
            server.retract(draw.choice(server.running))
        elif event < 0.1:
            server.evict(draw.randint(0, 6))
        elif event < 0.11 and len(server.running) > 4:
            server.abort(draw.choice(server.running))
    for job in jobs:
        if job.failure != "aborted" and job.report["arm"] == "dense":
            assert agrees(job, wanted[job.name][1])
        assert job.failure in (None, "aborted")


def test_lost_pages_are_run_again(world, engine):
    server = MiniServer(engine, PAGES, 64)
    for ask in (OFF, Ask()):
        ids = prompt(world, 3)
        first = server.answer("first", ids, 8, ask)
        engine.clear_pages()  # without telling the tree
        again = server.answer("again", ids, 8, ask)
        assert again.cached > 0
        assert again.report["cached_tokens"] == 0
        assert agrees(again, first.answer)


def test_a_failing_request_fails_alone(world, engine, monkeypatch):
    server = MiniServer(engine, PAGES, 64)
    good, bad = server.submit("good", prompt(world, 3), 6, OFF), server.submit("bad", prompt(world, 1), 6, OFF)
    native = engine._rows.prefill

    def fails(served, piece):
        if piece.request_id == "bad" and piece.start:
            raise RuntimeError("the disk is on fire")
        return native(served, piece)

    monkeypatch.setattr(engine._rows, "prefill", fails)
    server.run()
    assert bad.failure == "RuntimeError: the disk is on fire"
    assert engine.state()["requests"] == 0
    assert agrees(good, expected(world, "turbo", prompt(world, 3), 6, "off"))


def test_malformed_wishes_are_refused_by_name(world, engine):
    for given, message in (
        ([1], "must be an object"),
        ({"reusing": True}, "no field reusing"),
        ({"reuse": "maybe"}, "redknot.reuse must be one of"),
        ({"profile": 3}, "name of a profile"),
        ({"spans": "x"}, "must be a list"),
        ({"spans": [[1]]}, r"spans\[0\]"),
        ({"spans": [{"from": 1}]}, r"spans\[0\]"),
    ):
        with pytest.raises(InputError, match=message):
            Ask.parse(given)
    with pytest.raises(InputError, match="no profile 'fast'"):
        engine.admit("x", [1, 2], Ask(profile="fast"))
    with pytest.raises(InputError, match="token ids"):
        engine.admit("x", [99999], Ask())
    with pytest.raises(InputError, match="empty"):
        engine.admit("x", [], Ask())
    with pytest.raises(InputError, match="1100 prompt tokens"):
        engine.admit("x", [9] * 1100, Ask())
    with pytest.raises(ReuseUnavailableError, match="nothing_to_reuse"):
        engine.admit("x", document(60, 1), Ask(reuse="required"))


def test_a_step_that_was_on_its_way_when_its_request_failed(world, engine, monkeypatch):
    """A server that schedules ahead sends one more step; it is not a new request."""
    server = MiniServer(engine, PAGES, 1024)
    job = server.submit("a", prompt(world, 3), 6, OFF)
    server.step()
    piece = server._piece(job)

    def fails(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(engine._rows, "steps", fails)
    assert set(engine.forward([piece]).failures) == {"a"}
    again = engine.forward([piece])
    assert not again.failures
    assert not again.logits.any()
    engine.release("a")
    assert engine.state()["requests"] == 0


def test_the_end_of_one_request_is_not_that_of_a_later_one_of_its_name(world, engine):
    first = engine.admit("same", prompt(world, 3), OFF)
    engine.release("same")
    engine.admit("same", prompt(world, 1), OFF)
    engine.release("same", admission=first)
    assert engine.state()["requests"] == 1
    engine.release("same")
    assert engine.state()["requests"] == 0


def test_a_step_that_finds_no_room_for_a_copy_fails_alone(world, engine):
    """A page may end inside the block that the next row goes to; the block is the page's too then."""
    server = MiniServer(engine, PAGES, 1024)
    reusing, other = server.submit("reusing", prompt(world, 3), 70), server.submit("other", prompt(world), 70, OFF)
    while reusing.at % server.size or not reusing.answer:
        server.step()
    last = engine._requests["reusing"].session.segments[-1]
    assert last.length % server.size
    assert other.at % server.size
    taken = engine.latents.store.allocate("", engine.latents.store.room())
    while reusing.failure is None:
        server.step()
    assert "PoolFullError" in reusing.failure
    assert other.failure is None
    engine.latents.store.free(taken)
    server.run()
    assert agrees(other, expected(world, "turbo", prompt(world), 70, "off"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prefix", "profile prefix: prefix_cache is for the embedded engine; SGLang has a prefix cache"),
        ("fan-out", "profile fan-out: fan_out without reuse is for the embedded engine"),
    ],
)
def test_profiles_of_the_embedded_engine_are_refused_by_name(world, name, message):
    path = str(ROOT / f"configs/profiles/{name}.json")
    with pytest.raises(ConfigError, match=message) as error:
        ServingEngine(world.checkpoint, world.store, path, pages=PAGES, requests=8, context=1024)
    assert "\n" not in str(error.value)
