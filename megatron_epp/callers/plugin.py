"""Any other framework: import this module in its training processes, and plans run Megatron's schedules from then on.

ms-swift takes its path as ``--external_plugins``; in Megatron-Bridge it is a line of the script, in NeMo-RL of the file with
the class that ``worker_extension_cls_fqn`` names. Lengths are found in the columns that `mcore.microbatches.source` knows;
where a framework says them in another way, call `megatron_epp.install` with a function instead.
"""

from __future__ import annotations

from megatron_epp.callers import settings, when_imported


def _install() -> None:
    import megatron_epp

    found = settings()
    if found is not None:
        megatron_epp.install(**found)


if settings() is not None:
    when_imported("megatron.core.pipeline_parallel.schedules", _install)
