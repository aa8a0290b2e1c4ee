"""Version of the installed Megatron, and checks that it is supported. The only module that compares versions."""

import importlib.util
from pathlib import Path

from megatron_epp.plan.errors import EppError

SUPPORTED = ">=0.17,<0.20"
RECOMMENDED = "0.19.2"


def installed_version() -> str:
    """Return the version of the megatron.core that `import megatron.core` would load, from a wheel or a clone.

    It is read from the source tree, not from package metadata, which names the wheel even where a clone shadows it.
    Raises EppError if there is none.
    """
    try:
        core = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        core = None
    if core is None or not core.submodule_search_locations:
        raise EppError(f'Megatron is not installed: pip install "megatron-core[training]=={RECOMMENDED}"')
    path = Path(core.submodule_search_locations[0]) / "package_info.py"
    spec = importlib.util.spec_from_file_location("_megatron_package_info", path)
    if spec is None or spec.loader is None or not path.exists():
        raise EppError(f"{path.parent} has no package_info.py: it is not a Megatron that megatron-epp {SUPPORTED} knows")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)


def matches(version: str, versions: str) -> bool:
    """True if `version` lies in a range such as ">=0.19,<0.20"; a release candidate of 0.19 counts as before 0.19."""
    from packaging.specifiers import SpecifierSet  # which torch and Megatron bring; most commands need neither

    return SpecifierSet(versions).contains(version, prereleases=True)


def check_megatron(allow_unknown: bool = False) -> str:
    """Return the installed version. Raises EppError if it is missing, or outside SUPPORTED and not `allow_unknown`."""
    version = installed_version()
    if allow_unknown or matches(version, SUPPORTED):
        return version
    raise EppError(
        f"megatron-core {version} is installed and megatron-epp supports {SUPPORTED}: "
        f'pip install "megatron-core[training]=={RECOMMENDED}", or pass --epp-allow-unknown-megatron'
    )
