"""Media at the door: what is accepted, what is refused and why, and that only the request in question suffers."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mm_world import GREEDY, assert_expected, engine, made
from PIL import Image
from tiny_mm import PLACEHOLDER, greedy, image, mm

from modelrunner import LLM
from modelrunner.errors import PluginError, RequestError, SettingsError
from modelrunner.media_load import as_rgb
from modelrunner.testing import P, dense
from tests.model_states.idefics3.worlds import write

ONE = made((5, (4, 6), 7))


def png(picture: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def huge_png(side: int) -> bytes:
    """A head that promises side x side pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def prompt(value: Any, **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": ONE.short, "multi_modal_data": {"image": value}, **more}


def forms() -> list[tuple[str, Any]]:
    picture = ONE.pictures[0]
    data = png(picture)
    return [
        ("PIL", picture),
        ("a list", [picture]),
        ("an array", np.asarray(picture)),
        ("bytes", data),
        ("a data URL", "data:image/png;base64," + base64.b64encode(data).decode()),
    ]


@pytest.mark.parametrize("form", [name for name, _ in forms()])
def test_forms_of_an_image(form: str) -> None:
    driver = engine()
    driver.add("a", prompt(dict(forms())[form]), GREEDY)
    driver.finish()
    assert_expected(ONE, driver.result("a"))


def test_files_only_under_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a b.png").write_bytes(png(ONE.pictures[0]))
    (tmp_path / "secret.png").write_bytes(png(ONE.pictures[0]))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    driver = engine(media={"folder": str(folder)})
    good = ("a b.png", f"file://{folder}/a%20b.png", str(folder / "a b.png"), Path("a b.png"), folder / "a b.png")
    for number, name in enumerate(good):
        driver.add(str(number), prompt(name), GREEDY)
        driver.finish()
        assert_expected(ONE, driver.result(str(number)))
    for name in ("../secret.png", "link.png", f"file://{tmp_path}/secret.png", "/etc/passwd", Path("/etc/passwd"), Path("../secret.png")):
        with pytest.raises(RequestError, match="not under the folder"):
            driver.add("x", prompt(name), GREEDY)
    with pytest.raises(RequestError, match="cannot be read"):
        driver.add("x", prompt("none.png"), GREEDY)
    with pytest.raises(RequestError, match=r"only under the folder that media\.folder names: set it, or give the file's bytes"):
        engine().add("x", prompt(folder / "a b.png"), GREEDY)
    with pytest.raises(SettingsError, match=r"media\.folder is '.*none', and there is no such folder"):
        engine(media={"folder": str(tmp_path / "none")})
    with pytest.raises(RequestError, match=r"media\.remote=true"):
        driver.add("x", prompt("http://localhost:1/a.png"), GREEDY)


BAD: list[tuple[str, Any, str]] = [
    ("corrupt", b"\x89PNG\r\n\x1a\nnothing of the kind", "cannot be decoded"),
    ("truncated", png(image(20, 20))[:-200], "cannot be decoded"),
    ("no image", b"hello", "cannot be decoded: 5 bytes of no known format; accepted: AVIF, BMP,.*WEBP"),
    ("a program", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "cannot be decoded"),
    ("empty", b"", "cannot be decoded"),
    ("a bomb", huge_png(60000), r"3600000000 pixels"),
    ("a smaller bomb", huge_png(9000), r"81000000 pixels; accepted: 1 to 33554432 \(setting media\.max_pixels\)"),
    ("a head without a body", huge_png(5000), "cannot be decoded"),
    ("too many bytes", bytes(3000), r"more than 2000 bytes.*media\.max_bytes"),
    ("too many bytes in a URL", "data:image/png;base64," + "A" * 4000, r"more than 2000 bytes"),
    ("no base64", "data:image/png;base64,%%%%", "not base64"),
    ("a data URL of text", "data:image/svg+xml,<svg/>", "base64"),
    ("another scheme", "ftp://example.org/a.png", "accepted: data:"),
    ("a number", 5, "got an int; accepted: a PIL image"),
    ("none", None, "got a NoneType"),
    ("gray", np.zeros((8, 8), np.uint8), r"array \[8, 8\] of uint8"),
    ("floats", np.zeros((8, 8, 3), np.float32), "of float32"),
    ("nothing", np.zeros((0, 8, 3), np.uint8), "0 pixels"),
    ("too small for a patch", np.zeros((2, 2, 3), np.uint8), "too small"),
    ("too large for the model", np.zeros((200, 4, 3), np.uint8), "50 x 1 patches; accepted: at most 40"),
    ("two", [ONE.pictures[0]] * 2, "1 places.*and 2 are given"),
    ("none of them", [], "it holds no item"),
    ("five", [ONE.pictures[0]] * 5, r"got 5 items of kind 'image'; accepted: at most 4 \(setting media\.max_images\)"),
]


def test_bad_images_fail_their_request_alone() -> None:
    """While another request runs, which never notices."""
    driver = engine(media={"max_images": 4, "max_bytes": 2000})
    driver.add("stays", made((5, (4, 6), 7), 1).prompt(), GREEDY)
    for name, value, match in BAD:
        if name == "truncated":
            value = png(image(4, 6))[:-60]
        with pytest.raises(RequestError, match=match):
            driver.add(name, prompt(value), GREEDY)
        if driver.engine.has_unfinished():
            driver.step()
    driver.finish()
    assert_expected(made((5, (4, 6), 7), 1), driver.result("stays"))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"multi_modal_data": {"sound": [1]}}, "got kind 'sound'; this model takes image, video"),
        ({"multi_modal_data": [1]}, "accepted: a mapping"),
        ({"multi_modal_data": {}}, "accepted: a mapping"),
        ({"mm_processor_kwargs": {"a": 1}}, "goes with multi_modal_data"),
        ({"multi_modal_data": {"image": ONE.pictures[0]}, "mm_processor_kwargs": {"size": 1}}, "unknown option 'size'"),
        ({"multi_modal_data": {"image": ONE.pictures[0]}, "mm_processor_kwargs": 3}, "accepted: a mapping"),
        ({"multi_modal_datum": {}}, "unknown key 'multi_modal_datum'"),
        ({"multi_modal_data": {"image": ONE.pictures[0]}, "multi_modal_uuids": {"image": ["a", "b"]}}, "2 names for 1 items"),
        ({"multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": ["m1"]}}, "'m1' comes without its image"),
    ],
)
def test_bad_prompts(given: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        engine().add("a", {"prompt_token_ids": ONE.short, **given}, GREEDY)


def test_expanded_prompts_are_taken_as_they_are() -> None:
    driver = engine()
    driver.add("a", {"prompt_token_ids": ONE.full, "multi_modal_data": {"image": ONE.pictures}}, GREEDY)
    driver.finish()
    assert_expected(ONE, driver.result("a"))
    with pytest.raises(RequestError, match="the prompt has 23 places"):
        driver.add("b", {"prompt_token_ids": [*P(5, 0), *[PLACEHOLDER] * 23], "multi_modal_data": {"image": ONE.pictures}}, GREEDY)


def test_the_same_image_is_encoded_once() -> None:
    """Whatever it is called, and in whichever form it comes; with other options it is another one."""
    driver = engine(prefix=False)
    for name, value in forms():
        driver.add(name, prompt(value, multi_modal_uuids={"image": [name]}), GREEDY)
    driver.finish()
    assert driver.engine.media.num_encoded == 1
    driver.add("other", prompt(ONE.pictures[0], mm_processor_kwargs={"separated": True}), GREEDY)
    driver.finish()
    assert driver.engine.media.num_encoded == 2


def test_a_video_is_frames_in_any_form() -> None:
    driver = engine()
    frames = np.stack([np.asarray(image(2, 3, seed)) for seed in range(3)])
    ids, results = [*P(5, 1), PLACEHOLDER - 2, *P(4, 2)], []
    for name, value in (
        ("array", frames),
        ("list", [Image.fromarray(frame) for frame in frames]),
        ("with fps", (frames, {"fps": 2.0})),
        ("with times", (frames, {"fps": 2.0, "timestamps": [0, 0.5, 1]})),
    ):
        driver.add(name, {"prompt_token_ids": ids, "multi_modal_data": {"video": value}}, GREEDY)
        driver.finish()
        results.append(list(driver.result(name).token_ids))
        assert len(driver.final(name).prompt_token_ids) == 5 + 18 + 4
    assert results == results[:1] * 4
    assert driver.engine.media.num_encoded == 1
    for value, match in (
        ((frames, {"fps": 0}), "fps is 0"),
        ((frames, {"timestamps": [1]}), "accepted: 3 numbers"),
        ((frames, {"timestamps": [2, 1, 3]}), "one for each frame, in order"),
        ((frames, {"fps": 1, "frame_rate": 2}), "unknown 'frame_rate' beside its frames; accepted: fps, timestamps"),
        ((b"a file", {"fps": 1}), "fps beside a file; accepted: frames with it"),
        (b"no video", "cannot be decoded"),
        (np.zeros((300, 4, 4, 3), np.uint8), r"300 frames.*media\.max_frames"),
    ):
        with pytest.raises(RequestError, match=match):
            driver.add("x", {"prompt_token_ids": ids, "multi_modal_data": {"video": value}}, GREEDY)


def test_a_video_file(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for number in range(40):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), number * 6, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    film = tmp_path / "film.mp4"
    film.write_bytes(out.getvalue())
    front = engine(media={"max_frames": 6}).engine.assembly.media.front
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\n{film}\n#EXT-X-ENDLIST\n"
    for data in (playlist.encode(), f"ffconcat version 1.0\nfile {film}\n".encode()):
        with pytest.raises(RequestError, match="cannot be decoded"):
            front._loader.video(data, "a list of files")
    video = front._loader.video(out.getvalue(), "here")
    assert video.frames.shape[1:] == (32, 32, 3)
    assert 3 <= len(video.frames) == len(video.timestamps) <= 6
    assert np.diff(video.timestamps).min() >= 0.5 - 1e-3


# ---- the calls of users --------------------------------------------------------------------------------------------------


def llm(**more: Any) -> LLM:
    subject = mm()
    return LLM(subject.model, plugins=subject.plugins, **more)


def test_generate_with_images_and_without() -> None:
    """Results in the order of the prompts; a bad one is named before anything runs."""
    many = [made((5 + i, (3, 4), 6), i) for i in range(5)]
    prompts: list[Any] = [one.prompt() for one in many]
    prompts.insert(2, P(20, 1))
    with llm() as model:
        outputs = model.generate(prompts, GREEDY, use_tqdm=False)
        del outputs[2]
        for one, output in zip(many, outputs, strict=True):
            assert_expected(one, output.outputs[0])
        with pytest.raises(RequestError, match=r"prompts\[3\]: multi_modal_data: image 0: the image cannot be decoded"):
            model.generate([*prompts[:3], prompt(b"x")], GREEDY, use_tqdm=False)
        assert not model.engine.has_unfinished()


def test_chat_with_images() -> None:
    picture = image(4, 6, 3)
    url = "data:image/png;base64," + base64.b64encode(png(picture)).decode()
    parts = [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    with llm() as model:
        tokenizer: Any = model.tokenizer
        tokenizer.apply_chat_template = lambda conversation, _: chat_ids(conversation)
        (first,) = model.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
        parts[1] = {"type": "image", "image": picture}
        (second,) = model.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]: got a part of type 'input_audio'; accepted: parts of type"):
            model.chat([{"role": "user", "content": [parts[1], {"type": "input_audio"}]}], GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match=r"needs 'image_url': a URL.*of type 'image' it may be a path"):
            model.chat([{"role": "user", "content": [{"type": "image_url", "image_url": Path("a.png")}]}], GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match=r"only under the folder that media\.folder names"):
            model.chat([{"role": "user", "content": [{"type": "image", "image": Path("a.png")}]}], GREEDY, use_tqdm=False)
    ids = list(first.prompt_token_ids)
    assert ids.count(PLACEHOLDER) == 24
    want, gaps = greedy(ids, [picture])
    near = next((i for i, gap in enumerate(gaps) if gap < 1e-4), len(want))
    assert list(first.outputs[0].token_ids)[:near] == want[:near]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def chat_ids(conversation: Any) -> list[int]:
    """A template of one line: each byte is an id, `<image>` is the placeholder."""
    text = "".join(message["content"] for message in conversation)
    pieces = [[3 + byte for byte in piece.encode()] for piece in text.split("<image>")]
    return [1, *pieces[0], *(token for piece in pieces[1:] for token in (PLACEHOLDER, *piece))]


def test_a_model_of_text_says_what_it_takes() -> None:
    subject = dense()
    with LLM(subject.model, plugins=subject.plugins) as model:
        with pytest.raises(RequestError, match="the model takes text only: its ModelState, DenseState, declares no media"):
            model.generate(prompt(ONE.pictures[0]), GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="takes text only"):
            model.chat([{"role": "user", "content": [{"type": "image", "image": ONE.pictures[0]}]}], GREEDY, use_tqdm=False)


def test_a_state_may_refuse_media_and_still_serve_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_mm import TinyState

    from modelrunner.model_state import No

    supports = TinyState.supports
    monkeypatch.setattr(TinyState, "supports", lambda self, feature: No("no tower") if feature == "multimodal" else supports(self, feature))
    driver = engine()
    with pytest.raises(RequestError, match="takes no media: no tower"):
        driver.add("a", ONE.prompt(), GREEDY)
    driver.add("b", P(20, 1), GREEDY)
    driver.finish()
    assert list(driver.result("b").token_ids) == greedy(P(20, 1))[0]


def test_sixteen_bit_greys_keep_their_shades() -> None:
    """Pillow's own conversion cuts off above 255, so that almost every shade is white."""
    shades = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    opened = Image.open(io.BytesIO(png(Image.fromarray(shades))))
    for picture in (opened, opened.convert("I")):
        assert np.array_equal(np.asarray(as_rgb(picture, "image 0"))[..., 1], shades >> 8)


def test_an_arena_smaller_than_the_smallest_item_is_refused(tmp_path: Path) -> None:
    """In few words: not with the tensors of the item that would not fit."""
    write("smolvlm", tmp_path, 0)
    with pytest.raises(PluginError, match=r"gave an item of \d+ embeddings.*raise media\.arena_tokens") as error:
        LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=256, media={"arena_tokens": 1})
    assert len(str(error.value)) < 300
