"""Packets: each message and its descriptors arrive whole and in order, and the end of the peer is seen."""

from __future__ import annotations

import os

import pytest

from app.pool.messages import Failed, Loaded, Spawned, Warming, pair, receive, send
from tests.app.pool.proc import descriptors, opened_since, target


def test_descriptors_stay_with_their_message() -> None:
    """Messages arrive in order, each with its own descriptors, and their types are kept."""
    ours, theirs = pair()
    files = [os.memfd_create(f"file-{number}") for number in range(3)]
    sent = [
        (Spawned(1), files[:2]),
        (Loaded(99.5), []),
        (Failed("a cause", final=True), files[2:]),
        (Warming(1, 7), []),
    ]
    with ours, theirs:
        for message, given in sent:
            send(ours, message, given)
        ours.close()
        for message, given in sent:
            found = receive(theirs)
            assert found is not None
            assert (found[0], type(found[0])) == (message, type(message))
            assert list(map(target, found[1])) == list(map(target, given))
            for descriptor in (*given, *found[1]):
                os.close(descriptor)
        assert receive(theirs) is None


def test_a_message_larger_than_a_packet() -> None:
    """It arrives whole, with its descriptors, and leaves no file open."""
    before = descriptors()
    ours, theirs = pair()
    bulk = bytes(3_000_000)
    with ours, theirs, open(os.memfd_create("mine"), "wb") as file:  # noqa: PTH123 - it has no path
        send(theirs, (7, bulk), [file.fileno()])
        send(theirs, 8)
        found = receive(ours)
        assert found is not None
        assert found[0] == (7, bulk)
        (descriptor,) = found[1]
        assert target(descriptor).startswith("/memfd:mine")
        os.close(descriptor)
        assert receive(ours) == (8, [])
    assert not opened_since(before)


def test_the_last_messages_of_a_peer_that_left_ours_unread() -> None:
    """What a worker sent before it died arrives, even if it has not read everything."""
    ours, theirs = pair()
    with ours, theirs:
        send(ours, "unread")
        send(theirs, "last words")
        theirs.close()
        assert receive(ours) == ("last words", [])
        assert receive(ours) is None
        with pytest.raises(BrokenPipeError):
            send(ours, "more")


def test_nothing_to_read_yet() -> None:
    """A non-blocking socket without a message is distinguished from one whose peer is gone."""
    ours, theirs = pair()
    with ours, theirs:
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            receive(ours)
