"""The side of planning that a training knows: a process that it asks by name, and plans as messages. It imports no planner."""
