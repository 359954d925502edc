"""`modelrunner bench`: the work, what is measured, and how it is told."""

from __future__ import annotations

import json
import mmap
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelrunner import LLM, cli
from modelrunner.errors import CheckpointError, ModelRunnerError
from modelrunner.plugin_manager import PluginManager
from modelrunner.plugins.bench import chart, report
from modelrunner.plugins.bench.engines import OurEngine, TransformersEngine, exact
from modelrunner.plugins.bench.measure import Result, Timing, equal_tokens, measure
from modelrunner.plugins.bench.memory import MemoryMeter
from modelrunner.plugins.bench.pixel_font import COLUMNS, HEIGHT, glyphs
from modelrunner.plugins.bench.scenarios import SCENARIOS, Job, Scenario, static_batches
from modelrunner.plugins.commands.bench import sized
from modelrunner.testing.tiny import tiny_dense

LENGTH = 512  # context that both scenarios fit into


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny_dense(max_position_embeddings=LENGTH))


def test_work_is_as_described_and_the_same_for_equal_seeds() -> None:
    (only,) = SCENARIOS["cpu1"].jobs(331, seed=0)
    assert (len(only.prompt), only.output) == (38, 64)
    jobs, same, other = (SCENARIOS["cpu32"].jobs(vocab, seed) for vocab, seed in ((331, 0), (331, 0), (331, 1)))
    assert jobs == same != other
    assert len(jobs) == 32
    lengths = [(len(job.prompt), job.output) for job in jobs]
    assert all(16 <= prompt <= 256 and 16 <= output <= 128 for prompt, output in lengths)
    assert len(set(lengths)) > 25, "lengths are drawn for each request"
    assert lengths == [(len(job.prompt), job.output) for job in SCENARIOS["cpu32"].jobs(49152, 0)], (
        "the work is the same for any vocabulary"
    )
    assert max(max(job.prompt) for job in jobs) < 331


def test_static_batches_keep_the_order_of_arrival() -> None:
    jobs = [Job((i,), 1) for i in range(5)]
    assert [[job.prompt[0] for job in batch] for batch in static_batches(jobs, 2)] == [[0, 1], [2, 3], [4]]


def test_both_engines_do_the_same_work(model: str) -> None:
    """Greedy tokens agree, and each request gets what it asked for, in spite of padding and of batches run to their longest output."""
    jobs = [Job(tuple(range(5, 5 + prompt)), output) for prompt, output in ((3, 9), (12, 2), (7, 5))]
    with LLM(model, skip_tokenizer_init=True, max_model_len=32) as llm:
        ours = OurEngine(llm).run(jobs, 2)
        others = TransformersEngine(llm.card, torch.float32).run(jobs, 2)
    assert [len(ids) for ids in ours] == [9, 2, 5]
    assert ours == others


def test_our_runs_do_not_find_the_prompts_of_earlier_ones(model: str) -> None:
    jobs = SCENARIOS["cpu1"].jobs(331, 0)
    with LLM(model, skip_tokenizer_init=True, max_model_len=128) as llm:
        engine = OurEngine(llm)
        for _ in range(2):
            engine.prepare()
            engine.run(jobs, 1)
        assert llm.engine.scheduler.stats.cached_tokens == 0
        engine.run(jobs, 1)
        assert llm.engine.scheduler.stats.cached_tokens > 0, "without `prepare` they are found"


def test_weights_of_another_type_are_no_comparison(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    half = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: half)
    with (
        LLM(model, skip_tokenizer_init=True, max_model_len=32, load_format="safetensors") as llm,
        pytest.raises(CheckpointError, match=r"as torch.bfloat16, not as torch.float32: not the same work"),
    ):
        TransformersEngine(llm.card, torch.float32)


def test_room_is_made_for_the_work_unless_the_user_decided() -> None:
    manager = PluginManager.load()
    assert sized({}, manager, list(SCENARIOS.values())) == {
        "model.max_model_len": 384,
        "scheduler.max_rows": 32,
        "model.skip_tokenizer_init": True,
    }
    given = {"max_num_seqs": 7, "model.max_model_len": 500}
    assert sized(given, manager, [SCENARIOS["cpu1"]]) == {**given, "model.skip_tokenizer_init": True}


def test_wrong_lengths_are_no_result() -> None:
    jobs = [Job((1,), 2), Job((1,), 2)]
    assert exact("e", jobs, [[1, 2], [3, 4]]) == [[1, 2], [3, 4]]
    with pytest.raises(ModelRunnerError, match=r"e gave 1 tokens for request 1, which asked for 2"):
        exact("e", jobs, [[1, 2], [3]])


def test_a_checkpoint_that_transformers_does_not_read_is_told(model: str) -> None:
    with (
        LLM(model, skip_tokenizer_init=True, max_model_len=32, load_format="dummy") as llm,
        pytest.raises(CheckpointError, match="read as 'dummy'"),
    ):
        TransformersEngine(llm.card, torch.float32)


class Sleepy:
    """An engine that takes the time it is told, by a clock of its own."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order

    def prepare(self) -> None:
        self.order.append("prepare")

    def run(self, jobs: Any, batch: int) -> list[list[int]]:
        self.order.append(f"{self.name} {sum(job.output for job in jobs)}")
        return [list(range(job.output)) for job in jobs]


def test_engines_take_turns_after_a_warm_up() -> None:
    order: list[str] = []
    scenario = Scenario("s", "about", 2, (3, 3), (5, 5), 8)
    engines = [Sleepy("a", order), Sleepy("b", order)]
    result = measure(scenario, scenario.jobs(9, 0), engines, MemoryMeter(), repeat=2, statistic="median", setting={})
    assert [step for step in order if step != "prepare"] == ["a 4", "b 4", "a 10", "b 10", "a 10", "b 10"]
    assert order.count("prepare") == 6
    assert [len(timing.seconds) for timing in result.timings] == [2, 2]
    assert result.equal_tokens == {"b": 10}
    assert result.prompt_tokens == 6


def found() -> Result:
    timings = [Timing("modelrunner", 60, [3.0, 1.0, 2.0], 3 << 20), Timing("transformers", 60, [4.0, 6.0, 5.0])]
    versions = {"versions": {"torch": "1"}}
    setting = {"model": "dir/<m>", "dtype": "float32", "linear": "plain", "threads": 1, **versions}
    return Result(SCENARIOS["cpu1"], "median", timings, 38, {"transformers": 59}, (1.0, 2.0), setting)


def test_statistics_and_ratio() -> None:
    result = found()
    ours, other = result.timings
    assert (ours.taken("median"), ours.taken("best")) == (2.0, 1.0)
    assert ours.tokens_per_second("median") == 30.0
    assert result.ratio(other) == 2.5
    assert equal_tokens([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == 3


def test_text_tells_speed_ratio_memory_and_load() -> None:
    lines = list(report.text(found()))
    assert "38 + 60 tokens" in lines[0]
    assert "1 threads, load average 1.0 before and 2.0 after" in lines[1]
    assert re.search(r"modelrunner +30\.0 tok/s .*median of 3 runs, 1\.00-3\.00 s.* 3 MiB", lines[2])
    assert re.search(r"transformers +12\.0 tok/s .*peak memory unknown", lines[3])
    assert lines[4] == "  modelrunner / transformers: 2.50x (59 of 60 tokens alike)"


def touched(size: int) -> mmap.mmap:
    """So many bytes of memory of its own, each page written."""
    pages = mmap.mmap(-1, size)
    for start in range(0, size, mmap.PAGESIZE):
        pages[start] = 1
    return pages


def test_memory_belongs_to_the_part_that_was_at_work() -> None:
    meter = MemoryMeter()
    if meter._begin() is None:
        pytest.skip("this system does not let a process set its peak back")
    # Pages of the system's own: an array's may come from what earlier tests left on the heap.
    with meter.at_work("a"):
        kept = touched(96 << 20)
    with meter.at_work("b"):
        touched(80 << 20).close()
    with meter.at_work("a"):
        touched(40 << 20).close()
    slack = 8 << 20
    assert abs(meter.held["a"] - len(kept)) < slack
    assert abs(meter.peak["a"] - (136 << 20)) < slack, "what it keeps and what it used for a while"
    assert abs(meter.peak["b"] - (80 << 20)) < slack
    assert abs(meter.held["b"]) < slack
    assert meter.process_peak > len(kept)


def test_chart_draws_a_bar_for_each_engine_in_proportion() -> None:
    shapes, height = chart.chart([found(), found()])
    bars = [shape for shape in shapes if isinstance(shape, chart.Box)]
    assert [bar.width / bars[0].width for bar in bars] == pytest.approx([1, 0.4, 1, 0.4])
    assert all(bar.x + bar.width < chart.WIDTH and bar.y + bar.height < height for bar in bars)
    assert [bar.y for bar in bars] == sorted({bar.y for bar in bars})


def test_svg_and_page_hold_the_numbers_and_nothing_from_outside(tmp_path: Path) -> None:
    for name in ("a.svg", "a.html"):
        chart.draw([found()], tmp_path / name)
        text = (tmp_path / name).read_text()
        assert "30.0 tok/s" in text
        assert "12.0 tok/s (ours 2.50x)" in text
        assert "&lt;m&gt;" in text, "names are escaped"
        assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}


def decoded(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The picture in a PNG file of the simple form that we write; checks each chunk's sum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + body) == int.from_bytes(data[at + 8 + size : at + 12 + size])
        chunks[kind], at = body, at + 12 + size
    width, height = int.from_bytes(chunks[b"IHDR"][:4]), int.from_bytes(chunks[b"IHDR"][4:8])
    assert chunks[b"IHDR"][8:] == bytes([8, 2, 0, 0, 0])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_png_shows_bars_and_text(tmp_path: Path) -> None:
    chart.draw([found()], tmp_path / "a.png")
    image = decoded((tmp_path / "a.png").read_bytes())
    shapes, height = chart.chart([found()])
    assert image.shape == (height, chart.WIDTH, 3)
    for bar in (shape for shape in shapes if isinstance(shape, chart.Box)):
        area = (image == chart.rgb(bar.colour)).all(-1)
        assert area.sum() == round(bar.width) * round(bar.height)
    assert (image == chart.rgb(chart.INK)).all(-1).sum() > 1000


def test_glyphs_differ_and_unknown_ones_are_boxes() -> None:
    drawn = {character: glyphs(character).tobytes() for character in COLUMNS}
    assert len(set(drawn.values())) == len(COLUMNS)
    assert glyphs("ab").shape == (HEIGHT, 12)
    assert (glyphs("l") == glyphs("L")).all()
    assert glyphs("é").tobytes() not in drawn.values()


def test_command_line_compares_in_one_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, timeline = tmp_path / "p.html", tmp_path / "t.json"
    options = ["--repeat", "1", "--threads", "1", "--plot", str(plot), "--trace", str(timeline)]
    assert cli.main(["bench", "cpu1", "--model", model, "--compare", "transformers", "--json", *options]) == 0
    ours, other = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (ours["engine"], other["engine"]) == ("modelrunner", "transformers")
    assert (ours["prompt_tokens"], ours["output_tokens"], other["equal_tokens"]) == (38, 64, 64)
    assert other["ratio"] == pytest.approx(ours["tokens_per_second"] / other["tokens_per_second"])
    assert ours["dtype"] == "float32"
    assert "transformers" in plot.read_text()
    assert json.loads(timeline.read_text())["traceEvents"]


@pytest.mark.parametrize("more", [[], ["--load-format", "safetensors"], ["--model.load_format", "safetensors"]])
def test_a_trial_compares_too(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny model has weights in a file, which both engines read."""
    assert cli.main(["bench", "cpu1", "--dry", "--compare", "transformers", "--json", "--threads", "1", *more]) == 0
    _, other = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (other["engine"], other["equal_tokens"]) == ("transformers", 64)


@pytest.mark.parametrize("name", ["load-format", "model.load_format"])
def test_made_up_weights_are_read_in_one_way(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It used to be `given twice: by argument model.load_format and by argument load_format`."""
    for scenario in ("cpu1", "bs1"):
        assert cli.main(["bench", scenario, "--model", "qwen3-0.6b", f"--{name}", "safetensors"]) == 2
        assert f"{name.replace('-', '_')} is 'safetensors', but qwen3-0.6b is a configuration whose weights" in capsys.readouterr().err


def test_command_line_takes_settings_and_several_scenarios(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--dtype", "bfloat16", "--linear.scheme", "int8", "--max-num-seqs", "4"]
    assert cli.main(["bench", "cpu32", "cpu1", "--model", model, "--repeat", "1", "--statistic", "best", *settings]) == 0
    text = capsys.readouterr().out
    assert re.search(r"cpu32: .*\n.*bfloat16, linear int8, .*\n +modelrunner .*best of 1 runs.*\ncpu1: ", text)
    assert "transformers:" not in text
    assert re.search(r"whole process: peak memory \d+ MiB; modelrunner .*, torch .*, transformers ", text)


def test_our_engine_beside_itself(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of three types in one run: each with its speed, its memory and its settings, and the ratios to the first."""
    plot, timeline = tmp_path / "p.svg", tmp_path / "t.json"
    call = ["bench", "cpu1", "--model", model, "--compare", "float32", "--repeat", "1", "--threads", "1"]
    assert cli.main([*call, "--json", "--plot", str(plot), "--trace", str(timeline)]) == 0
    first, *others = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["engine"], line["dtype"]) for line in (first, *others)] == [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("int8", "float32"),
    ]
    assert [line["linear"] == "int8" for line in (first, *others)] == [False, False, True]
    assert "ratio" not in first
    for line in others:
        assert line["ratio"] == pytest.approx(line["tokens_per_second"] / first["tokens_per_second"])
        assert 0 < line["equal_tokens"] <= 64
        assert line["peak_memory_bytes"] is None or line["peak_memory_bytes"] >= 0
    assert json.loads(timeline.read_text())["traceEvents"]
    assert "(ours" not in plot.read_text()
    assert cli.main(call) == 0
    text = capsys.readouterr().out
    assert re.search(r"float32 +[\d.]+ tok/s .*peak memory.*\n +bfloat16 +[\d.]+ tok/s .*peak memory.*\n +int8 +[\d.]+ tok/s", text)
    assert re.search(r"  bfloat16 / float32: [\d.]+x \(\d+ of 64 tokens alike\)\n  int8 / float32: [\d.]+x", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu1", "--compare", "float32", "--dtype", "bfloat16"], "runs float32, bfloat16, int8 by itself, and model.dtype is given"),
        (["cpu1", "--compare", "float32", "--linear.scheme", "int8"], "and linear.scheme is given; leave it out"),
        (["bs1", "--compare", "float32"], "--compare goes with cpu1 and cpu32"),
        (["cpu2"], "invalid choice: 'cpu2'"),
        ([], "required: SCENARIO"),
        (["cpu1", "--repeat", "0"], "'0' is not a whole number of at least 1"),
        (["cpu1", "--plot", "a.jpg"], "ends in none of .png, .html, .svg"),
        (["cpu1", "--plot", "/nowhere/a.png"], "there is no folder '/nowhere'"),
        (["cpu1", "--compare", "vllm"], "invalid choice: 'vllm'"),
        (["cpu1", "--max-model-len", "20"], "20"),
    ],
)
def test_wrong_calls_are_told(arguments: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments, *(["--model", model] if arguments else [])]) == 2
    assert message in capsys.readouterr().err
