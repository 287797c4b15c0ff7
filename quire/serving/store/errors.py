"""What the store refuses."""

from __future__ import annotations

from quire.errors import NotFoundError, PayloadTooLarge


class StoreFullError(PayloadTooLarge):
    """There is no room, and nothing that may be evicted."""

    code = "store_full"

    @classmethod
    def of(cls, max_bytes: int) -> StoreFullError:
        """The store holds `max_bytes`."""
        return cls(
            f"The store is full: responses, files and batches may take {max_bytes} bytes "
            "(--responses-store-max-bytes). Delete files that are no longer needed."
        )


class UnknownIdError(NotFoundError):
    """No such response, file or batch; it may have been evicted."""

    code = "not_found"

    @classmethod
    def of(cls, kind: str, asked: str, param: str | None = None) -> UnknownIdError:
        """No `kind` has the id `asked`."""
        return cls(f"There is no {kind} '{asked[:128]}'. It may have expired or been deleted.", param=param)
