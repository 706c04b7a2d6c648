"""The request that the runner sends to a worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from benchmarks.bench.cases import Case
from benchmarks.bench.processes.arms import GROUP_ARMS
from benchmarks.bench.results import ArmResult, CaseResult


@dataclasses.dataclass(frozen=True)
class Request:
    """One case on one number of devices.

    Args:
      devices: number of replicas; with several workers, of each.
      workers: processes, one core each; 1 measures within one process.
      repeats: figures per arm.
      arms: keys of `arms.ARMS`, with several workers of `processes.arms.GROUP_ARMS`;
        empty for the case's own.
      quick: use the case's small subject, and two calls per repeat.
      device_type: "cpu" makes `devices` logical CPUs, "gpu" uses the first GPUs.
      intra_op_threads: threads of one TensorFlow op. With 1 a logical CPU stands for a
        core, and more devices for more hardware.
      warmup_calls: untimed calls per arm.
    """

    case: Case
    devices: int = 2
    workers: int = 1
    repeats: int = 20
    arms: tuple[str, ...] = ()
    quick: bool = False
    device_type: str = "cpu"
    intra_op_threads: int = 1
    warmup_calls: int = 3

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Request:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**plain, "case": Case(**plain["case"])})

    @property
    def arm_names(self) -> tuple[str, ...]:
        if self.arms:
            return tuple(self.arms)
        if self.workers == 1:
            return tuple(self.case.arms)
        return tuple(
            name
            for name, arm in GROUP_ARMS.items()
            if arm.by_default and self.case.suite in arm.works
        )

    @property
    def subject_name(self) -> str:
        """The gradient set or model to run."""
        return self.case.quick_subject if self.quick else self.case.subject

    @property
    def calls(self) -> int:
        """Timed calls per arm and repeat."""
        return 2 if self.quick else self.case.calls

    def result(
        self,
        subject: Mapping[str, Any],
        arms: Mapping[str, ArmResult],
        left_out: Mapping[str, str] = MappingProxyType({}),
        more_settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> CaseResult:
        """The result of this request.

        Args:
          subject: the sizes of what was measured.
          arms: the figures of each arm.
          left_out: why an arm was not timed, by arm.
          more_settings: settings and facts beside `settings`.
        """
        return CaseResult(
            case=self.case.name,
            suite=self.case.suite,
            devices=self.workers * self.devices,
            subject=subject,
            settings={**self.settings(), **more_settings},
            arms=arms,
            left_out=dict(left_out),
        )

    def settings(self) -> dict[str, Any]:
        """The settings that determine the figures, for the report."""
        return {
            "repeats": self.repeats,
            "calls_per_repeat": self.calls,
            "warmup_calls": self.warmup_calls,
            "device_type": self.device_type,
            "intra_op_threads": self.intra_op_threads,
            "quick": self.quick,
        }
