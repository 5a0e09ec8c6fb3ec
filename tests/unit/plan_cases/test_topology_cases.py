"""The planner cases of this folder, and those beside the repository where they are."""

import json
from pathlib import Path

import pytest
from plan_cases import check_folder, disagreements, read_case

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
SHARED = HERE.parents[3] / "shared" / "plan_cases"


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_case_agrees(name: str) -> None:
    assert list(disagreements(read_case(HERE / "cases" / f"{name}.yaml"), EXPECTED[name])) == []


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/plan_cases beside the repository")
def test_the_copied_cases_are_the_shared_ones(capsys: pytest.CaptureFixture[str]) -> None:
    agreeing, total = check_folder(SHARED)
    assert total == len(EXPECTED)
    assert agreeing == total, capsys.readouterr().out
