"""`modelrunner bench` with our engine alone: it does the work asked for, in tiny form on the CPU, and tells what it found."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modelrunner import Engine, cli
from modelrunner.errors import ModelRunnerError
from modelrunner.plugin_manager import PluginManager
from modelrunner.plugins.bench import asked, drive, floor, hardware, host, parts, profiler, session, startup, stream, table
from modelrunner.plugins.bench.asked import GREEDY
from modelrunner.plugins.bench.models import model_folder
from modelrunner.plugins.bench.scenarios import Job
from modelrunner.plugins.bench.suite import Bench, Options
from modelrunner.plugins.bench.workloads import WORKLOADS
from modelrunner.testing.null_device import NullDevice
from modelrunner.testing.tiny import tiny_dense

ROOT = Path(__file__).resolve().parents[2]
MACHINE = floor.Machine(bandwidth=1e9, flops=1e9)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    room = {"max_model_len": 96, "max_num_seqs": 8, "num_gpu_blocks_override": 64}
    engine = Engine({"model": str(tiny_dense()), "skip_tokenizer_init": True, **room})
    yield engine
    engine.close()


def test_a_run_counts_what_the_engine_did(engine: Engine) -> None:
    jobs = [Job(tuple(range(5, 5 + prompt)), output) for prompt, output in ((3, 9), (20, 2), (7, 5))]
    run = drive.drive(engine, jobs)
    assert (run.output_tokens, run.steps, run.cached_tokens, run.preemptions) == (16, 9, 0, 0)
    assert 0 < run.adding < run.seconds
    assert drive.drive(engine, jobs, {"temperature": 0.6}).cached_tokens == 0, "a run does not find what an earlier one left"


def test_a_run_says_what_became_of_drafts() -> None:
    room = {"max_model_len": 96, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "speculation": {"drafter": "ngram", "num_tokens": 2}}
    drafting = Engine({"model": str(tiny_dense()), "skip_tokenizer_init": True, "plugin": {"ngram": {"min_size": 1}}, **room})
    jobs = [Job(tuple([5, 6, 7] * 6), 40)] * 2
    drafts = [drive.drive(drafting, jobs).drafts for _ in range(2)]
    drafting.close()
    assert drafts[0]["num_drafted"] == drafts[1]["num_drafted"] > 0, "each run counts its own"
    assert drafts[0]["num_drafted"] >= drafts[0]["num_accepted"]
    assert len(drafts[0]["acceptance_at"]) == 2


def test_other_work_than_asked_is_no_result() -> None:
    with pytest.raises(ModelRunnerError, match=r"request 1 gave 3 tokens and asked for 2"):
        drive.require([Job((1,), 2), Job((1,), 2)], [2, 3])


def test_the_cost_is_that_of_the_model(engine: Engine) -> None:
    """2 layers of q, k, v (128 x 64), o (64 x 64), gate and up (256 x 64), down (64 x 128); head 331 x 64; 2 KV heads of 16; float32."""
    body, head = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128), 331 * 64
    expected = floor.ModelCost(4 * body, 4 * head, 2 * body, 2 * head, 2 * 2 * 2 * 16 * 4, 4 * 2 * 4 * 16)
    assert floor.cost_of(engine) == expected


def test_products_and_copies_take_time(engine: Engine) -> None:
    one, many = (hardware.product_seconds(engine, rows) for rows in (1, 512))
    assert one is not None
    assert many is not None
    assert 0 < one < many
    cpu = torch.device("cpu")
    assert 0 < hardware.copy_bandwidth(cpu, 1 << 20) < 1e12
    assert 0 < hardware.product_rate(cpu, 64) < 1e14


def test_a_record_has_the_speed_and_its_floors(engine: Engine) -> None:
    bench = Bench(engine, MACHINE, Options(repeat=2), {"model": "m"})
    workload = WORKLOADS["bs8"].scaled(0.05)
    record = json.loads(json.dumps(bench.measure(workload, GREEDY)))
    assert (record["scenario"], record["requests"], record["prompt_tokens"], record["output_tokens"]) == ("bs8", 1, 6, 26)
    low, high = sorted(record["seconds"])
    assert record["tokens_per_second"] == pytest.approx(26 / ((low + high) / 2))
    assert record["ms_per_step"] == pytest.approx(1000 * 26 / record["tokens_per_second"] / record["steps"])
    least = sum(floor.step_floor(step, bench.cost, MACHINE) for step in floor.schedule(workload.jobs(0, 331), 8, 2048))  # type: ignore[arg-type]
    assert record["floor"]["tokens_per_second"] == pytest.approx(26 / least)
    assert record["floor"]["share"] == pytest.approx(record["tokens_per_second"] / record["floor"]["tokens_per_second"])
    assert record["library_floor"]["tokens_per_second"] <= record["floor"]["tokens_per_second"]
    assert record["copy_bandwidth"] == 1e9
    assert "profile" not in record


def test_a_slow_workload_is_not_repeated(engine: Engine) -> None:
    record = Bench(engine, MACHINE, Options(repeat=5, limit=0.0), {}).measure(WORKLOADS["bs1"].scaled(0.01), GREEDY)
    assert len(record["seconds"]) == 1


def test_time_between_tokens_is_seen_while_prompts_arrive(engine: Engine) -> None:
    jobs = [Job((7 + place, *range(20, 24)), 30) for place in range(3)]
    later = [Job(tuple(range(30 + place, 70 + place)), 2) for place in range(2)]
    found = stream.stream(engine, jobs, later, every=8)
    assert found.output_tokens == 3 * 30 + 2 * 2
    assert len(found.first) == 2
    assert found.intervals.size >= 3 * 20
    assert 0 < found.intervals.sum() / 3 <= found.seconds
    assert 0 < min(found.first) < found.seconds


def test_a_cache_too_small_for_even_tokens_is_told() -> None:
    settings = {"model": str(tiny_dense()), "skip_tokenizer_init": True, "max_model_len": 48, "num_gpu_blocks_override": 4}
    small = Engine(settings)
    jobs = [Job(tuple(range(5 + place, 25 + place)), 24) for place in range(2)]
    with pytest.raises(ModelRunnerError, match="lost their row"):
        stream.stream(small, jobs, [], every=1)
    small.close()


# ---- profiles --------------------------------------------------------------------------------------------------------


def event(name: str, start: float, length: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


TRACE = [
    event("matmul", 100, 10),
    event("norm", 108, 4),  # overlaps
    event("matmul", 115, 20),
    event("copy", 140, 5, "gpu_memcpy"),
    event("aten::mm", 0, 500, "cpu_op"),
    {"ph": "M", "name": "process_name"},
]


def test_a_profile_tells_kernels_and_waits() -> None:
    found = profiler.profile_of(TRACE, steps=2)
    assert [(k.name, k.count, k.total) for k in found.kernels] == [("matmul", 2, 30), ("copy", 1, 5), ("norm", 1, 4)]
    assert (found.span, found.busy, list(found.gaps)) == (45, 37, [5, 3])
    assert found.idle == pytest.approx(8 / 45)
    lines = list(profiler.lines(profiler.as_record(found), most=2))
    assert "22.5 us a step, device busy 18.5 us, idle 17.8% between launches (longest gaps 5.0, 3.0 us) and 0.0% inside graphs" in lines[0]
    assert lines[2].split() == ["15.00", "76.9%", "1.00", "15.00", "matmul"]
    assert lines[-1].split() == ["2.00", "0.50", "1", "more"]


def test_waits_inside_a_graph_are_told_apart() -> None:
    """All kernels of a graph come from one launch, even where the next graph's first kernel starts before its last one ends."""
    launches = [("a", 100, 10, 7), ("b", 112, 10, 7), ("c", 121, 4, 8), ("d", 130, 10, 8), ("e", 145, 5, 9)]
    trace = [event(name, start, length) | {"args": {"correlation": launch}} for name, start, length, launch in launches]
    found = profiler.profile_of(trace, steps=1)
    assert (list(found.gaps), found.inside, found.span) == ([5], 2 + 5, 50)
    assert (found.idle, found.idle_inside) == (pytest.approx(0.1), pytest.approx(0.14))
    assert "idle 10.0% between launches (longest gaps 5.0 us) and 14.0% inside graphs" in next(profiler.lines(profiler.as_record(found)))


def test_without_a_gpu_the_hosts_operators_stand_in() -> None:
    assert [k.name for k in profiler.profile_of(TRACE[-2:], 1).kernels] == ["aten::mm"]
    empty = profiler.profile_of([], 1)
    assert (empty.kernels, empty.idle) == ([], 0.0)
    assert list(profiler.lines(None)) == []


def test_steps_of_an_engine_are_profiled_and_dropped(engine: Engine) -> None:
    jobs = [Job((7 + place, *range(20, 24)), 40) for place in range(3)]
    found = profiler.profile_steps(engine, jobs, GREEDY, 4, steady=True)
    assert found.steps == 4
    assert any("mm" in kernel.name for kernel in found.kernels)
    assert found.host["step"] == pytest.approx(sum(found.host[name] for name in (*parts.PARTS, "rest")))
    assert min(found.host.values()) > 0
    assert "launch" not in vars(engine.runner), "the engine is as it was"
    assert not engine.has_unfinished()


# ---- start-up and host -----------------------------------------------------------------------------------------------


def test_start_up_is_timed_in_a_process_of_its_own() -> None:
    settings = {"model.name": str(model_folder("tiny")), "model.load_format": "dummy", "model.skip_tokenizer_init": True}
    settings |= {"model.max_model_len": 64, "cache.num_pages": 8}
    taken = startup.start(settings, [], "/nowhere")
    assert list(taken) == [*startup.STAGES, "total"]
    assert min(taken.values()) >= 0
    assert taken["total"] == pytest.approx(sum(taken[stage] for stage in startup.STAGES))
    with pytest.raises(ModelRunnerError, match=r"ended with 1:\n(.|\n)*no setting is called 'model.nam'"):
        startup.start({"model.nam": "x"}, [], "/nowhere")


def test_stages_lie_between_moments() -> None:
    assert startup.stages([1.0, 1.5, 3.5, 7.5, 8.0]) == {"interpreter": 0.5, "import": 2.0, "engine": 4.0, "first_token": 0.5, "total": 7.0}


@pytest.fixture(scope="module")
def steady() -> Iterator[tuple[Engine, NullDevice]]:
    engine, device = host.make_engine([3, 8])
    host.decode(engine, 3)
    yield engine, device
    engine.close()


def test_the_host_works_as_with_a_device(steady: tuple[Engine, NullDevice]) -> None:
    """Plans, patches and commits are real: every row gets a token a step, and pages as it grows."""
    engine, device = steady
    before, pages = engine.scheduler.rows.known.copy(), engine.scheduler.pool.available
    record = host.measure_steps(engine, device, 32)
    grown = engine.scheduler.rows.known - before
    taken = host.WARM_UP + 32
    assert sorted(grown.tolist()) == [0] * 5 + [taken - 1] * 3, "one step is in flight"
    assert pages - engine.scheduler.pool.available == 3 * taken // host.PAGE
    engine.scheduler.check()
    assert set(record["parts_us"]) == {"plan", "launch", "collect", "commit", "rest"}
    assert sum(record["parts_us"].values()) == pytest.approx(record["us_per_step"])
    assert 0 < record["best_us"] <= record["us_per_step"]


def test_the_host_is_measured_with_drafts_beside_without() -> None:
    found = list(host.measure_host(0.003, {"speculation.drafter": "ngram", "speculation.num_tokens": 2}))
    assert [(record["rows"], record["drafts"]) for record in found] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    for plain, drafting in zip(found[::2], found[1::2], strict=True):
        assert plain["over_plain"] == 1
        assert drafting["over_plain"] == pytest.approx(drafting["us_per_step"] / plain["us_per_step"])
    assert "drafts" not in next(host.measure_host(0.001))
    assert next(table.text(found[1])).startswith("host, 1 rows, 2 drafts (")
    assert table.table(found)[2].startswith("host 1, 2 drafts (")


def test_blocks_are_as_long_as_pages() -> None:
    assert host.means(torch.arange(32.0).numpy()).tolist() == [7.5, 23.5]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_command_line_runs_every_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["bs1", 'wide@0.8,top_p=0.9,logit_bias={"5":1,"7":2}', "offline@0.6", "prefill", "mixed"]
    options = ["--dry", "--json", "--plot", str(tmp_path / "p.svg"), "--record", str(tmp_path / "r.jsonl"), "--profile-of", "bs1"]
    assert cli.main(["bench", *names, *options]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["scenario"], record["temperature"]) for record in found] == [
        ("bs1", 0), ("wide", 0.8), ("offline", 0.6), ("prefill", 0), ("mixed", 0),
    ]  # fmt: skip
    assert [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()] == found
    assert ["profile" in record for record in found] == [True, False, False, False, False]
    assert {record["model"] for record in found} == {"tiny"}
    assert {record["max_rows"] for record in found} == {31}, "one engine, with room for the widest"
    assert found[1]["sampling"] == {"top_p": 0.9, "logit_bias": {"5": 1, "7": 2}}
    assert "sampling" not in found[2]
    assert asked.told(found[1]) == names[1].partition("@")[2], "as it was asked for"
    assert found[3]["counted"] == "prompt"
    assert found[4]["inter_token_ms"]["p50"] <= found[4]["inter_token_ms"]["p99"]
    assert re.search("offline@0.6: tiny, float32, (plain|packed)", (tmp_path / "p.svg").read_text())


def test_command_line_tells_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "bs8", "host", "--dry", "--profile", "--scale", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "bs8: " in text
    assert "output tok/s" in text
    assert "reached" in text
    assert "calls/step" in text
    assert "host, 1 rows: " in text
    table = text[text.index("scenario") :].splitlines()
    assert [line.split()[0] for line in table[:2]] == ["scenario", "host"], "host comes first"
    assert table[-1].startswith("bs8")


def test_a_scenario_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measure = Bench.measure

    def fragile(self: Bench, workload: Any, sampling: Any) -> Any:
        if workload.name == "bs1":
            raise RuntimeError("out of\nmemory")
        return measure(self, workload, sampling)

    monkeypatch.setattr(Bench, "measure", fragile)
    assert cli.main(["bench", "bs1", "bs8", "--dry", "--scale", "0.01", "--json"]) == 1
    bad, good = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (bad["scenario"], bad["error"]) == ("bs1", "RuntimeError: out of")
    assert good["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bs2"], "invalid choice: 'bs2'"),
        (["cpu1@0.5"], "cpu1 does not sample"),
        (["bs1@warm"], "'warm' is no value of temperature"),
        (["bs1@0.6,top_q=1"], "top_q"),
        (["bs1@0.6,top_p=2"], "top_p"),
        (["bs1@0.6,max_tokens=2"], "max_tokens is the benchmark's own to set"),
        (["bs1", "--sampling", "0.6,warm"], "'0.6,warm' is no value of temperature"),
        (["bs1", "--compare", "transformers"], "--compare goes with cpu1 and cpu32, not with bs1"),
        (["bs1", "--scale", "2"], "'2' is not a number above 0 and up to 1"),
    ],
)
def test_wrong_calls_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_room_is_the_usual_one_unless_work_is_scaled_or_the_user_decided() -> None:
    manager = PluginManager.load()
    room = {"model.max_model_len": 4096, "scheduler.max_rows": 1024, "scheduler.max_batched_tokens": 16384}
    usual = {**room, "model.skip_tokenizer_init": True}
    assert session.roomy({}, manager, [WORKLOADS["bs1"]], 1) == usual
    assert session.roomy({}, manager, [WORKLOADS["prefill"]], 1) == {**usual, "model.max_model_len": 8208}
    decided = session.roomy({"max_num_seqs": 3}, manager, [WORKLOADS["bs1"]], 1)
    assert "scheduler.max_rows" not in decided
    assert decided["max_num_seqs"] == 3
    small = session.roomy({}, manager, [WORKLOADS["bs1"].scaled(0.1)], 0.1)
    assert (small["model.max_model_len"], small["scheduler.max_rows"]) == (13 + 102, 1)


def test_the_gpu_script_knows_its_parts() -> None:
    script = ROOT / "tests/gpu/run.sh"
    assert os.access(script, os.X_OK)
    wrong = subprocess.run([script, "everything"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2
    assert "no part is called everything: tests small large host sampling startup profile" in wrong.stderr
