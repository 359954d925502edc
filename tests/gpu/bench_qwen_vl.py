"""Images in a large model: throughput, what the encoder's arena saves, and what encoding costs those who decode.

    python3 -P tests/gpu/bench_qwen_vl.py            # Qwen2.5-VL-3B's configuration, dummy weights in bfloat16, on the GPU
    python3 -P tests/gpu/bench_qwen_vl.py --dry      # the same, tiny, on the CPU
    python3 -P tests/gpu/bench_qwen_vl.py --decoding   # the second part alone
    python3 -P tests/gpu/bench_qwen_vl.py --shares 0.4 0.6 1   # and for each of these values of media.encoder_share

1. 64 requests with one image of 1024 x 1024 pixels each, 128 tokens out: processing (threads of the host, before the engine) and the run
   are timed apart. Then the same requests again, with the images in the arena, and without (`reset_media_cache`).
2. 32 requests of text decode, alone; then beside requests with images that come one by one; then beside requests of as much text. The time
   between two tokens of the decoding rows, so that the second differs from the third by the encoder alone. `encoding_*` counts only steps
   that begin and end while something is encoded, in which no image's prompt is computed. `first_ms` is from an image's arrival to its
   token.

Everything after the warm-up runs with `torch.cuda.set_sync_debug_mode("error")`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelrunner.devices.cuda_side import SideStream
from modelrunner.encoding import Encoding
from modelrunner.engine import Engine
from modelrunner.media import EncoderInput
from modelrunner.prompts import prepare_prompt
from modelrunner.request import SamplingParams

PLACEHOLDER = 151655
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "image_token_id": PLACEHOLDER,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "eos_token_id": 151645,
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]}


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    sections = {"type": "mrope", "mrope_section": [4, 6, 6]}
    return {**config, **SMALL, "rope_scaling": sections, "vision_config": {**config["vision_config"], **SMALL_VISION}}


class Bench:
    """An engine on the configuration, and the sizes of the work."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.requests, self.side, self.out = (4, 112, 8) if dry else (64, 1024, 128)
        self.decoding, self.arriving, self.long = (3, 2, 40) if dry else (32, 24, 500)
        folder = Path(tempfile.mkdtemp(prefix="modelrunner-media-"))
        (folder / "config.json").write_text(json.dumps(tiny(CONFIG) if dry else CONFIG))
        tokens = 200 if dry else 1400
        settings = {
            "model": {"name": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4 * tokens},
            "device.name": "cpu" if dry else "cuda",
            "model.dtype": "float32" if dry else "bfloat16",
            "scheduler.max_rows": 64,
            "cache.prefix_caching": False,
            "media.arena_tokens": self.requests * tokens,
        } | ({"cache.num_pages": 2000} if dry else {})
        begun = time.monotonic()
        self.engine = Engine(settings)
        say("start", seconds=time.monotonic() - begun)
        assert isinstance(self.engine.media, Encoding)
        self.media: Encoding = self.engine.media
        self.number = 0

    def images(self, count: int, side: int | None = None) -> list[Any]:
        """Prepared prompts of one image each, of 32 tokens of text around it, and the seconds that preparing took."""
        side = side or self.side
        from PIL import Image

        generator = np.random.default_rng(self.number)
        pictures = [Image.fromarray(generator.integers(0, 256, (32, 32, 3), np.uint8)).resize((side, side)) for _ in range(count)]
        front, text = self.engine.assembly.media.front, list(range(100, 116))
        prompts = [{"prompt_token_ids": [*text, PLACEHOLDER, *text], "multi_modal_data": {"image": each}} for each in pictures]
        begun = time.monotonic()
        with ThreadPoolExecutor(self.engine.settings.media.threads) as threads:
            made = list(threads.map(lambda prompt: prepare_prompt(prompt, None, front), prompts))
        say("processing", images=count, seconds=time.monotonic() - begun, tokens=len(made[0].token_ids))
        return made

    def add(self, prompt: Any, out: int) -> str:
        self.number += 1
        name = f"r{self.number}"
        self.engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=out, ignore_eos=True))
        return name

    def run(self) -> None:
        while self.engine.has_unfinished():
            self.engine.step()

    def timed(self, what: str, prompts: list[Any]) -> None:
        """Run prompts, all submitted at once."""
        encoded, begun = self.media.num_encoded, time.monotonic()
        for prompt in prompts:
            self.add(prompt, self.out)
        self.run()
        seconds = time.monotonic() - begun
        say(what, seconds=seconds, tokens_per_second=len(prompts) * self.out / seconds, encoded=self.media.num_encoded - encoded)

    def one_by_one(self, side: int) -> None:
        """Nothing else runs: from an image's arrival to its token. The second of its size is captured where that is allowed."""
        took = []
        for prompt in self.images(8, side):
            begun = time.monotonic()
            self.add(prompt, 1)
            self.run()
            took.append(1e3 * (time.monotonic() - begun))
        say(f"{side} x {side} one by one", first_ms=took[0], second_ms=took[1], then_ms=float(np.median(took[2:])))

    def encoder_alone(self, prompts: list[Any]) -> None:
        """One encoding of these prompts' images: how long the host enqueues, and how long until the device has done."""
        device, state = self.engine.assembly.device, self.engine.assembly.state
        needs = self.engine.assembly.needs
        assert needs.media is not None
        items = [item for prompt in prompts for item in prompt.media.items]
        inputs = [
            EncoderInput(item.kind, item.num_embeddings, {name: t.to(device.torch_device) for name, t in item.tensors.items()}, item.info)
            for item in items
        ]
        lines = sum(item.num_embeddings for item in items)
        out = torch.empty(lines, needs.media.width(needs.hidden_size), dtype=self.engine.runner.parts.dtype, device=device.torch_device)
        host, done = [], []
        for _ in range(2 if self.dry else 8):
            device.synchronize()
            begun = time.monotonic()
            with torch.inference_mode():
                state.encode(inputs, out)
            host.append(time.monotonic() - begun)
            device.synchronize()
            done.append(time.monotonic() - begun)
        say(f"{len(items)} images by themselves", host_ms=1e3 * min(host), done_ms=1e3 * min(done), lines=lines)

    def between_tokens(self, what: str, arrivals: list[Any]) -> None:
        """Times between steps that gave the decoding rows a token, while `arrivals` come, each when the one before it has its token."""
        text = list(range(200, 264))
        decoding = {self.add(text[n % 32 :], self.long) for n in range(self.decoding)}
        seen = dict.fromkeys(decoding, 0)
        gaps, last, waiting, present = [], 0.0, list(arrivals), ""
        beside, firsts, arrived, encodes = [], [], 0.0, False
        begun = time.monotonic()
        while any(count < self.long for count in seen.values()) and (waiting or present or not arrivals):
            started = min(seen.values()) > 8
            if started and waiting and not present:
                present, arrived = self.add(waiting.pop(), 1), time.monotonic()
            for output in self.engine.step():
                if output.request_id == present and output.finished:
                    present = ""
                    firsts.append(time.monotonic() - arrived)
                if output.request_id in seen:
                    seen[output.request_id] = len(output.outputs[0].token_ids)
            now = time.monotonic()
            if started and last:
                gaps.append(now - last)
                beside += [now - last] if encodes and self.media.num_in_flight else []
            last, encodes = now, bool(self.media.num_in_flight)
        for name in decoding:
            self.engine.abort(name)
        self.run()
        took = np.array(gaps) * 1e3
        say(
            what,
            steps=len(took),
            mean_ms=took.mean(),
            p50_ms=np.median(took),
            p90_ms=np.quantile(took, 0.9),
            p99_ms=np.quantile(took, 0.99),
            largest_ms=took.max(),
            left=len(waiting),
            seconds=time.monotonic() - begun,
            **({} if not firsts else {"first_ms": 1e3 * float(np.mean(firsts))}),
            **({} if not beside else quantiles(beside)),
        )

    def share(self, share: float, pauses: bool = False) -> None:
        """Measure with another `media.encoder_share`. pauses: as where multiprocessors cannot be parted."""
        device: Any = self.engine.assembly.device
        self.media._share = share
        if not self.dry:
            device._side_work = SideStream(device.torch_device, 1.0 if pauses else share)
        say(f"share {share}", multiprocessors=0 if self.dry else device._side_work.part)


def quantiles(seconds: list[float]) -> dict[str, float]:
    took = np.array(seconds) * 1e3
    found = {"steps": len(took), "mean_ms": took.mean(), "p50_ms": np.median(took), "p99_ms": np.quantile(took, 0.99)}
    return {f"encoding_{name}": float(value) for name, value in found.items()}


def say(what: str, **figures: float) -> None:
    print(f"{what:34}", " ".join(f"{name}={value:.4g}" for name, value in figures.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--decoding", action="store_true", help="the second part alone")
    parser.add_argument("--shares", type=float, nargs="+", default=[], help="the second part for these values of media.encoder_share")
    parser.add_argument("--pauses", type=float, nargs="+", default=[], help="the same with pauses on all multiprocessors")
    asked = parser.parse_args()
    bench = Bench(asked.dry)
    print(bench.engine.assembly.resolved, flush=True)
    prompts = bench.images(bench.arriving if asked.decoding else bench.requests)
    bench.timed("warm-up, 4 requests", prompts[:4])
    bench.engine.reset_media_cache()
    for count in (1, 3, 8):
        bench.encoder_alone(prompts[:count])
    if not bench.dry:
        torch.cuda.set_sync_debug_mode("error")
    for side in (56, 112) if bench.dry else (224, 448, 616, 1024):
        bench.one_by_one(side)
    if not asked.decoding:
        bench.timed("images, encoded", prompts)
        bench.timed("images, found in the arena", prompts)
        bench.engine.reset_media_cache()
        bench.timed("images, encoded again", prompts)
        bench.engine.reset_media_cache()
    some = prompts[: bench.arriving]
    texts = [[100 + n % 500 for n in range(len(each.token_ids))] for each in some]
    for _ in range(2):
        bench.between_tokens("decoding alone", [])
        bench.between_tokens("decoding beside text prompts", list(texts))
        bench.engine.reset_media_cache()
        bench.between_tokens("decoding beside images", list(some))
        bench.between_tokens("decoding beside known images", list(some))
    for share, pauses in [*((share, False) for share in asked.shares), *((share, True) for share in asked.pauses)]:
        bench.share(share, pauses)
        bench.engine.reset_media_cache()
        bench.between_tokens("beside the first image", some[:2])  # what runs there for the first time
        bench.engine.reset_media_cache()
        bench.between_tokens("decoding beside images", list(some))
        if not asked.decoding:
            bench.engine.reset_media_cache()
            bench.timed("images, encoded", prompts)
    if not bench.dry:
        torch.cuda.set_sync_debug_mode("default")
        say("memory", peak_gib=torch.cuda.max_memory_allocated() / 2**30)
    sys.exit(0)


if __name__ == "__main__":
    main()
