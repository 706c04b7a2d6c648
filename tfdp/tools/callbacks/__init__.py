"""Callbacks that build on tools: `Autotune`, `RunRecord`, `StepTimeline`."""
