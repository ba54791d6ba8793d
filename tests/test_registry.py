"""Plug-ins are found by their file names, and are what a plug-in has to be."""

import subprocess
import sys

import pytest

from credit_like import registry
from credit_like.schema.base import Section

PLUGINS = [(kind, name) for kind in registry.KINDS for name in registry.names(kind)]


def test_a_module_with_an_underscore_has_a_hyphen_in_yaml():
    assert "linear-warmup-cosine" in registry.names("scheduler")
    assert registry.module("scheduler", "linear-warmup-cosine").__name__.endswith(".linear_warmup_cosine")


def test_private_modules_are_no_plugins():
    assert not [name for kind in registry.KINDS for name in registry.names(kind) if name[0] in "_-"]


@pytest.mark.parametrize("name", ["wxfromer", "WXFormer", "wxformr"])
def test_a_misspelt_name_is_answered_with_the_right_one(name):
    with pytest.raises(ValueError, match=f"got '{name}'; did you mean 'wxformer'"):
        registry.module("model", name)


@pytest.mark.parametrize("name", ["", "..", "os", "wxformer.model", "_mean", "xyzzy", 5, None, ["wxformer"]])
def test_only_plugins_can_be_named(name):
    with pytest.raises(ValueError, match=f"expected one of {', '.join(sorted(registry.names('loss')))}, got"):
        registry.module("loss", name)


@pytest.mark.parametrize(("kind", "name"), PLUGINS)
def test_the_defaults_of_a_config_are_valid_and_frozen(kind, name):
    config_class = getattr(registry.module(kind, name), "Config", None)
    if config_class is None:
        pytest.skip("a plug-in without options")
    config = config_class()
    assert isinstance(config, Section)
    assert config.type == name
    assert config_class.model_validate(config.model_dump(mode="json", by_alias=True)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.type = "other"


def test_importing_every_config_imports_no_torch():
    lines = [f"registry.module({kind!r}, {name!r})" for kind, name in PLUGINS]
    code = "import sys; from credit_like import registry\n" + "\n".join(lines) + "\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
