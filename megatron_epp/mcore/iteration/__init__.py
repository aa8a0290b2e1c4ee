"""A training iteration by a plan. In the order in which it runs, for each of the three doors:

1. Call: `document_schedule` (Megatron's loop with ``--epp``), `features.losses.sample_schedule` (`wrap_samples`), or
   `microbatch_schedule` (`wrap` and `install`; arguments in `wrap` and `schedule_call`).
2. Batch and plan: documents and samples from `data.iterator`, planned by `SlicedRun` (`sliced_run`); microbatches from
   `microbatch_shapes`, agreed on in `microbatch_agreement` and planned by `MicrobatchRun` (`microbatch_run`), where Megatron's
   loop lets it ahead of their iteration. Both are a `Run` (`base_run`): groups, links, caps, costs.
3. Run: `Run.run_plan` gives a rank's part of the plan to the executor, with `features`, `device_inputs` and the
   `reduction` of gradients. Microbatches run on a `microbatch_stage`, slices on `model.stage`.
4. After it: `report` collects figures (`loggers`), and features follow (`RunFeature.after`). The next
   iteration's `IterationReport.log_previous_and_begin` logs a report's line; where the names of settings are not `TRAINING`, as
   with `wrap`, the thread of reports does.
"""
