"""What a GPU run found: checks that failed, and measurements in the form of build/bench.json."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure of ours beside the same work done by others and the ceiling of the card, measured in the same run."""

    metric: str
    unit: str
    ours: float
    peers: dict[str, float]
    floor: float | None  # the ceiling that the card showed: copy bandwidth or matrix rate; None = there is none
    better: str = "higher"

    def line(self) -> str:
        peers = ", ".join(f"{name} {value:.0f}" for name, value in self.peers.items())
        share = f"{self.ours / self.floor:6.1%} of ceiling" if self.floor else ""
        return f"{self.metric:44} {self.ours:8.0f} {self.unit:8} {share:17}   {peers}"


@dataclass(slots=True)
class Report:
    """Filled by the stages, printed as they go."""

    num_checks: int = 0
    failures: list[str] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    def check(self, name: str, error: str | None) -> None:
        self.num_checks += 1
        if error is not None:
            self.failures.append(f"{name}: {error}")
            print(f"FAILED {name}: {error}", flush=True)

    def measure(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        print(measurement.line(), flush=True)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(x) for x in self.measurements], indent=1) + "\n")


def error_of(check: Callable[[], None]) -> str | None:
    """What a check raised, or None."""
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    return None
