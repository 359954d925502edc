"""Tensors in memory that two processes share: what goes in comes out there, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from modelrunner.errors import CheckpointError
from modelrunner.tensor_file import TensorFile, pack, read_tensors

TENSORS: dict[str, torch.Tensor] = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "transposed": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    "part": torch.arange(40, dtype=torch.float64)[3:9:2],
    "number": torch.tensor(7, dtype=torch.int64),
    "nothing": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
    "half": torch.tensor([1.5, float("inf"), -0.0], dtype=torch.float16),
    "eight": torch.tensor([0.5, -2.0], dtype=torch.float8_e4m3fn),
    "learned": torch.nn.Parameter(torch.ones(3)),
}


def held() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Both kinds of file; the folder in which the second lies."""
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("this system has no memfd")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_tensors_come_out_as_they_went_in(folder: Path) -> None:
    before = held()
    file = TensorFile()
    for name, tensor in TENSORS.items():
        file.add(name, tensor)
    found = dict(read_tensors(file.path, file.entries))
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    found["matrix"].zero_()
    assert dict(read_tensors(file.path, file.entries))["matrix"].equal(TENSORS["matrix"]), "a reader's changes are its own"
    file.close()
    assert found["half"][0] == 1.5, "who reads keeps the memory"
    file.close()  # again: nothing to do
    del found
    gc.collect()
    assert held() == before
    assert list(folder.iterdir()) == []


def test_another_process_reads_them(folder: Path) -> None:
    file = TensorFile()
    file.add("a", torch.arange(5, dtype=torch.bfloat16))
    code = (
        "from modelrunner.messages import TensorEntry; from modelrunner.tensor_file import read_tensors\n"
        f"print([(n, t.tolist()) for n, t in read_tensors({file.path!r}, [TensorEntry('a', 'bfloat16', [5], 0)])])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    file.close()
    assert done.stdout == "[('a', [0.0, 1.0, 2.0, 3.0, 4.0])]\n"


def test_no_tensors_at_all(folder: Path) -> None:
    file = pack([], lambda: False)
    assert file is not None
    assert list(read_tensors(file.path, file.entries)) == []
    file.close()


def test_what_is_given_up_or_fails_leaves_nothing(folder: Path) -> None:
    before = held()
    seen: list[str] = []

    def pairs() -> Any:
        for name in "abc":
            seen.append(name)
            yield name, torch.ones(3)
        raise OSError("the sender is gone")

    assert pack(pairs(), lambda: len(seen) == 2) is None
    assert seen == ["a", "b"]
    with pytest.raises(OSError, match="the sender is gone"):
        pack(pairs(), lambda: False)
    wrong: list[Any] = [("a", torch.ones(3)), ("b", [1.0])]
    with pytest.raises(CheckpointError, match=r"the new weights: got 'b' with a list; pairs of a name and a torch\.Tensor are needed"):
        pack(wrong, lambda: False)
    forgotten = pack([("a", torch.ones(3))], lambda: False)
    assert held() == before + 1
    del forgotten
    gc.collect()
    assert held() == before
    assert list(folder.iterdir()) == []


def test_large_tensors_are_written_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes 2 GiB at most in a call, and less when it likes."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    file = TensorFile()
    values = torch.randn(1000)
    file.add("a", torch.ones(1, dtype=torch.uint8))
    file.add("b", values)
    assert dict(read_tensors(file.path, file.entries))["b"].equal(values)
    file.close()
