"""The real models, each loaded once, with no network while they load."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from blocks.catalogue import Catalogue, load_catalogue
from deployments.node.drivers.base import Driver
from deployments.node.drivers.faster_whisper import FasterWhisperDriver
from deployments.node.drivers.hibari import HibariDriver
from deployments.node.drivers.realesrgan import RealESRGANDriver
from deployments.node.drivers.rembg import RembgDriver
from deployments.node.drivers.sentence_transformers import SentenceTransformersDriver
from deployments.node.drivers.transformers import TransformersDriver

D = TypeVar("D", bound=Driver)


@pytest.fixture(scope="session")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    return load_catalogue(tmp_path_factory.mktemp("home"))


@contextlib.contextmanager
def offline(home: Path) -> Iterator[None]:
    """Within it, `home` is the home folder, and a connection to anywhere is an error."""

    def refuse(_: socket.socket, address: Any) -> None:
        raise AssertionError(f"a connection to {address} while loading a model from a package")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMI_HOME", str(home))
        patch.setattr(socket.socket, "connect", refuse)
        yield


Load = Callable[[type[D], str], D]


@pytest.fixture(scope="session")
def loaded(catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[D], str], D]:
    """Loads the model of a name, with a driver and a home of its own."""

    def load(kind: type[D], name: str) -> D:
        driver = kind(catalogue.get(name))
        with offline(tmp_path_factory.mktemp("home")):
            driver.load()
        return driver

    return load


@pytest.fixture(scope="session")
def smollm(catalogue: Catalogue, pytestconfig: pytest.Config) -> TransformersDriver:
    """The chat model; what it converts is kept from one run of the tests to the next."""
    driver = TransformersDriver(catalogue.get("smollm2-135m"))
    with offline(pytestconfig.cache.mkdir("smi-home")):  # type: ignore[union-attr]
        driver.load()
    return driver


@pytest.fixture(scope="session")
def whisper(loaded: Load[FasterWhisperDriver]) -> FasterWhisperDriver:
    return loaded(FasterWhisperDriver, "whisper-tiny.en")


@pytest.fixture(scope="session")
def minilm(loaded: Load[SentenceTransformersDriver]) -> Iterator[SentenceTransformersDriver]:
    driver = loaded(SentenceTransformersDriver, "all-minilm-l6-v2")
    yield driver
    driver.unload()


@pytest.fixture(scope="session")
def hibari(loaded: Load[HibariDriver]) -> HibariDriver:
    return loaded(HibariDriver, "tts-1")


@pytest.fixture(scope="session")
def u2netp(loaded: Load[RembgDriver]) -> RembgDriver:
    return loaded(RembgDriver, "u2netp")


@pytest.fixture(scope="session")
def realesrgan(loaded: Load[RealESRGANDriver]) -> RealESRGANDriver:
    return loaded(RealESRGANDriver, "realesr-animevideov3")
