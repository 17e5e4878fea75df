from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.process import config


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    size_bytes: int = 1


class Example(msgspec.Struct, frozen=True):
    url: str
    limit_s: float = 1.5
    sizes: list[int] = []
    parts: list[Part] = []
    label: str | None = None
    is_fast: bool = False


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "phaseloom.toml"
    path.write_text('[example]\nurl = "from-file"\nlimit_s = 2.0\n\n[other]\nwhatever = 1\n')
    return path


def test_load_takes_the_environment_over_the_file_over_the_default(file: Path) -> None:
    environ = {"PHASELOOM_CONFIG": str(file), "PHASELOOM_EXAMPLE_URL": "from-environment"}
    assert config.load(Example, "example", environ) == Example("from-environment", limit_s=2.0)


def test_load_reads_the_file_it_is_given_instead(file: Path) -> None:
    file.write_text('[example]\nurl = "from-file"\n')
    assert config.load(Example, "example", {}, file=file).url == "from-file"


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("LIMIT_S", "3", Example("x", limit_s=3)),
        ("SIZES", "[1, 2]", Example("x", sizes=[1, 2])),
        ("PARTS", '[{"name": "a"}]', Example("x", parts=[Part("a")])),
        ("IS_FAST", "true", Example("x", is_fast=True)),
        ("LABEL", "12", Example("x", label="12")),
        ("LABEL", "null", Example("x", label="null")),
    ],
)
def test_load_parses_a_variable_as_json_unless_its_field_is_text(
    variable: str, text: str, expected: Example
) -> None:
    environ = {"PHASELOOM_EXAMPLE_URL": "x", f"PHASELOOM_EXAMPLE_{variable}": text}
    assert config.load(Example, "example", environ) == expected


def test_load_keeps_a_password_that_looks_like_json_as_it_is() -> None:
    assert config.load(Example, "example", {"PHASELOOM_EXAMPLE_URL": "123"}).url == "123"


def test_load_names_the_variable_and_the_known_ones_when_it_is_unknown() -> None:
    environ = {"PHASELOOM_EXAMPLE_URL": "x", "PHASELOOM_EXAMPLE_LIMITS": "1"}
    with pytest.raises(CallerError) as refused:
        config.load(Example, "example", environ)
    assert refused.value.info.field == "PHASELOOM_EXAMPLE_LIMITS"
    assert "PHASELOOM_EXAMPLE_LIMIT_S" in refused.value.info.remedy


def test_load_names_the_key_when_the_file_has_an_unknown_one(file: Path) -> None:
    file.write_text('[example]\nurl = "x"\nlimits = 1\n')
    with pytest.raises(CallerError) as refused:
        config.load(Example, "example", {}, file=file)
    assert refused.value.info.field == "[example] limits"


def test_load_names_what_to_set_when_a_value_is_missing() -> None:
    with pytest.raises(CallerError) as refused:
        config.load(Example, "example", {})
    assert refused.value.info.field == "PHASELOOM_EXAMPLE_URL"
    assert "set PHASELOOM_EXAMPLE_URL" in refused.value.info.remedy


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("LIMIT_S", "soon", "limit_s"),
        ("SIZES", "[1, null]", "sizes[1]"),
        ("PARTS", '[{"name": "a", "size": 1}]', "parts[0]"),
    ],
)
def test_load_names_source_and_place_when_a_value_does_not_fit(
    name: str, text: str, where: str
) -> None:
    environ = {"PHASELOOM_EXAMPLE_URL": "x", f"PHASELOOM_EXAMPLE_{name}": text}
    with pytest.raises(CallerError) as refused:
        config.load(Example, "example", environ)
    assert refused.value.info.field == f"PHASELOOM_EXAMPLE_{name}"
    assert where in refused.value.info.message


@pytest.mark.parametrize("setting", ["limit_s = inf", "limit_s = nan", "sizes = [1, -inf]"])
def test_load_refuses_numbers_that_are_not_finite(file: Path, setting: str) -> None:
    """Handed to a child in JSON, an infinity became null, upon which the child never started."""
    file.write_text(f'[example]\nurl = "x"\n{setting}\n')
    with pytest.raises(CallerError, match="finite") as refused:
        config.load(Example, "example", {}, file=file)
    assert refused.value.info.field == f"[example] {setting.split(maxsplit=1)[0]}"


def test_check_bounds_names_the_setting_and_its_bounds() -> None:
    bounds = {"limit_s": (0, 1)}
    config.check_bounds(Example("x", limit_s=1.0), "example", bounds)
    for value in (-0.5, 1.5, float("nan")):
        with pytest.raises(CallerError, match="use 0 to 1") as refused:
            config.check_bounds(Example("x", limit_s=value), "example", bounds)
        assert refused.value.info.field == "example.limit_s"
    endless = {"limit_s": (0, float("inf"))}
    with pytest.raises(CallerError, match="use 0 or more"):
        config.check_bounds(Example("x", limit_s=float("inf")), "example", endless)


@pytest.mark.parametrize("content", ["not toml", "example = 1"])
def test_load_refuses_a_file_that_is_not_what_it_should_be(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(CallerError):
        config.load(Example, "example", {"PHASELOOM_CONFIG": str(file)})


def test_load_refuses_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="cannot read"):
        config.load(Example, "example", {"PHASELOOM_CONFIG": str(tmp_path / "absent.toml")})


def test_load_without_section_takes_exact_names_and_leaves_others_alone(file: Path) -> None:
    environ = {
        "PHASELOOM_CONFIG": str(file),
        "PHASELOOM_URL": "top",
        "PHASELOOM_BUS_URL": "another section's",
    }
    assert config.load(Example, "", environ) == Example("top")


@pytest.mark.parametrize("name", ["exampel", "statemgr"])
def test_table_that_nobody_would_read_is_refused_in_a_file_of_one_section(
    file: Path, name: str
) -> None:
    file.write_text(f"[{name}]\nurl = 'x'\n")
    with pytest.raises(CallerError, match=f"only the table \\[example\\] .*{name}") as refused:
        config.load(Example, "example", {}, file=file)
    assert refused.value.info.field == "--example-file"
    assert "PHASELOOM_CONFIG" in (refused.value.info.remedy or "")


def test_file_of_one_section_that_cannot_be_read_is_named_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="cannot read") as refused:
        config.load(Example, "example", {}, file=tmp_path / "absent.toml")
    assert refused.value.info.field == "--example-file"
