"""What the scenarios of one engine ask for, and the least time that it can take."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from modelrunner.plugins.bench import floor, stream, table
from modelrunner.plugins.bench.models import MODELS, model_folder
from modelrunner.plugins.bench.scenarios import Job
from modelrunner.plugins.bench.workloads import WARM_UP, WORKLOADS, Arrivals, Workload

VOCAB = 151_936


def lengths(jobs: list[Job]) -> list[tuple[int, int]]:
    return [(len(job.prompt), job.output) for job in jobs]


def test_offline_is_the_usual_draw() -> None:
    """142,827 and 133,966 tokens are what other engines are measured with."""
    jobs = WORKLOADS["offline"].jobs(0, VOCAB)
    drawn = lengths(jobs)
    assert (len(jobs), sum(p for p, _ in drawn), sum(o for _, o in drawn)) == (256, 142_827, 133_966)
    assert all(100 <= number <= 1024 for pair in drawn for number in pair)
    assert max(max(job.prompt) for job in jobs) < 10_000
    assert lengths(WORKLOADS["offline"].jobs(1, VOCAB)) != drawn


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"),
    [
        ("wide", 1024, 32, 512),
        ("bs1", 1, 128, 1024),
        ("bs8", 8, 128, 512),
        ("bs32", 32, 128, 512),
        ("bs128", 128, 128, 512),
        ("prefill", 32, 8192, 16),
        ("mixed", 64, 128, 640),
    ],
)
def test_the_other_workloads_are_as_described(name: str, requests: int, prompt: int, output: int) -> None:
    assert lengths(WORKLOADS[name].jobs(0, VOCAB)) == [(prompt, output)] * requests


def test_mixed_brings_long_prompts_while_its_rows_decode() -> None:
    mixed = WORKLOADS["mixed"]
    assert mixed.arrivals == Arrivals(16, 8192, 16, 32)
    assert lengths(mixed.later(0, VOCAB)) == [(8192, 16)] * 16
    assert mixed.arrivals.requests * mixed.arrivals.every < mixed.output[0], "the last prompt comes before the rows end"
    assert (mixed.longest, mixed.most_rows) == (8208, 80)
    assert WORKLOADS["bs8"].later(0, VOCAB) == []


@pytest.mark.parametrize("name", ["offline", "mixed"])
def test_runs_have_equal_lengths_and_unrelated_prompts(name: str) -> None:
    workload = WORKLOADS[name]
    runs = [[*workload.jobs(0, VOCAB, run), *workload.later(0, VOCAB, run)] for run in (WARM_UP, 0, 1)]
    assert lengths(runs[0]) == lengths(runs[1]) == lengths(runs[2])
    starts = [job.prompt[:16] for jobs in runs for job in jobs]
    assert len(set(starts)) == len(starts), "no two prompts share a page"
    assert workload.jobs(0, VOCAB, 1) == workload.jobs(0, VOCAB, 1)


def test_ids_fit_a_small_vocabulary() -> None:
    for run in (WARM_UP, 0):
        assert max(max(job.prompt) for job in WORKLOADS["bs8"].jobs(0, 512, run)) < 512


def test_scaled_work_is_less_of_the_same() -> None:
    small = WORKLOADS["mixed"].scaled(0.25)
    assert (small.requests, small.prompt, small.output, small.arrivals) == (16, (32, 32), (160, 160), Arrivals(4, 2048, 4, 8))
    assert WORKLOADS["bs1"].scaled(0.001).jobs(0, VOCAB)[0].output == 1


def test_named_models_are_those_of_the_hub() -> None:
    small, large = MODELS["qwen3-0.6b"], MODELS["qwen3-8b"]
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    assert [small[name] for name in names] == [28, 1024, 16, 8, 128, 3072]
    assert [large[name] for name in names] == [36, 4096, 32, 8, 128, 12288]
    for config in (small, large):
        assert (config["vocab_size"], config["rope_theta"], config["rms_norm_eps"]) == (151936, 1e6, 1e-6)
        assert config["max_position_embeddings"] == 40960
    assert (small["tie_word_embeddings"], large["tie_word_embeddings"]) == (True, False)
    assert json.loads((model_folder("qwen3-8b") / "config.json").read_text()) == large


# ---- the floor -------------------------------------------------------------------------------------------------------

# Qwen3-0.6B in bfloat16: 28 layers of q, k, v (4096 x 1024), o (1024 x 2048), gate and up (6144 x 1024), down (1024 x 3072); head.
BODY = 28 * (4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072)
HEAD = 151_936 * 1024
QWEN = floor.ModelCost(2 * BODY, 2 * HEAD, 2 * BODY, 2 * HEAD, 28 * 2 * 8 * 128 * 2, 4 * 28 * 16 * 128)
H200 = floor.Machine(4.29e12, 650e12)


def speed(name: str, products: floor.Products | None = None) -> float:
    workload = WORKLOADS[name]
    jobs = workload.jobs(0, VOCAB)
    steps = list(floor.schedule(jobs, 1024, 16_384))
    counted = sum(len(job.prompt) if workload.counted == "prompt" else job.output for job in jobs)
    return counted / floor.floor_seconds(steps, QWEN, H200, products)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bs1", 3388), ("bs8", 22_200), ("bs32", 52_700), ("bs128", 80_300), ("wide", 104_700), ("offline", 35_700), ("prefill", 330_000)],
)
def test_floors_are_the_known_ones(name: str, expected: float) -> None:
    """Worked out by hand from the same figures, for decoding alone; the prompts' step and the last tokens are in the difference."""
    assert speed(name) == pytest.approx(expected, rel=0.03)


def test_measured_products_stand_for_those_of_decode_steps() -> None:
    assert speed("bs1", lambda rows: 0.949e-3) == pytest.approx(1035, rel=0.01)
    assert speed("bs32", floor.interpolated({8: 0.762e-3, 128: 0.853e-3})) == pytest.approx(28_600, rel=0.02)
    assert speed("bs32", lambda rows: 0.0) == speed("bs32"), "no product is faster than the reading of its weights"


def test_products_between_measured_rows_lie_on_a_line() -> None:
    products = floor.interpolated({1: 2.0, 9: 4.0})
    assert [products(rows) for rows in (1, 5, 9, 100)] == [2.0, 3.0, 4.0, 4.0]


def test_a_step_reads_weights_and_cache_once_or_computes() -> None:
    cost = floor.ModelCost(body_bytes=100, head_bytes=20, body_flops=10, head_flops=5, kv_bytes=2.0, pair_flops=3)
    machine = floor.Machine(bandwidth=10.0, flops=1.0)
    assert floor.step_floor(floor.StepWork(tokens=1, rows=1, context=40, pairs=1), cost, machine) == max(12, 15) + max(8, 3)
    assert floor.step_floor(floor.StepWork(tokens=1, rows=0, context=10, pairs=9), cost, machine) == max(10, 10) + max(2, 27)


def test_the_schedule_decodes_first_and_admits_in_order() -> None:
    jobs = [Job((1,) * 6, 3), Job((1,) * 5, 2), Job((1,) * 2, 1)]
    steps = list(floor.schedule(jobs, max_rows=2, max_tokens=8))
    assert steps == [
        floor.StepWork(tokens=8, rows=1, context=6 + 2, pairs=21 + 3),  # all of the first prompt, two tokens of the second
        floor.StepWork(tokens=4, rows=2, context=7 + 5, pairs=7 + (3 + 4 + 5)),
        floor.StepWork(tokens=2, rows=2, context=8 + 6, pairs=8 + 6),  # both end
        floor.StepWork(tokens=2, rows=1, context=2, pairs=3),
    ]


def test_the_schedule_does_all_of_the_work() -> None:
    jobs = WORKLOADS["offline"].scaled(0.1).jobs(0, VOCAB)
    steps = list(floor.schedule(jobs, max_rows=7, max_tokens=64))
    assert sum(step.rows for step in steps) == sum(job.output for job in jobs)
    assert sum(step.tokens for step in steps) == sum(len(job.prompt) + job.output - 1 for job in jobs)
    assert max(step.tokens for step in steps) == 64


# ---- time between tokens ---------------------------------------------------------------------------------------------


def test_percentiles_are_measured_values_in_milliseconds() -> None:
    seconds = [i / 1000 for i in range(1, 201)]
    assert stream.percentiles(seconds) == pytest.approx({"p50": 100, "p99": 198, "max": 200})
    assert stream.percentiles([0.007]) == pytest.approx({"p50": 7, "p99": 7, "max": 7})


def test_intervals_are_those_of_each_row() -> None:
    known = np.array([[5, 9], [6, 9], [7, 10], [7, 11], [9, 12]], np.int32)
    found = stream.intervals([0.0, 1.0, 3.0, 4.0, 8.0], known)
    assert sorted(found.tolist()) == [0.0, 1.0, 2.0, 4.0, 5.0], "row 0: at 1, 3, 8, 8; row 1: at 3, 4, 8"


# ---- the table -------------------------------------------------------------------------------------------------------

MEASURED = {
    "scenario": "bs8",
    "model": "qwen3-0.6b",
    "temperature": 0.6,
    "tokens_per_second": 9999.6,
    "ms_per_step": 0.8,
    "steps": 512,
    "seconds": [1.0, 1.1],
    "floor": {"tokens_per_second": 20_000.0, "share": 0.5},
}


def test_table_has_a_line_for_each_record() -> None:
    host = {"scenario": "host", "rows": 64, "us_per_step": 151.2, "best_us": 140.0}
    start = {"scenario": "startup", "model": "/a/b/m", "empty_cache": {"total": 31.0}, "filled_cache": {"total": 9.5}}
    lines = table.table([MEASURED, host, start, {"scenario": "wide", "error": "RuntimeError: out of memory"}])
    assert lines[1].split() == ["bs8@0.6", "qwen3-0.6b", "10,000", "0.800", "20,000", "50%", "10%", "of", "2"]
    assert lines[2].split() == ["host", "64", "151", "us,", "best", "140", "us"]
    assert lines[3].split() == ["startup", "m", "31.0", "s,", "filled", "cache", "9.5", "s"]
    assert "wide" in lines[4]
    assert "failed: RuntimeError: out of memory" in lines[4]


def test_columns_line_up() -> None:
    head, first, second = table.table([MEASURED, {**MEASURED, "tokens_per_second": 1.0, "scenario": "offline"}])
    end = head.index("tok/s") + len("tok/s")
    assert first[:end].endswith("10,000")
    assert second[:end].endswith(" 1")


def test_files_of_records_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(f"noise\n{json.dumps(MEASURED)}\n")
    assert table.read([str(path)]) == [MEASURED]


def test_workloads_fit_the_usual_room() -> None:
    assert max(workload.most_rows for workload in WORKLOADS.values()) == 1024
    assert all(isinstance(workload, Workload) and workload.longest <= 8208 for workload in WORKLOADS.values())
