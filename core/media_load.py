"""From what a prompt names to decoded images and videos: PIL images, arrays, bytes, data URLs, files, addresses.

Everything is checked before it is decoded: sizes in bytes, and sizes in pixels as the file's head tells them. What cannot be read is a
RequestError of that request, whatever the decoder raised.
"""

from __future__ import annotations

import base64
import binascii
import io
import urllib.parse
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from modelrunner.errors import RequestError, SettingsError, kind_of
from modelrunner.media import IMAGE, Video
from modelrunner.sampling_params import shown

if TYPE_CHECKING:
    from PIL import Image as PillowImage

    from modelrunner.settings import MediaSettings

NEEDS_PILLOW = "images need Pillow, which is not installed; pip install 'modelrunner[multimodal]'"
NEEDS_PYAV = "video files need PyAV, which is not installed; pip install 'modelrunner[multimodal]'"
FRAME_OPTIONS = ("fps", "timestamps")
ACCEPTED = {
    IMAGE: "a PIL image, a uint8 array [height, width, 3], the bytes of an image file, a URL, or a path (text or pathlib.Path)",
    "video": "a uint8 array [frames, height, width, 3], a list of PIL images, (one of these, {'fps': 2}), a file's bytes, a URL or a path",
}
VIDEO_PIXELS = 16  # a video may have so many times the pixels of an image
# What is read, by Pillow's and FFmpeg's names. Not the formats that call other programs (EPS), or name other files to be read (playlists).
IMAGES = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
VIDEOS = "avi,flv,gif,matroska,mov,mp4,mpeg,mpegts,ogg,webm"


class Loader:
    """Loads media within the limits of the settings. Thread-safe."""

    def __init__(self, settings: MediaSettings) -> None:
        """Raises SettingsError for a `media.folder` that is none."""
        if settings.folder is not None and not Path(settings.folder).expanduser().is_dir():
            raise SettingsError(f"media.folder is {settings.folder!r}, and there is no such folder; accepted: a folder, or none")
        self._settings = settings

    def image(self, value: object, where: str) -> PillowImage.Image:
        """An RGB image. where: names it in errors, e.g. `multi_modal_data: image 2`."""
        try:
            from PIL import Image
        except ImportError:
            raise RequestError(f"{where}: {NEEDS_PILLOW}") from None
        if isinstance(value, str | PurePath):
            value = self._fetch(value, where)
        if isinstance(value, bytes | bytearray | memoryview):
            return self._decoded(bytes(value), where)
        if isinstance(value, Image.Image):
            self._check_pixels(value.width * value.height, 1, where)
            return as_rgb(value, where)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            frame = pixels(value, 3, where, IMAGE)
            self._check_pixels(frame.shape[0] * frame.shape[1], 1, where)
            return Image.fromarray(frame)
        raise RequestError(f"{where}: got {kind_of(value)}; accepted: {ACCEPTED[IMAGE]}")

    def video(self, value: object, where: str) -> Video:
        """The frames of a video; of a file, those that the settings choose."""
        options: Mapping[str, Any] = {}
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
            value, options = value
            if unknown := [key for key in options if key not in FRAME_OPTIONS]:
                raise RequestError(f"{where}: unknown {shown(unknown[0])} beside its frames; accepted: {', '.join(FRAME_OPTIONS)}")
        fps = frame_rate(options.get("fps", self._settings.video_fps), where)
        if isinstance(value, str | PurePath):
            value = self._fetch(value, where)
        if isinstance(value, bytes | bytearray | memoryview):
            self._check_bytes(len(value), where)
            if options:
                raise RequestError(
                    f"{where}: {', '.join(options)} beside a file; accepted: frames with it, as which frames of a file are taken is for "
                    "media.video_fps to say"
                )
            return self._frames_of_file(bytes(value), where)
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            images = [np.asarray(self.image(each, f"{where}, frame {i}")) for i, each in enumerate(value)]
            if len({each.shape for each in images}) > 1:
                raise RequestError(f"{where}: its frames have different sizes; accepted: frames of one size")
            value = np.stack(images)
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise RequestError(f"{where}: got {kind_of(value)}; accepted: {ACCEPTED['video']}")
        frames = pixels(value, 4, where, "video")
        self._check_frames(len(frames), where)
        self._check_pixels(frames.size // 3, VIDEO_PIXELS, where)
        return Video(frames, fps, timestamps(options.get("timestamps"), len(frames), fps, where))

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def _decoded(self, data: bytes, where: str) -> PillowImage.Image:
        from PIL import Image, ImageOps, UnidentifiedImageError

        self._check_bytes(len(data), where)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of large images: the limit is our own, and told below
                Image.init()
                with Image.open(io.BytesIO(data), formats=[name for name in IMAGES if name in Image.OPEN]) as image:
                    self._check_pixels(image.width * image.height, 1, where)
                    image.load()
                    return as_rgb(ImageOps.exif_transpose(image), where)
        except RequestError:
            raise
        except UnidentifiedImageError:
            raise RequestError(
                f"{where}: the image cannot be decoded: {len(data)} bytes of no known format; accepted: {', '.join(IMAGES)}"
            ) from None
        except Exception as error:  # decoders of formats raise what they like
            raise RequestError(f"{where}: the image cannot be decoded ({type(error).__name__}: {error})") from error

    def _frames_of_file(self, data: bytes, where: str) -> Video:
        try:
            import av
        except ImportError:
            raise RequestError(f"{where}: {NEEDS_PYAV}") from None
        try:
            with av.open(io.BytesIO(data), "r", options={"format_whitelist": VIDEOS, "protocol_whitelist": "none"}) as container:
                if not container.streams.video:
                    raise RequestError(f"{where}: the file has no video stream")
                stream = container.streams.video[0]
                self._check_pixels(stream.width * stream.height, VIDEO_PIXELS, where)
                return self._chosen(container.decode(stream), float(stream.average_rate or 0), stream.width * stream.height, where)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"{where}: the video cannot be decoded ({type(error).__name__}: {error})") from error

    def _chosen(self, decoded: Any, rate: float, size: int, where: str) -> Video:
        """Frames `video_fps` a second, thinned out by half whenever there are more than `max_frames`."""
        interval = 1.0 / self._settings.video_fps
        kept: list[tuple[float, Any]] = []
        for number, frame in enumerate(decoded):
            time = float(frame.time) if frame.time is not None else number / (rate or self._settings.video_fps)
            if kept and time - kept[-1][0] < interval - 1e-3:
                continue
            kept.append((time, frame.to_ndarray(format="rgb24")))
            if len(kept) > self._settings.max_frames:
                kept, interval = kept[::2], interval * 2
            self._check_pixels(size * len(kept), VIDEO_PIXELS, where)
        if not kept:
            raise RequestError(f"{where}: the video has no frames")
        return Video(np.stack([frame for _, frame in kept]), 1.0 / interval, tuple(time for time, _ in kept))

    def _fetch(self, url: str | PurePath, where: str) -> bytes:
        """The bytes that a URL or a path stands for, if the settings allow it."""
        if isinstance(url, PurePath):
            return self._of_file(str(url), where)
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "data":
            return self._of_data_url(url, where)
        if parts.scheme in ("http", "https"):
            if not self._settings.remote:
                raise RequestError(f"{where}: got the address {shown(url)}; addresses are fetched only with the setting media.remote=true")
            return self._download(url, where)
        if parts.scheme in ("", "file") and not parts.netloc:
            return self._of_file(urllib.parse.unquote(parts.path) if parts.scheme else url, where)
        raise RequestError(f"{where}: got the URL {shown(url)}; accepted: data:, file: and, with media.remote, http: and https: URLs")

    def _of_data_url(self, url: str, where: str) -> bytes:
        head, comma, body = url.partition(",")
        self._check_bytes(len(body) * 3 // 4, where)
        if not comma or not head.endswith(";base64"):
            raise RequestError(f"{where}: got {shown(head)}; accepted: a data URL in base64, `data:<type>;base64,<data>`")
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{where}: the data URL is not base64 ({error})") from None

    def _of_file(self, name: str, where: str) -> bytes:
        if self._settings.folder is None:
            raise RequestError(
                f"{where}: got the file {shown(name)}; files are read only under the folder that media.folder names: set it, or give the "
                "file's bytes, which a program that trusts the path may read itself"
            )
        folder = Path(self._settings.folder).expanduser().resolve()
        path = (folder / name).resolve()  # follows links: what they lead to must lie in the folder too
        if not path.is_relative_to(folder):
            raise RequestError(f"{where}: the file {shown(name)} is not under the folder of media.folder")
        try:
            with path.open("rb") as file:
                data = file.read(self._settings.max_bytes + 1)
        except OSError as error:
            raise RequestError(f"{where}: the file {shown(name)} cannot be read ({error.strerror})") from None
        self._check_bytes(len(data), where)
        return data

    def _download(self, url: str, where: str) -> bytes:
        try:
            with urllib.request.urlopen(url, timeout=self._settings.fetch_timeout) as answer:
                data: bytes = answer.read(self._settings.max_bytes + 1)
        except Exception as error:  # of sockets, of HTTP, of names
            raise RequestError(f"{where}: {shown(url)} cannot be fetched ({type(error).__name__}: {error})") from None
        self._check_bytes(len(data), where)
        return data

    # ---- limits ------------------------------------------------------------------------------------------------------

    def _check_bytes(self, size: int, where: str) -> None:
        if size > self._settings.max_bytes:
            raise RequestError(f"{where}: more than {self._settings.max_bytes} bytes, the limit (setting media.max_bytes)")

    def _check_pixels(self, count: int, times: int, where: str) -> None:
        limit = self._settings.max_pixels * times
        if not 0 < count <= limit:
            raise RequestError(f"{where}: {count} pixels; accepted: 1 to {limit} (setting media.max_pixels)")

    def _check_frames(self, count: int, where: str) -> None:
        if not 0 < count <= self._settings.max_frames:
            raise RequestError(f"{where}: {count} frames; accepted: 1 to {self._settings.max_frames} (setting media.max_frames)")


def as_rgb(image: PillowImage.Image, where: str) -> PillowImage.Image:
    """The image in RGB; what is transparent is on white. Of 16-bit greys the upper 8 bits are taken."""
    from PIL import Image

    try:
        if image.mode == "RGB":
            image.load()
            return image
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, image).convert("RGB")
        if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would cut off above 255, and show white
            image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
        return image.convert("RGB")
    except Exception as error:
        raise RequestError(f"{where}: the image cannot be read ({type(error).__name__}: {error})") from error


def pixels(value: Any, dimensions: int, where: str, kind: str) -> Any:
    """`value` as a uint8 array whose last dimension is RGB."""
    array = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    if array.ndim != dimensions or array.shape[-1] != 3 or array.dtype != np.uint8:
        raise RequestError(f"{where}: got an array {list(array.shape)} of {array.dtype}; accepted: {ACCEPTED[kind]}")
    return np.ascontiguousarray(array)


def frame_rate(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e4:
        raise RequestError(f"{where}: fps is {shown(value)}; accepted: a number of frames a second, more than 0")
    return float(value)


def timestamps(given: object, count: int, fps: float, where: str) -> tuple[float, ...]:
    """Seconds of each frame."""
    if given is None:
        return tuple(number / fps for number in range(count))
    try:
        found = tuple(float(item) for item in given)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = ()
    if len(found) != count or not all(0 <= item < 1e7 for item in found) or list(found) != sorted(found):
        raise RequestError(f"{where}: timestamps is {shown(given)}; accepted: {count} numbers of seconds, one for each frame, in order")
    return found
