"""Images on a GPU: the tokens of plain torch, encoded beside the steps without waiting; and prompts of embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mm_world import GREEDY, Made, assert_expected, made, prepared
from safetensors.torch import load_file
from tiny_mm import embeddings_of, mm

from modelrunner import Engine
from modelrunner.testing import Driver, EngineProbe, P, dense, options, ref
from modelrunner.testing.reference import assert_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SIZES: Any = ((4, 6), (8, 4), (1, 7), (6, 6))


def start(dtype: str = "float32", eager: bool = False, arena: int = 64, **short: Any) -> Driver:
    subject = mm()
    settings = options(device="cuda", **short) | {"graphs": {"eager": eager}, "media": {"arena_tokens": arena}}
    return Driver(Engine({"model": {"name": subject.model, "dtype": dtype}} | settings, plugins=subject.plugins))


def requests() -> list[Made]:
    return [made((5 + i, SIZES[i % 4], 3, SIZES[(i + 1) % 4], 4 + i), i) for i in range(6)] + [made((40,), 9)]


def run(driver: Driver) -> None:
    for number, one in enumerate(requests()):
        driver.engine.add_request(str(number), prepared(driver, one), GREEDY)
        driver.outputs[str(number)] = []
    driver.finish()


@pytest.mark.parametrize(("tokens", "depth", "eager"), [(16, 2, False), (64, 3, False), (512, 2, False), (33, 1, True)])
def test_tokens_are_those_of_plain_torch(tokens: int, depth: int, eager: bool) -> None:
    driver = start(tokens=tokens, depth=depth, eager=eager)
    run(driver)
    for number, one in enumerate(requests()):
        assert_expected(one, driver.result(str(number)))
    EngineProbe(driver).assert_clean()


def test_the_arena_holds_what_plain_torch_encodes() -> None:
    driver = start(arena=64)
    one = made((5, (4, 6), 7))
    driver.engine.add_request("a", prepared(driver, one), GREEDY)
    driver.outputs["a"] = []
    driver.finish()
    assert driver.engine.media.num_encoded == 1
    media: Any = driver.engine.media
    (entry,) = media.arena._entries.values()
    lines = driver.engine.assembly.media.encoder.arena[torch.from_numpy(entry.lines).long().cuda()].cpu()  # type: ignore[union-attr]
    torch.testing.assert_close(lines, embeddings_of(one.pictures[0]), rtol=1e-4, atol=1e-4)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_waits(no_waiting: None, dtype: str) -> None:
    """In the loop and in the thread beside it, from the first image on, with an arena that is too small for all of them."""
    driver = start(dtype, tokens=64)
    for number, one in enumerate(requests()):
        driver.engine.add_request(str(number), prepared(driver, one), GREEDY)
        driver.outputs[str(number)] = []
    torch.cuda.set_sync_debug_mode("error")
    driver.finish()
    torch.cuda.set_sync_debug_mode("default")
    assert all(driver.result(str(number)).finish_reason == "length" for number in range(7))


@pytest.mark.parametrize("eager", [False, True])
def test_prompt_embeddings_give_what_the_ids_give(eager: bool) -> None:
    subject = dense()
    table = load_file(Path(subject.model) / "model.safetensors")["model.embed_tokens.weight"]
    settings = options(device="cuda", tokens=32) | {"graphs": {"eager": eager}, "media": {"prompt_embeds": True, "arena_tokens": 200}}
    driver = Driver(Engine({"model": {"name": subject.model, "dtype": "float32"}} | settings, plugins=subject.plugins))
    for number in range(4):
        driver.add(str(number), {"prompt_embeds": table[P(20 + 40 * number, number)]}, GREEDY)
    driver.finish()
    for number in range(4):
        prompt = P(20 + 40 * number, number)
        want = ref(subject, prompt, GREEDY)
        assert_tokens(subject, prompt, driver.result(str(number)).token_ids, want.token_ids, greedy=True)
    EngineProbe(driver).assert_clean()


def test_a_large_upload_goes_in_pieces() -> None:
    """More than the pinned memory at a time, of any type and alignment."""
    driver = start()
    device: Any = driver.engine.assembly.device
    given = [torch.randint(0, 256, (19_999_999,), dtype=torch.uint8), torch.randn(5, 7).to(torch.bfloat16), torch.empty(0, 3)]
    found: list[torch.Tensor] = []
    device.launch_side(lambda: found.extend(device.upload(each) for each in given)).wait()
    for one, other in zip(given, found, strict=True):
        assert torch.equal(one, other.cpu())
    failing = device.launch_side(lambda: np.zeros(3)[5])
    with pytest.raises(IndexError):
        failing.wait()
    assert device.launch_side(lambda: None).wait() is None


@pytest.mark.parametrize("narrow", [True, False])
def test_encoding_spares_those_who_decode(no_waiting: None, narrow: bool) -> None:
    """On a part of the device, or with pauses between pieces: tokens are the same, and nothing waits."""
    driver = start(tokens=64, rows=4)
    media: Any = driver.engine.media
    media._start.__self__.narrow = 4096 if narrow else 0
    device: Any = driver.engine.assembly.device
    text = made((9,), 5)
    driver.engine.add_request("text", prepared(driver, text), GREEDY.model_copy(update={"max_tokens": 150}))
    driver.outputs["text"] = []
    told: list[float] = []
    pace = media._pace
    media._pace = lambda share: (told.append(share), pace(share))
    driver.step()
    for number, one in enumerate(requests()):
        driver.engine.add_request(str(number), prepared(driver, one), GREEDY)
        driver.outputs[str(number)] = []
    torch.cuda.set_sync_debug_mode("error")
    driver.finish()
    torch.cuda.set_sync_debug_mode("default")
    for number, one in enumerate(requests()):
        assert_expected(one, driver.result(str(number)))
    assert told[0] == driver.engine.settings.media.encoder_share
    side = device._side_work
    assert side.part or side.no_part, "nobody says why there is no part of the multiprocessors"
    assert narrow or side.pace.rested > 0, "there were no pauses"
    EngineProbe(driver).assert_clean()


def test_a_part_of_the_multiprocessors() -> None:
    """Work there sees what came before on other streams, and runs on no more multiprocessors than it says."""
    from modelrunner.devices.cuda_part import NoParts, part_stream

    device = torch.device("cuda", torch.cuda.current_device())
    every = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        stream, count = part_stream(device, 0.25)
    except NoParts as error:
        pytest.skip(str(error))
    assert every // 4 <= count < every
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    stream.wait_stream(torch.cuda.current_stream())
    want, spans = x @ x, []
    for where in (torch.cuda.Stream(device), stream):
        where.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(where):
            timed = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(8)]
            for begun, ended in timed:
                begun.record()
                for _ in range(10):
                    got = x @ x
                ended.record()
        ended.synchronize()
        torch.testing.assert_close(got, want)
        spans.append(min(begun.elapsed_time(ended) for begun, ended in timed))  # other processes may use the GPU, too
    assert spans[1] > 1.5 * spans[0], f"as fast on {count} multiprocessors of {every} as on all: {spans} ms"


@pytest.mark.parametrize("shared", [False, True])
def test_images_of_one_size_are_encoded_by_a_graph(no_waiting: None, shared: bool) -> None:
    """On all multiprocessors and on a part of them; steps run on while it is captured."""
    driver = start(tokens=64, rows=4, arena=200)
    graphs: Any = driver.engine.assembly.media.encoder.graphs  # type: ignore[union-attr]
    before = graphs.num_captured
    assert before, "none was captured at the start"
    many = [made((3, (5, 4), 4), seed) for seed in range(5)]
    torch.cuda.set_sync_debug_mode("error")
    if shared:
        driver.engine.add_request("text", prepared(driver, made((9,), 5)), GREEDY.model_copy(update={"max_tokens": 400}))
        driver.outputs["text"] = []
    for number, one in enumerate(many):
        driver.engine.add_request(str(number), prepared(driver, one), GREEDY)
        driver.outputs[str(number)] = []
        driver.step_until(lambda number=number: driver.is_finished(str(number)), 5000)  # type: ignore[misc]
    driver.finish()
    torch.cuda.set_sync_debug_mode("default")
    for number, one in enumerate(many):
        assert_expected(one, driver.result(str(number)))
    assert graphs.num_captured == before + 1
    side: Any = driver.engine.assembly.device
    places = {place for place, kept in graphs._graphs.items() if len(kept) > 1}
    assert places == {1 if shared and side._side_work.part else 0}
    EngineProbe(driver).assert_clean()
