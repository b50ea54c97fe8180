"""The progress bar: phases, percentage and time left."""

from __future__ import annotations

import io

from convgrad import Health, Progress
from convgrad._progress import ProgressBar


class Drawn:
    """A progress bar whose clock the test sets, and what it has drawn."""

    def __init__(self) -> None:
        self.now = 0.0
        self._stream = io.StringIO()
        self.bar = ProgressBar(self._stream, "Op", clock=lambda: self.now)

    def last(self) -> str:
        """Return the line that is visible, without the bar itself."""
        line = self._stream.getvalue().rsplit("\r\x1b[K", 1)[-1]
        return " ".join(line.replace("█", "").replace("░", "").split())


def test_a_call() -> None:
    """The phases follow each other; each has its percentage, and the time left by its own speed."""
    drawn = Drawn()
    drawn.bar.uploading(0, 200)
    assert drawn.last() == "Op: uploading 0 %"
    drawn.now = 10.0
    drawn.bar.uploading(50, 200)
    assert drawn.last() == "Op: uploading 25 %, 0:30 left"
    drawn.bar.uploading(200, 200)
    assert drawn.last() == "Op: queued"
    drawn.now = 100.0
    drawn.bar.computing(Progress(0, 10))
    assert drawn.last() == "Op: computing 0 %"
    drawn.now = 130.0
    drawn.bar.computing(Progress(1, 10))
    assert drawn.last() == "Op: computing 10 %, 4:30 left"
    drawn.bar.computing(Progress(10, 10))
    assert drawn.last() == "Op: computing 100 %"


def test_a_service_that_starts() -> None:
    """While the service starts its own progress is shown, and before that there is no connection."""
    drawn = Drawn()
    drawn.bar.waiting(None)
    assert drawn.last() == "Op: waiting for a connection"
    drawn.now = 5.0
    drawn.bar.waiting(Health(False, {"status": "starting", "progress": 0.5}))
    assert drawn.last() == "Op: starting 50 %"
    drawn.now = 15.0
    drawn.bar.waiting(Health(False, {"status": "starting", "progress": 0.75}))
    assert drawn.last() == "Op: starting 75 %, 0:10 left"
