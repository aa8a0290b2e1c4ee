"""What a training knows of planning: a process that it asks by name, and plans as messages. It imports no planner."""
