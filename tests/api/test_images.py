"""/v1/images/cutouts and /v1/images/upscales, with the real models."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

PICTURES = Path(__file__).parent.parent / "data" / "pictures"
HORSE = (PICTURES / "horse.png").read_bytes()
PHOTO = (PICTURES / "astronaut.jpg").read_bytes()
CUTOUTS, UPSCALES = "/v1/images/cutouts", "/v1/images/upscales"


def small(width: int = 40, height: int = 30, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    with Image.open(io.BytesIO(PHOTO)) as photo:
        photo.resize((width, height)).convert(mode).save(out, "png")
    return out.getvalue()


async def post(
    http: httpx.AsyncClient, path: str, image: Any = HORSE, field: str = "image", **fields: Any
) -> httpx.Response:
    return await http.post(path, files={field: ("a.png", image)}, data=fields)


def opened(answer: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))


async def test_a_cutout(http: httpx.AsyncClient) -> None:
    response = await post(http, CUTOUTS)
    assert response.status_code == 200, response.text
    answer = response.json()
    made = opened(answer)
    assert (made.mode, made.size, made.format) == ("RGBA", (400, 328), "PNG")
    assert made.getpixel((200, 120))[3] > 250  # type: ignore[index]
    assert made.getpixel((5, 5))[3] < 5  # type: ignore[index]
    assert (answer["output_format"], answer["size"]) == ("png", "400x328")
    assert answer["smi"]["model"] == response.headers["x-smi-model"] == "u2netp"
    assert answer["created"] > 1_700_000_000


async def test_the_mask_as_bytes(http: httpx.AsyncClient) -> None:
    response = await post(
        http, CUTOUTS, model="u2netp", mask="true", output_format="webp", response_format="binary"
    )
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "image/webp"
    made = Image.open(io.BytesIO(response.content))
    assert (made.format, made.size) == ("WEBP", (400, 328))
    assert made.convert("L").getpixel((200, 120)) > 250  # type: ignore[operator]


@pytest.mark.parametrize(("scale", "size"), [("2", (80, 60)), (None, (160, 120))])
async def test_an_upscale_keeps_transparency(
    http: httpx.AsyncClient, scale: str | None, size: tuple[int, int]
) -> None:
    fields = {"scale": scale} if scale else {}
    response = await post(http, UPSCALES, small(mode="RGBA"), model="realesrgan-x4", **fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    made = opened(answer)
    assert (made.mode, made.size) == ("RGBA", size)
    assert answer["size"] == f"{size[0]}x{size[1]}"
    assert answer["smi"]["model"] == "realesr-animevideov3"


async def test_the_field_as_openais_clients_name_it(http: httpx.AsyncClient) -> None:
    response = await post(http, UPSCALES, small(4, 4), field="image[]", n="1", size="auto", user="u")
    assert response.status_code == 200, response.text
    assert opened(response.json()).size == (16, 16)
    bad = await post(http, UPSCALES, b"text", field="image[]")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "image[]")


@pytest.mark.parametrize("path", [CUTOUTS, UPSCALES])
@pytest.mark.parametrize(
    "image", [b"", b"text" * 99, HORSE[:400], b"<svg xmlns='http://www.w3.org/2000/svg'/>"]
)
async def test_what_is_no_picture(http: httpx.AsyncClient, path: str, image: bytes) -> None:
    response = await post(http, path, image)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_media", "image")


async def test_too_many_pixels(http: httpx.AsyncClient) -> None:
    response = await post(http, UPSCALES, small(1100, 1000, "L"))
    assert response.status_code == 413, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("payload_too_large", "image")
    assert "1100 x 1000 pixels" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        (UPSCALES, {"scale": "3"}, "scale", "invalid_value"),
        (UPSCALES, {"scale": "four"}, "scale", "invalid_value"),
        (UPSCALES, {"output_format": "gif"}, "output_format", "invalid_value"),
        (UPSCALES, {"mask": "true"}, "mask", "unsupported_parameter"),
        (UPSCALES, {"n": "2"}, "n", "unsupported_parameter"),
        (UPSCALES, {"prompt": "a cat"}, "prompt", "unsupported_parameter"),
        (UPSCALES, {"response_format": "url"}, "response_format", "invalid_value"),
        (CUTOUTS, {"output_format": "jpeg"}, "output_format", "invalid_value"),
        (CUTOUTS, {"mask": "perhaps"}, "mask", "invalid_value"),
        (CUTOUTS, {"scale": "2"}, "scale", "unknown_parameter"),
        (CUTOUTS, {"maks": "true"}, "maks", "unknown_parameter"),
        (CUTOUTS, {"file": "x"}, "file", "unknown_parameter"),
    ],
)
async def test_bad_fields_are_named(
    http: httpx.AsyncClient, path: str, fields: dict[str, str], param: str, code: str
) -> None:
    response = await post(http, path, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert repr(param) in error["message"]


async def test_no_picture_and_two(http: httpx.AsyncClient) -> None:
    response = await http.post(CUTOUTS, files={"model": (None, "u2netp")})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "image")
    response = await http.post(CUTOUTS, files=[("image[]", ("a", HORSE)), ("image[]", ("b", HORSE))])
    assert response.status_code == 400
    assert "files" in response.json()["error"]["message"]
    response = await http.post(CUTOUTS, files={"file": ("a", HORSE)})
    assert response.status_code == 400
    assert "'image'" in response.json()["error"]["message"]


async def test_a_model_of_another_kind(http: httpx.AsyncClient) -> None:
    response = await post(http, CUTOUTS, model="realesrgan-x4")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "u2netp" in error["message"]


async def test_who_leaves_ends_the_upscale(http: httpx.AsyncClient, node: Any) -> None:
    model = "realesr-animevideov3"
    assert (await post(http, UPSCALES, small(4, 4))).status_code == 200  # loaded
    tiles, cancelled = [await node.counter(model, name) for name in ("tiles", "cancelled")]
    task = asyncio.create_task(post(http, UPSCALES, small(1000, 1000)))
    await node.reaches(model, tiles=tiles + 2)  # that of the small one may not have been told yet
    task.cancel()
    await node.reaches(model, cancelled=cancelled + 1)


async def test_openapi_tells_the_forms(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    body = schema["paths"][UPSCALES]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert body["allOf"][1]["required"] == ["image"]
    assert schema["components"]["schemas"]["UpscaleForm"]["properties"]["scale"]["enum"] == [2, 4]
