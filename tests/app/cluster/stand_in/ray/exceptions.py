"""Exceptions of the stand-in."""


class RayError(Exception):
    """What Ray raises."""


class RayTaskError(RayError):
    """What a task has raised, its `cause`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class WorkerCrashedError(RayError):
    """A worker has ended."""


class ObjectStoreFullError(RayError):
    """There is no memory for an object."""


class OutOfDiskError(RayError):
    """Nor is there room on the disk."""


class ObjectLostError(RayError):
    """An input is on no machine any more."""
