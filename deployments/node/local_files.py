"""Which files a run without a key may name: whoever reaches Prefect could have any file read otherwise."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from blocks.errors import InvalidRequest, PermissionDenied
from blocks.validation import path
from flows.kinds import media_in

INBOX = "inbox/"  # in storage; nothing of ours is kept there


def refuse_files(request: BaseModel, folder: Path | None) -> None:
    """Refuse files but those below `folder`, by `path`, and below `inbox/` of the storage, by `reference`.

    Raises:
        PermissionDenied: saying what allows it.
        InvalidRequest: a file is asked for, and none is named.
    """
    for location, media in media_in(request):
        param = path(location)
        if media.reference is not None:
            if not media.reference.startswith(INBOX):
                raise PermissionDenied(
                    f"{param!r} is refused: a run without a key may refer to files below {INBOX!r} of the "
                    "storage only",
                    param=param,
                )
        elif media.path is None:
            raise InvalidRequest(f"{param!r} names no file: give `path`", param=param)
        elif folder is None or not Path(media.path).resolve().is_relative_to(folder.resolve()):
            cure = f"those below {folder}" if folder else "none, as setting SMI_LOCAL_FILES names no folder"
            raise PermissionDenied(
                f"{param!r} is refused: local files that a run without a key may read are {cure}",
                param=param,
            )
