"""Variables that a run sets: references to the environment stay references in all that is saved and shown."""

import subprocess

import pytest
import yaml

from megatron_epp.launch.command import Launch, save_run
from megatron_epp.launch.environment_variables import environment_to_set, exports
from megatron_epp.launch.yaml_settings import SettingsError, load_settings

SECRET = 'hunter2-"$x'
REFERENCES = ["${EPP_TEST_SOURCE}", "${EPP_TEST_SOURCE:other}", "${oc.env:EPP_TEST_SOURCE}", "${oc.env:EPP_TEST_SOURCE,other}"]


@pytest.fixture
def source(monkeypatch):
    monkeypatch.setenv("EPP_TEST_SOURCE", SECRET)
    for name in ("EPP_TEST_UNSET", "EPP_TEST_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def loaded(tmp_path, values, *overrides):
    """The section as it comes out of a file that includes another, and overrides."""
    (tmp_path / "under.yaml").write_text(yaml.safe_dump({"launch": {"environment": values}, "megatron": {"save": "runs/a"}}))
    (tmp_path / "over.yaml").write_text("include: under.yaml\nlaunch: {environment: {EPP_TEST_PLAIN: 1}}")
    settings = load_settings([tmp_path / "over.yaml"], overrides)
    return settings, Launch.of(settings).environment


def run_saved(folder, *drop):
    """The saved command, where some variables are not set."""
    words = [word for name in drop for word in ("-u", name)]
    return subprocess.run(["env", *words, "bash", folder / "command.sh"], capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("reference", REFERENCES)
def test_a_value_from_the_environment_is_saved_as_where_it_came_from(reference, tmp_path):
    settings, values = loaded(tmp_path, {"EPP_TEST_API_KEY": f"Bearer {reference}"})
    assert environment_to_set(values) == {"EPP_TEST_API_KEY": f"Bearer {SECRET}", "EPP_TEST_PLAIN": "1"}
    save_run(tmp_path / "run", settings, ["sh", "-c", 'echo "$EPP_TEST_API_KEY"'], values)
    saved = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    assert not [name for name, text in saved.items() if "hunter2" in text]
    assert f"Bearer {reference}" in saved["settings.yaml"]
    assert run_saved(tmp_path / "run").stdout == f"Bearer {SECRET}\n"
    assert load_settings([tmp_path / "run" / "settings.yaml"]) == settings
    alone = run_saved(tmp_path / "run", "EPP_TEST_SOURCE")
    assert alone.returncode != 0
    assert "EPP_TEST_SOURCE: is not set, and EPP_TEST_API_KEY takes its value" in alone.stderr
    assert alone.stdout == ""
    assert "hunter2" not in "".join(exports(values, masked=True))


@pytest.mark.usefixtures("source")
def test_a_variable_that_is_handed_on_must_be_there_again(tmp_path):
    settings, values = loaded(tmp_path, {"EPP_TEST_SOURCE": "${EPP_TEST_SOURCE}"})
    assert environment_to_set(values) == {"EPP_TEST_PLAIN": "1"}
    save_run(tmp_path / "run", settings, ["true"], values)
    assert "hunter2" not in (tmp_path / "run" / "settings.yaml").read_text()
    assert run_saved(tmp_path / "run").returncode == 0
    assert "EPP_TEST_SOURCE: is not set" in run_saved(tmp_path / "run", "EPP_TEST_SOURCE").stderr


@pytest.mark.usefixtures("source")
def test_a_secret_that_is_given_is_masked_where_it_is_shown_and_runs_where_it_is_saved(tmp_path):
    settings, values = loaded(tmp_path, {"EPP_TEST_API_KEY": SECRET, "OMP_OTHER": "shown"})
    shown = exports(values, masked=True)
    assert shown == ["export EPP_TEST_API_KEY='***'", "export EPP_TEST_PLAIN=1", "export OMP_OTHER=shown"]
    save_run(tmp_path / "run", settings, ["sh", "-c", 'echo "$EPP_TEST_API_KEY"'], values)
    assert run_saved(tmp_path / "run").stdout == f"{SECRET}\n"


@pytest.mark.usefixtures("source")
def test_what_the_environment_has_wins():
    values = {"EPP_TEST_SOURCE": "theirs", "EPP_TEST_OTHER": 1}
    assert environment_to_set(values) == {"EPP_TEST_OTHER": "1"}
    assert exports(values) == ["export EPP_TEST_OTHER=1"]


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("value", [None, "${EPP_TEST_UNSET:null}", "${oc.env:EPP_TEST_UNSET,null}"])
def test_null_leaves_a_variable_out(value, tmp_path):
    _, values = loaded(tmp_path, {"EPP_TEST_API_KEY": value})
    assert environment_to_set(values) == {"EPP_TEST_PLAIN": "1"}
    assert exports(values) == ["export EPP_TEST_PLAIN=1"]


@pytest.mark.usefixtures("source")
def test_text_is_taken_as_it_is_and_not_as_a_number(tmp_path, monkeypatch):
    monkeypatch.setenv("EPP_TEST_SOURCE", "0123_4")
    _, values = loaded(tmp_path, {"EPP_TEST_API_KEY": "${EPP_TEST_SOURCE}", "EPP_TEST_B": "${EPP_TEST_UNSET:1e3}"})
    assert environment_to_set(values) == {"EPP_TEST_API_KEY": "0123_4", "EPP_TEST_B": "1e3", "EPP_TEST_PLAIN": "1"}


@pytest.mark.usefixtures("source")
def test_other_settings_can_be_part_of_a_value_beside_a_reference(tmp_path):
    settings, values = loaded(tmp_path, {"EPP_TEST_DIR": "${megatron.save}/${EPP_TEST_SOURCE}"})
    assert settings["launch"]["environment"]["EPP_TEST_DIR"] == "runs/a/${EPP_TEST_SOURCE}"
    assert environment_to_set(values)["EPP_TEST_DIR"] == f"runs/a/{SECRET}"


@pytest.mark.usefixtures("source")
def test_an_override_keeps_references_too(tmp_path):
    settings, values = loaded(tmp_path, {}, "launch.environment={EPP_TEST_API_KEY: '${EPP_TEST_SOURCE}'}")
    assert settings["launch"]["environment"]["EPP_TEST_API_KEY"] == "${EPP_TEST_SOURCE}"
    assert environment_to_set(values)["EPP_TEST_API_KEY"] == SECRET


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("reference", ["${EPP_TEST_UNSET}", "${oc.env:EPP_TEST_UNSET}"])
def test_a_variable_that_is_not_set_is_named_with_what_would_do(reference):
    with pytest.raises(SettingsError) as error:
        environment_to_set({"EPP_TEST_API_KEY": reference})
    assert str(error.value) == (
        "launch.environment.EPP_TEST_API_KEY: EPP_TEST_UNSET is not set: export it, or give a default as "
        "${EPP_TEST_UNSET:default}"
    )
