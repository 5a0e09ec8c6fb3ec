"""The engine's benchmark of its host part runs anywhere, and says what it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_hosts_part_is_measured_at_each_batch() -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "engine.py"
    options = [
        "--host",
        "--shape",
        "tiny",
        "--batch",
        "1,3",
        "--context",
        "40",
        "--steps",
        "30",
        "--rounds",
        "2",
        "--json",
    ]
    done = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["benchmark"], found["columns"]) == ("engine-host", 4)
    expected = [(n, batch, name) for n in range(2) for batch in (1, 3) for name in ("together", "apart")]
    assert [(row["round"], row["batch"], row["requests"]) for row in found["rounds"]] == expected
    assert all(row["host_us"] > 0 for row in found["rounds"])
