"""The timeline of steps: its file in both forms, and the command line's way to it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelrunner import SamplingParams, cli
from modelrunner.engine import Engine
from modelrunner.errors import SettingsError
from modelrunner.observers import RequestFinish, StepReport
from modelrunner.plugins.trace_file import TraceObserver, page, trace_events
from modelrunner.testing import Driver, P, dense
from modelrunner.testing.subjects import options

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def traced_run(path: Path, **trace: Any) -> Driver:
    subject = dense()
    settings = {"model": {"name": subject.model}, "plugin": {"trace": {"path": str(path), **trace}}}
    run = Driver(Engine(options(depth=2) | settings, plugins=subject.plugins))
    run.add("a", P(20, 1), GREEDY)
    run.add("</script>", P(9, 2), GREEDY)
    run.finish()
    run.engine.close()
    return run


def report(step: int, at: float = 0.0, **values: Any) -> StepReport:
    times = {name: at + i / 1000 for i, name in enumerate(("planning", "planned", "launched", "waiting", "arrived", "committed"))}
    counts = dict.fromkeys(
        ("num_rows", "num_tokens", "num_decode", "num_generated", "num_finished", "num_running", "num_waiting", "num_in_flight"), 1
    )
    return StepReport(step=step, **times, **{**counts, "pages_free": 5, "pages_total": 8, "num_preemptions": 0, **values})


def test_spans_of_a_step() -> None:
    events = trace_events([report(0, 10.0), report(1, 10.01)], [RequestFinish("r", "stop", 10.0, 10.004, 10.02, 3, 2, 0, 0)])
    spans = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans[:5] == [
        ("plan", 1, 0.0, 1000.0), ("launch", 1, 1000.0, 1000.0), ("wait", 1, 3000.0, 1000.0), ("commit", 1, 4000.0, 1000.0),
        ("step 0", 2, 2000.0, 2000.0),
    ]  # fmt: skip
    assert spans[5][2] == 10000.0
    assert [(e["ph"], e["ts"]) for e in events if e.get("cat") == "request"] == [("b", 0.0), ("n", 4000.0), ("e", 20000.0)]
    assert {(e["name"], *e["args"].values()) for e in events if e["ph"] == "C"} == {
        ("rows", 1),
        ("tokens", 1),
        ("waiting", 1),
        ("pages", 3),
    }
    assert trace_events([], []) == []


def test_a_run_gives_chrome_events(tmp_path: Path) -> None:
    run = traced_run(tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    steps = [event for event in events if event["name"].startswith("step ")]
    assert len(steps) == run.engine.scheduler.stats.steps
    assert sum(event["args"]["generated"] for event in steps) == 12
    assert {event["tid"] for event in steps} == {2, 3}, "two steps in flight have a row each"
    assert [event["name"] for event in events if event["ph"] == "b"] == ["a", "</script>"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_the_page_holds_the_same_events_and_loads_nothing(tmp_path: Path) -> None:
    traced_run(tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    assert text.count("</script>") == 1, "a request's name ended the script"
    data = re.search(r"const events = (\[.*\]);\n", text)
    assert data is not None
    assert any(event["name"] == "</script>" for event in json.loads(data[1]))
    assert not re.search(r"https?:|src=|href=|@[A-Z]+@", text)


def test_titles_are_escaped() -> None:
    assert "<title>a&lt;b</title>" in page([], "a<b")


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path / "out.json", 3)
    for step in range(5):
        observer.on_step(report(step))
    observer.close()
    names = [event["name"] for event in json.loads((tmp_path / "out.json").read_text())["traceEvents"]]
    assert [name for name in names if name.startswith("step")] == ["step 2", "step 3", "step 4"]


@pytest.mark.parametrize(
    ("path", "message"), [("out.txt", r"'out.txt' ends neither in .json nor in .html"), ("no/such/out.json", "there is no folder")]
)
def test_a_path_that_cannot_be_written_is_refused_at_start_up(path: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        traced_run(Path(path))


def test_the_option_and_the_setting_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--prompt", "a", "--trace", "a.json", "--plugin.trace.path", "b.json"]) == 2
    assert "--trace and --plugin.trace.path are one setting" in capsys.readouterr().err


def test_generate_writes_a_trace(tmp_path: Path) -> None:
    """Through the installed command, so that the page is found where the package has it."""
    out = tmp_path / "out.html"
    code = "import sys; from modelrunner.cli import main; sys.exit(main())"
    arguments = ["-p", "byte_tokens", "generate", "--model", dense().model, "--prompt", "abc", "--max-tokens", "3", "--trace", str(out)]
    plugin = ["from modelrunner.testing.tiny import ByteTokenizerPlugin", "MODELRUNNER_API = '>=1,<2'"]
    (tmp_path / "byte_tokens.py").write_text("\n".join([*plugin, "tokenizer = ByteTokenizerPlugin().tokenizer", ""]))
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 2" in out.read_text()
