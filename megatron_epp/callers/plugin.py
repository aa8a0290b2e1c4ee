"""Any other framework: import this module in its training processes, and plans run Megatron's schedules from then on.

ms-swift takes its path as ``--external_plugins``; in Megatron-Bridge it is a line of the script, in NeMo-RL of the file with
the class that ``worker_extension_cls_fqn`` names. Lengths are found in the columns that `iteration.microbatch_shapes` knows;
where a framework says them in another way, call `megatron_epp.install` with a function instead.
"""

from __future__ import annotations

from megatron_epp.callers import install_behind

install_behind("megatron.core.pipeline_parallel.schedules")
