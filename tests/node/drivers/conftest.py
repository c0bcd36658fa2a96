"""The real models, each loaded once, with no network while they load."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blocks.catalogue import Catalogue, load_catalogue
from deployments.node.drivers.faster_whisper import FasterWhisperDriver
from deployments.node.drivers.hibari import HibariDriver
from deployments.node.drivers.realesrgan import RealESRGANDriver
from deployments.node.drivers.rembg import RembgDriver
from deployments.node.drivers.sentence_transformers import SentenceTransformersDriver
from deployments.node.drivers.transformers import TransformersDriver


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


@pytest.fixture(scope="session")
def smollm(catalogue: Catalogue, pytestconfig: pytest.Config) -> TransformersDriver:
    """The chat model; what it converts is kept from one run of the tests to the next."""
    driver = TransformersDriver(catalogue.get("smollm2-135m"))
    with offline(pytestconfig.cache.mkdir("smi-home")):  # type: ignore[union-attr]
        driver.load()
    return driver


@pytest.fixture(scope="session")
def whisper(catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> FasterWhisperDriver:
    driver = FasterWhisperDriver(catalogue.get("whisper-tiny.en"))
    with offline(tmp_path_factory.mktemp("home")):
        driver.load()
    return driver


@pytest.fixture(scope="session")
def minilm(
    catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SentenceTransformersDriver]:
    driver = SentenceTransformersDriver(catalogue.get("all-minilm-l6-v2"))
    with offline(tmp_path_factory.mktemp("home")):
        driver.load()
    yield driver
    driver.unload()


@pytest.fixture(scope="session")
def hibari(catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> HibariDriver:
    driver = HibariDriver(catalogue.get("tts-1"))
    with offline(tmp_path_factory.mktemp("home")):
        driver.load()
    return driver


@pytest.fixture(scope="session")
def u2netp(catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> RembgDriver:
    driver = RembgDriver(catalogue.get("u2netp"))
    with offline(tmp_path_factory.mktemp("home")):
        driver.load()
    return driver


@pytest.fixture(scope="session")
def realesrgan(catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> RealESRGANDriver:
    driver = RealESRGANDriver(catalogue.get("realesr-animevideov3"))
    with offline(tmp_path_factory.mktemp("home")):
        driver.load()
    return driver
