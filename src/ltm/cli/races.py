"""The races of a benchmark: their conditions, and their rows as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltm.cli.candidates import Paddock

if TYPE_CHECKING:
    from ltm.evaluation.latency import Candidate, Conditions, Timing


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Batch sizes x precisions x scopes."""

    batch_sizes: Sequence[int]
    dtypes: Sequence[str]
    scopes: Sequence[str]
    rounds: int
    warmup: int
    channels_last: bool

    def conditions(
        self, model: str, image_size: tuple[int, int], device: str
    ) -> Iterator[Conditions]:
        from ltm.evaluation.latency import Conditions

        for scope, dtype, batch_size in product(self.scopes, self.dtypes, self.batch_sizes):
            yield Conditions(
                model=model,
                image_size=image_size,
                batch_size=batch_size,
                dtype=dtype,
                scope=scope,  # pyright: ignore[reportArgumentType]
                device=device,
                channels_last=self.channels_last,
                rounds=self.rounds,
                warmup=self.warmup,
            )


class Results:
    """Rows as they come: printed at once, written after every race."""

    def __init__(
        self, output: Path | None, device: Any, *, keep: bool, settings: dict[str, object]
    ) -> None:
        from ltm.evaluation.environment import describe
        from ltm.evaluation.records import TimingFile
        from ltm.evaluation.timing import TimingLock

        path = None if output is None else output / "metrics.json"
        self.file = TimingFile(path, keep=keep)
        self.environment = describe(device)
        self.file.start_run(self.environment, settings)
        self.lock = TimingLock(None if path is None else path.with_suffix(".timing"))
        self.output = output
        self._ran: list[bool] = []
        packages = ", ".join(f"{n} {v}" for n, v in self.environment.packages.items())
        print(f"{self.environment.device}, {packages}", flush=True)

    def race(self, paddock: Paddock, conditions: Conditions, modes: Sequence[str]) -> None:
        """Race whatever is not in the file yet, together with the base."""
        from ltm.evaluation.latency import BASE, did_not_run, measure_latency

        training = conditions.scope == "training"
        with self.lock.preparing():
            ready, rows = [paddock.candidate(BASE, training=training)], []
            for method in paddock.methods:
                try:
                    candidate = paddock.candidate(method, training=training)
                except ValueError as error:
                    ratio = paddock.ratio_of(method)
                    rows += did_not_run(method, ratio, conditions, modes, str(error))
                    continue
                if not self._held(candidate, conditions, modes):
                    ready.append(candidate)
            images = paddock.batch(conditions.batch_size) if len(ready) > 1 else None
        rows = [row for row in rows if not self.file.holds(row, self.environment.device)]
        self._announce(conditions)
        if images is not None:
            end_to_end = conditions.scope == "end-to-end"
            rows += measure_latency(
                ready,
                conditions,
                modes,
                images=images,
                loader=paddock.loader(conditions.batch_size) if end_to_end else None,
                lock=self.lock,
            )
        elif not rows:
            print("  measured before", flush=True)
        self._add(rows)

    def refuse(self, races: Iterable[Conditions], modes: Sequence[str], reason: str) -> None:
        """Say of a model that it cannot even run untouched, in a row of each of its races."""
        from ltm.evaluation.latency import BASE, did_not_run

        for conditions in races:
            self._announce(conditions)
            self._add(did_not_run(BASE, None, conditions, modes, reason))

    def _announce(self, conditions: Conditions) -> None:
        title = f"{conditions.model}, batch {conditions.batch_size}, {conditions.dtype}"
        print(f"\n{title}, {conditions.scope}:", flush=True)

    def require_one(self) -> None:
        """Fail where there were rows, and all of them say why they did not run."""
        if self._ran and not any(self._ran):
            raise SystemExit(1)

    def _add(self, rows: list[Timing]) -> None:
        self._ran += [row.milliseconds is not None for row in rows]
        self.file.add(rows)
        for row in rows:
            print(f"  {_line(row)}", flush=True)

    def _held(self, candidate: Candidate, conditions: Conditions, modes: Sequence[str]) -> bool:
        from ltm.evaluation.latency import did_not_run

        rows = did_not_run(candidate.method, candidate.ratio, conditions, modes, "")
        return all(self.file.holds(row, self.environment.device) for row in rows)

    def close(self) -> None:
        """Write the table, and say where it is."""
        self.file.write_table()
        if self.output is not None and self.file.rows:
            print(f"\n{self.where_they_are()}", flush=True)

    def where_they_are(self) -> str:
        if self.output is None:
            return "nothing was written: give --output"
        return f"{len(self.file.rows)} rows are in {self.output}/metrics.json and table.md"


def _line(row: Timing) -> str:
    name = row.method if row.ratio is None else f"{row.method} {row.ratio:g}"
    start = f"{name:<24} {row.mode:<18}"
    if row.milliseconds is None or row.quartiles is None:
        return f"{start} did not run: {row.error}"
    low, high = row.quartiles
    text = f"{start} {row.milliseconds:9.3f} ms ({low:.3f}-{high:.3f}) "
    text += f"{row.images_per_second:9.1f} images/s  {row.verdict}"
    if row.best_speedup is not None:
        text += f" ({row.best_speedup:.2f}x against base's best mode)"
    return text
