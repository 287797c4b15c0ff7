"""Where adapters come from: directories of this machine, S3 (`s3://bucket/key`), and the hub (`org/name`).

What is not here is fetched each time it is read, the hub's by its own cache. Only an adapter's two files are: never
code, never pickled weights.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from quire.errors import CheckpointError
from quire.models.lora.files import WEIGHTS
from quire.models.lora.settings import CONFIG
from quire.models.weights.hub import HubAccess, download, first_line

_S3 = "s3://"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CONNECT_S, _READ_S, _TRIES = 10, 60, 3
_MISSING = ("404", "NoSuchKey", "NotFound")


class AdapterSources:
    """Finds adapters by path; `hub` says how hub ids are fetched."""

    def __init__(self, hub: HubAccess) -> None:
        self._hub = hub

    @contextmanager
    def directory(self, path: str) -> Iterator[Path]:
        """Yield a directory with the adapter's files, while they are read.

        The path is a directory, which wins over a hub id of the same name; `s3://bucket/key`, where objects below the
        key are called as the files are; or a hub id. Raises ModelNotFoundError if the hub has no such adapter or cannot
        be reached, and CheckpointError if S3 does not give it, or there is no such path.
        """
        if not path or "\0" in path:
            raise CheckpointError(f"{path!r} is no path of an adapter.")
        if path.startswith(_S3):
            with tempfile.TemporaryDirectory(prefix="quire-adapter-") as directory:
                _fetch_from_s3(path, Path(directory))
                yield Path(directory)
        elif _HUB_ID.fullmatch(path) and not Path(path).exists():
            yield download(path, self._hub, (CONFIG, WEIGHTS), asked="the adapter's path")
        else:
            yield Path(path)


def _fetch_from_s3(path: str, directory: Path) -> None:
    """Fetch the files. boto3 finds credentials, region and endpoint itself: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, a role
    …"""
    url = urlsplit(path)
    bucket, key = url.netloc, url.path.strip("/")
    if not bucket or not key or url.query or url.fragment:
        raise CheckpointError(f"{path}: write s3://bucket/key, the key being what a directory would be.")
    try:
        import boto3
        from boto3.exceptions import Boto3Error
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise CheckpointError(f"{path} needs boto3 ({error}): pip install 'quire[s3]'.") from None
    settings = Config(connect_timeout=_CONNECT_S, read_timeout=_READ_S, retries={"total_max_attempts": _TRIES})
    in_one_thread = TransferConfig(use_threads=False)  # serving goes on beside it
    try:
        client = boto3.Session().client("s3", config=settings)  # its own: credentials may have changed
        try:
            for name in (CONFIG, WEIGHTS):
                client.download_file(bucket, f"{key}/{name}", str(directory / name), Config=in_one_thread)
        finally:
            client.close()
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        why = f"it has no {name}" if code in _MISSING else f"S3 refuses {name} ({code})"
        raise CheckpointError(f"{path}: {why}: check the path and the server's credentials.") from None
    except (BotoCoreError, Boto3Error, ValueError) as error:
        raise CheckpointError(f"{path} could not be fetched ({first_line(error)}): try again.") from None
