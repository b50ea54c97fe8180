"""Fair shares per key: who is admitted, who is told to wait, and whose turn it is."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from app.calls.admission import Admission
from app.pool.buffers import SegmentPool
from app.settings import Settings
from app.telemetry.context import RequestContext, address_of
from convgrad import Overloaded, RateLimited
from tests.app.bare import connected, multipart
from tests.app.resident import Resident, resident_service
from tests.app.samples import SLOW, SMALL, SSE, digest, document, post, read, same_bits

FLOOD, OTHER, NARROW = "the-key-of-a-flood", "the-key-of-the-other", "the-key-of-few-calls"


def context(key: str = "-", limit: int | None = None, address: str = "-") -> RequestContext:
    """Return the context of a request."""
    return RequestContext("id", key=key, calls_limit=limit, address=address)


def fill(admission: Admission, stack: ExitStack, who: RequestContext) -> int:
    """Admit calls until one is rejected; return their number."""
    for count in range(1000):
        try:
            stack.enter_context(admission.call(who))
        except (RateLimited, Overloaded):
            return count
    raise AssertionError("no end")


def test_without_keys_all_share_the_queue() -> None:
    """Without keys the whole queue is available to everybody; once it is full, it is full for all."""
    admission = Admission(Settings(queue_length=8))
    with ExitStack() as stack:
        assert fill(admission, stack, context()) == 8
        with pytest.raises(Overloaded) as caught, admission.request(context()):
            pass
        assert caught.value.data == {"reason": "queue", "limit": 8, "retry_after": 1}
    with admission.request(context()):
        pass


def test_a_flood_leaves_places() -> None:
    """One key gets half of the queue; a second and a third still find places."""
    admission = Admission(Settings(queue_length=64))
    with ExitStack() as stack:
        counts = [fill(admission, stack, context(key)) for key in ("a", "b", "c", "d")]
        with pytest.raises(RateLimited) as caught, admission.call(context("a")):
            pass
    assert counts == [32, 16, 8, 4]
    assert caught.value.data["reason"] == "key_share"
    assert caught.value.retry_after == 1


def test_an_address_has_the_queue_until_another_one_comes() -> None:
    """After that it gets no more than the other leaves, and the other gets the next free place."""
    admission = Admission(Settings(queue_length=8))
    flood, other = context(address="10.0.0.1"), context(address="10.0.0.2")
    with ExitStack() as stack, ExitStack() as first:
        with admission.request(flood):
            first.enter_context(admission.call(flood))
        assert fill(admission, stack, flood) == 7
        with pytest.raises(Overloaded), admission.request(other):
            pass
        first.close()
        with pytest.raises(RateLimited) as caught, admission.request(flood):
            pass
        assert caught.value.data["reason"] == "key_share"
        with admission.request(other), admission.call(other):
            pass


def test_an_address_counts_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an address has sent nothing for a minute, the remaining one gets its share."""
    admission, now = Admission(Settings(queue_length=8)), 100.0
    monkeypatch.setattr("app.calls.admission.time.monotonic", lambda: now)
    with admission.request(context(address="10.0.0.2")), admission.request(context(address="10.0.0.1")):
        pass
    for now, expected in ((159.0, 4), (161.0, 8)):  # noqa: B007 - read by the clock
        with ExitStack() as stack, admission.request(context(address="10.0.0.1")):
            assert fill(admission, stack, context(address="10.0.0.1")) == expected


def test_requests_in_transit_are_bounded() -> None:
    """Incoming bodies and outgoing replies are counted too, to bound their memory; four keys share the limit."""
    admission = Admission(Settings(queue_length=100))
    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(admission.request(context()))
        with pytest.raises(Overloaded) as caught, admission.request(context()):
            pass
        assert caught.value.data == {"reason": "queue", "limit": 400, "retry_after": 1}
    with ExitStack() as stack:
        for key in ("a", "b", "c"):
            for _ in range(100):
                stack.enter_context(admission.request(context(key)))
        for _ in range(50):
            stack.enter_context(admission.request(context("d")))
        with pytest.raises(RateLimited), admission.request(context("d")):
            pass
        with admission.request(context("e")):
            pass


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("", "-"),
        ("unknown", "-"),
    ],
)
def test_whom_an_address_belongs_to(host: str, expected: str) -> None:
    """Addresses that one host can choose from count as one; text that is not an address belongs to nobody."""
    assert address_of(host) == expected


@pytest.mark.parametrize(("line", "expected"), [(3, 3), (None, 32)])
def test_a_key_s_limit(line: int | None, expected: int) -> None:
    """The limit in a key's line applies; without it the key's share does."""
    admission = Admission(Settings(queue_length=64))
    with ExitStack() as stack:
        assert fill(admission, stack, context("a", line)) == expected
    with ExitStack() as stack:
        assert fill(admission, stack, context("a", line)) == expected, "what has ended does not count"


def test_incoming_requests_count_for_their_key() -> None:
    """Incoming bodies use the places of their own key, and of no other."""
    admission = Admission(Settings(queue_length=64))
    with admission.request(context("a", 1)):
        with pytest.raises(RateLimited, match="1 requests or calls"), admission.request(context("a", 1)):
            pass
        with admission.request(context("b", 1)):
            pass


@pytest.fixture(scope="module")
def shared() -> Iterator[Resident]:
    """A service with three keys, one worker and a queue of four."""
    keys = f"flood {digest(FLOOD)};other {digest(OTHER)};narrow {digest(NARROW)} calls=1"
    with resident_service(workers=1, queue_length=4, keys=keys) as resident:
        yield resident


@contextmanager
def calling(service: Resident, key: str = "", here: str = "127.0.0.1") -> Iterator[socket.socket]:
    """Send a slow call with a key, from an address of this machine, and disconnect when the block ends."""
    with connected(service.url, here=here) as sock:
        sock.sendall(b"".join(multipart(SLOW, SSE, {"x-api-key": key}, reference=True)))
        yield sock


def test_a_flood_of_one_key_starves_nobody(shared: Resident) -> None:
    """While one key uses its whole share, the other's call is admitted and answered, long before the flood ends."""
    inputs = SMALL.inputs()
    with ExitStack() as stack, httpx.Client(base_url=shared.url, timeout=60) as http:
        for count in range(1, 3):
            stack.enter_context(calling(shared, FLOOD))
            shared.until(lambda count=count: len(shared.service.calls) == count)  # type: ignore[misc]
        refused = post_as(http, FLOOD)
        assert (refused.status_code, refused.json()["reason"]) == (429, "key_share")
        assert int(refused.headers["retry-after"]) >= 1
        answered = post_as(http, OTHER)
        assert same_bits(read(answered), SMALL.expected(inputs))
        assert len(shared.service.calls) == 2, "the flood still computes"
    shared.run(shared.service.admission.idle())


def test_a_flood_of_one_address_starves_nobody() -> None:
    """Without keys, and with the queue full of one address's calls, another address gets the next free place."""
    inputs = SMALL.inputs()
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    with (
        resident_service(workers=1, queue_length=2) as service,
        ExitStack() as stack,
        httpx.Client(base_url=service.url, timeout=60) as flood,
        httpx.Client(base_url=service.url, timeout=60, transport=elsewhere) as other,
    ):
        with calling(service):
            stack.enter_context(calling(service))
            service.until(lambda: len(service.service.calls) == 2)
            refused = [post(http, SMALL, inputs) for http in (flood, other)]
            assert [reply.status_code for reply in refused] == [503, 503]
        service.until(lambda: len(service.service.calls) == 1)
        refused = [post(flood, SMALL, inputs)]
        assert (refused[0].status_code, refused[0].json()["reason"]) == (429, "key_share")
        assert same_bits(read(post(other, SMALL, inputs)), SMALL.expected(inputs))
        assert len(service.service.calls) == 1, "the flood still computes"


def post_as(http: httpx.Client, key: str) -> httpx.Response:
    """Post the small call with a key."""
    http.headers["x-api-key"] = key
    return post(http, SMALL, SMALL.inputs())


def test_a_key_over_its_limit_is_429_on_every_api(shared: Resident) -> None:
    """A second call of a key with a limit of one gets 429 with Retry-After, or -32000 from the JSON-RPC API."""
    with calling(shared, NARROW), httpx.Client(base_url=shared.url, timeout=60) as http:
        shared.until(lambda: len(shared.service.calls) == 1)
        refused = post_as(http, NARROW)
        assert (refused.status_code, refused.json()["code"], refused.json()["reason"]) == (
            429,
            "rate_limited",
            "key_calls",
        )
        call = {"jsonrpc": "2.0", "id": 5, "method": SMALL.op, "params": document(SMALL, SMALL.inputs())}
        reply = http.post("/rpc", json=call).json()
        assert (reply["id"], reply["error"]["code"], reply["error"]["data"]["reason"]) == (5, -32000, "key_calls")
        assert reply["error"]["data"]["retry_after"] == 1
        assert http.post("/v2/models/ConvTranspose/infer", json={}).status_code == 429
    shared.run(shared.service.admission.idle())


def test_a_batch_fits_the_limit_of_its_key(shared: Resident) -> None:
    """If a batch has more calls than its key may run at a time, they run one after another."""
    params = document(SMALL, SMALL.inputs())
    batch = [{"jsonrpc": "2.0", "id": number, "method": SMALL.op, "params": params} for number in range(4)]
    reply = httpx.post(f"{shared.url}/rpc", json=batch, headers={"x-api-key": NARROW}, timeout=60).json()
    assert all("result" in entry for entry in reply)


def test_the_first_request_of_a_key_may_take_all_memory() -> None:
    """Only further requests of a key, or of an address once there is another one, are limited to a share."""
    first, second, third = context("a"), context("a"), context("b")
    admission = Admission(Settings(queue_length=64))
    with admission.request(first), admission.request(second), admission.request(third):
        assert (first.owner, second.owner, third.owner) == ("", "a", "")
    here, there = [context(address="10.0.0.1") for _ in range(3)], context(address="10.0.0.2")
    admission = Admission(Settings(queue_length=64))
    with admission.request(here[0]), admission.request(here[1]), admission.request(there), admission.request(here[2]):
        assert [each.owner for each in (*here, there)] == ["", "", "10.0.0.1", ""]


def test_memory_is_left_for_the_next_key() -> None:
    """A key gets half of the memory, the next one half of the rest; released memory no longer counts."""
    pool = SegmentPool(64 << 20)
    held = []
    for owner, expected in (("a", 32), ("b", 16), ("c", 8)):
        held += [pool.acquire(1 << 20, owner) for _ in range(expected)]
        with pytest.raises(RateLimited) as caught:
            pool.acquire(1 << 20, owner)
        assert caught.value.data["reason"] == "memory_share"
    assert pool.acquire(8 << 20).size == 8 << 20, "without an owner all that is free can be had"
    held.clear()
    assert pool.acquire(33 << 20, "a").size == 33 << 20
    pool.close()
