"""The reader of multipart bodies: the same parts wherever the body is split, and nothing that is not multipart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.intake.parts import PartEvent, PartReader
from convgrad._errors import ParseError

BOUNDARY = b"a--boundary"
HEADERS = b'Content-Disposition: form-data; name="x"\r\nX-Other:  spaced \t\r\n\r\n'


class Collected:
    """The parts of a body, and how many of them have ended."""

    def __init__(self) -> None:
        self.parts: list[tuple[dict[bytes, bytes], bytes]] = []
        self.closed = 0

    def add(self, event: PartEvent) -> None:
        """Record what a reader yields."""
        if isinstance(event, dict):
            self.parts.append((event, b""))
        elif event is None:
            self.closed += 1
        else:
            headers, before = self.parts[-1]
            self.parts[-1] = headers, before + bytes(event)


def read(body: bytes, step: int = 10**6) -> tuple[Collected, bool]:
    """Read a body in steps; return the parts and whether it has ended."""
    found, reader = Collected(), PartReader(BOUNDARY, max_header_bytes=200)
    for start in range(0, len(body), step):
        for event in reader.feed(body[start : start + step]):
            found.add(event)
    return found, reader.ended


def written(parts: list[bytes]) -> bytes:
    """Return a body with these parts."""
    return b"".join(b"--%s\r\n%s%s\r\n" % (BOUNDARY, HEADERS, part) for part in parts) + b"--%s--\r\n" % BOUNDARY


# Bytes that are nearly a boundary, and others.
PIECES = [b"\r\n--a--boundar", b"\r", b"\n", b"\r\n", b"--a--boundary", b"\r\n--", b"x", b"\0"]
NEARLY = (
    st.lists(st.sampled_from(PIECES), max_size=8).map(b"".join).filter(lambda part: b"\r\n--" + BOUNDARY not in part)
)


@given(st.lists(NEARLY, max_size=4), st.integers(1, 40))
def test_parts_are_the_same_wherever_the_body_is_cut(parts: list[bytes], step: int) -> None:
    """Every part is read unchanged, even one full of near boundaries."""
    found, ended = read(written(parts), step)
    assert [data for _, data in found.parts] == parts
    assert found.closed == len(parts)
    assert ended


def test_headers_are_lower_case_and_trimmed() -> None:
    """Header names are case-insensitive, and blanks around values are removed."""
    found, _ = read(written([b""]))
    assert found.parts[0][0] == {b"content-disposition": b'form-data; name="x"', b"x-other": b"spaced"}


@pytest.mark.parametrize(
    "before", [b"", b"\r\n\r\n", b"\n", b"For mail\r\nreaders.\r\n", b"--a--bound\r\n", b"x" * 150 + b"\r\n"]
)
@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_text_before_and_after_the_parts_is_ignored(before: bytes, step: int) -> None:
    """Lines before the first boundary and anything after the last one are ignored."""
    found, ended = read(before + written([b"1"]) + b"more --a--boundary", step)
    assert [data for _, data in found.parts] == [b"1"]
    assert ended


@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_white_space_after_a_boundary(step: int) -> None:
    """It belongs to the boundary, up to the limit of a part's headers."""
    for count in (1, 90):
        found, ended = read(written([b"1", b"2"]).replace(BOUNDARY + b"\r", BOUNDARY + b" \t" * count + b"\r"), step)
        assert [data for _, data in found.parts] == [b"1", b"2"]
        assert ended


@pytest.mark.parametrize(
    "body",
    [
        b"--another" * 30,
        written([b"1"]).replace(BOUNDARY + b"\r", BOUNDARY + b" " * 300 + b"\r"),
        written([b"1"]).replace(BOUNDARY + b"--", BOUNDARY + b" --"),
        b"x" * 250 + b"\r\n" + written([b"1"]),
        written([b"1"]).replace(BOUNDARY + b"\r\n", BOUNDARY + b"\n", 1),
        written([b"1"]).replace(b"X-Other:", b"X Other:"),
        written([b"1"]).replace(b"X-Other:", b"X-Other"),
        written([b"1"]).replace(b"spaced", b"sp\naced"),
        written([b"1"]).replace(b"spaced", b"sp\0aced"),
        written([b"1"]).replace(b"spaced", b"s" * 200),
        written([b"1"]).replace(b"X-Other: ", b"A: b\r\n" * 8 + b"X-Other: "),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_what_is_not_multipart_is_refused(body: bytes, step: int) -> None:
    """A wrong boundary, an invalid header and too many headers are errors."""
    with pytest.raises(ParseError, match="not valid multipart"):
        read(body, step)
