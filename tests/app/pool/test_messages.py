"""Framing: every message and its descriptors arrive complete and in order, however the stream is split."""

from __future__ import annotations

import os
import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.pool import messages
from app.pool.messages import (
    Done,
    Exited,
    Failed,
    Forget,
    Hello,
    Loaded,
    Message,
    MessageDecoder,
    Probe,
    Run,
    Spawn,
    Warming,
)
from tests.app.pool.proc import target

_SAMPLES: list[Message] = [
    Hello(),
    Probe(7),
    Failed("a cause", final=True),
    Loaded(99.5),
    Spawn(1),
    Warming(1, 7),
    Exited(2, -9),
    Forget((1, 2), (3,)),
    Run(1, 2, (3, 0, None, None, 7), (4, 5), 6, None, b"plan" * 1000, ((4, 65536), (5, 65536))),
    Done(1, "failed", 0.5, "traceback"),
]


@given(st.lists(st.sampled_from(_SAMPLES), max_size=8), st.lists(st.integers(0, 2000), max_size=12))
def test_messages_survive_any_cut(sent: list[Message], cuts: list[int]) -> None:
    """A stream that arrives in pieces of any size yields the same messages."""
    stream = b"".join(map(messages.encode, sent))
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    decoder, got = MessageDecoder(), []
    for start, end in pairwise(edges):
        decoder.feed(stream[start:end])
        while (found := decoder.next()) is not None:
            got.append(found)
    assert got == [(message, []) for message in sent]
    assert [type(message) for message, _ in got] == list(map(type, sent))
    assert decoder.next() is None


def test_descriptors_stay_with_their_message() -> None:
    """Descriptors of several messages in one stream each arrive with their own message."""
    ours, theirs = socket.socketpair()
    files = [os.memfd_create(f"file-{number}") for number in range(3)]
    with ours, theirs:
        assert messages.send(ours, Spawn(1), files[:2])
        assert messages.send(ours, Hello())
        assert messages.send(ours, Spawn(2), files[2:])
        ours.shutdown(socket.SHUT_WR)
        decoder, names = MessageDecoder(), {}
        while (found := messages.receive(theirs, decoder)) is not None:
            message, descriptors = found
            names[message] = [target(number).split()[0] for number in descriptors]
            for number in descriptors:
                os.close(number)
    for number in files:
        os.close(number)
    assert names == {
        Spawn(1): ["/memfd:file-0", "/memfd:file-1"],
        Hello(): [],
        Spawn(2): ["/memfd:file-2"],
    }


def test_sending_to_a_dead_peer_does_not_raise() -> None:
    """Sending to a closed peer returns False, receiving from it returns None."""
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert not messages.send(ours, Hello())
        assert messages.receive(ours, MessageDecoder()) is None


def test_a_peer_that_leaves_bytes_unread_is_the_end() -> None:
    """If the peer died with unread data, receiving reports the end of the stream instead of raising."""
    ours, theirs = socket.socketpair()
    with ours:
        assert messages.send(ours, Hello())
        theirs.close()
        assert messages.receive(ours, MessageDecoder()) is None


def test_nothing_to_read_yet() -> None:
    """On a non-blocking socket, a stream without data is distinguished from one that has ended."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            messages.receive_some(ours, MessageDecoder())
