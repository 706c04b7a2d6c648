"""Callbacks that need a tool: `Autotune`, `RunRecord`, `StepTimeline`."""
