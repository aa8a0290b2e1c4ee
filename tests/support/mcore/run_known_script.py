"""Runs a script as `megatron_epp.run` does, in a forked rank, where functions of the tests' script are Megatron's own.

Python starts once for all forked ranks, so that `known_as_megatrons`, which acts when it starts, has no effect in them.
"""

import runpy

from megatron_epp.mcore.patches.fingerprints import SCRIPTS
from tests.support.mcore.known_scripts import USER_SCRIPT, fingerprints_of

for name, found in fingerprints_of(USER_SCRIPT.read_text()).items():
    SCRIPTS[name] = (*SCRIPTS.get(name, ()), found)
runpy.run_module("megatron_epp.run", run_name="__main__", alter_sys=True)
