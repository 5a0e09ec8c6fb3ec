"""Reading YAML: the line of every value, and refusals instead of surprises."""

import pytest

from sgl_omni.config.yaml_source import Document, read_yaml


def read(text: str) -> Document:
    return read_yaml(text, "f.yaml")


def test_every_value_knows_its_line() -> None:
    document = read("name: x\nstages:\n  a:\n    gpu: [0,\n      1]\n")
    assert document.data == {"name": "x", "stages": {"a": {"gpu": [0, 1]}}}
    assert str(document.origin(("name",))) == "f.yaml:1"
    assert str(document.origin(("stages", "a", "gpu"))) == "f.yaml:4"
    assert str(document.origin(("stages", "a", "gpu", 1))) == "f.yaml:5"
    assert str(document.origin(("stages", "a", "unset"))) == "f.yaml:3"


def test_a_key_written_twice_is_refused_with_both_lines() -> None:
    [violation] = read("a: 1\nb:\n  c: 1\n  c: 2\n").violations
    assert (violation.code, str(violation.place)) == ("PLAN-021", "f.yaml:4")
    assert violation.message == "'b.c' is written twice; the first is in line 3"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", True),
        ("'on'", "on"),
        ("0x1F", 31),
        ("1_000", 1000),
        ("~", None),
        ("1e3", "1e3"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("2024-13-45", "2024-13-45"),
        ("=", "="),
        ("!!str 5", "5"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    document = read(f"key: {text}")
    assert document.violations == []
    assert document.data == {"key": value}


def test_keys_are_text_whatever_yaml_would_make_of_them() -> None:
    assert read("on: 1\n2: 3\nnull: 4\n").data == {"on": 1, "2": 3, "null": 4}


def test_anchors_and_merges_keep_their_lines() -> None:
    document = read("base: &b {gpu: 0, tp_size: 1}\nuse:\n  <<: *b\n  gpu: 2\n")
    assert document.data["use"] == {"gpu": 2, "tp_size": 1}
    assert str(document.origin(("use", "gpu"))) == "f.yaml:4"
    assert str(document.origin(("use", "tp_size"))) == "f.yaml:1"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "not YAML"),
        ("a: *nowhere", "names no anchor"),
        ("a: &x [*x]", "holds itself"),
        ("a: 1\n---\nb: 2\n", "second document"),
        ("a: \x00", "not YAML"),
        ("[" * 50, "nested more than"),
        ("[" * 5000, "nesting depth"),
    ],
)
def test_what_cannot_be_read_is_one_refusal(text: str, says: str) -> None:
    [violation] = read(text).violations
    assert violation.code == "PLAN-020"
    assert says in violation.message


def test_aliases_cannot_multiply_without_bound() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    [violation] = read("\n".join(lines)).violations
    assert "more than" in violation.message


@pytest.mark.parametrize("text", ["!!python/object:os.system x", "!mine x", "!!float abc"])
def test_tags_mean_nothing_here(text: str) -> None:
    [violation] = read(f"a: {text}").violations
    assert (violation.code, str(violation.place)) == ("PLAN-023", "f.yaml:1")
