"""The trainer: tasks, meshes, run folders, checkpoints and reports."""
