"""Where pip is set up to look for packages, uv looks too."""

from scripts.pip_settings import arguments


def test_each_place_becomes_an_argument_of_uv():
    listed = ["global.index-url='https://a/simple'", "global.extra-index-url='file:///b/simple https://c/simple'"]
    assert list(arguments(listed)) == [
        *("--index-url", "https://a/simple"),
        *("--extra-index-url", "file:///b/simple"),
        *("--extra-index-url", "https://c/simple"),
    ]


def test_the_environment_goes_before_the_command_and_the_command_before_all():
    listed = ["global.find-links='/all'", "install.find-links='/command'"]
    assert list(arguments(listed)) == ["--find-links", "/command"]
    assert list(arguments([*listed, ":env:.find-links='/environment'"])) == ["--find-links", "/environment"]


def test_other_settings_and_commands_are_left_out():
    assert list(arguments(["global.timeout='60'", "download.index-url='https://a/simple'", "global.cert='/c.pem'"])) == []
