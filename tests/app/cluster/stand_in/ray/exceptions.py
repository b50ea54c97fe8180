"""Exceptions of the stand-in."""


class RayTaskError(Exception):
    """What a task has raised, its `cause`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RayActorError(Exception):
    """A worker has ended."""


class ObjectStoreFullError(Exception):
    """There is no memory for an object."""


class OutOfDiskError(Exception):
    """Nor is there room on the disk."""
