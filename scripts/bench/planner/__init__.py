"""The planner's speed and the quality of its plans: `python -m scripts.bench.planner`."""
