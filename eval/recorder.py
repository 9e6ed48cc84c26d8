"""The results of a folder over several runs: what is there already, and that what is added belongs to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from eval.names import TIMING_REJECTED
from eval.results import Answer, Build, Fidelity, Load, Record, Rejected, Results, Run, Timing
from redknot.errors import ConfigError


class Recorder:
    """Adds records to a folder's results. The run stands in front of its first record: one that adds none leaves none.

    ``fixed`` names the options that must be those of earlier runs of the tool. ConfigError when the folder's results
    are of another model, of arms that are others by the same names, or of other options.
    """

    def __init__(self, folder: Path, run: Run, fixed: Sequence[str]) -> None:
        self.run = run
        self._results = Results(folder)
        self._written = False
        try:
            for earlier in self._results.records:
                if isinstance(earlier, Run):
                    _check_same(folder, earlier, run, fixed)
        except ConfigError:
            self._results.close()
            raise

    @property
    def path(self) -> Path:
        """The file."""
        return self._results.path

    @property
    def records(self) -> Sequence[Record]:
        """All records of the folder."""
        return self._results.records

    def add(self, record: Answer | Timing | Fidelity | Load | Build | Rejected) -> None:
        """Append a record of this run."""
        if not self._written:
            self._results.add(self.run)
            self._written = True
        self._results.add(record)

    def served_by(self, versions: Mapping[str, str]) -> None:
        """Note what serves, before anything is recorded."""
        self.run = self.run.model_copy(update={"versions": self.run.versions | dict(versions)})

    def close(self) -> None:
        """Write it out."""
        self._results.close()

    def answers(self, dataset: str) -> Iterator[Answer]:
        """The answers of a data set."""
        return (one for one in self.records if isinstance(one, Answer) and one.dataset == dataset)

    def answered(self, dataset: str) -> set[tuple[str, str]]:
        """(item, arm) that have an answer, or were rejected."""
        return {(one.item, one.arm) for one in self.answers(dataset)} | self._rejected(dataset, timing=False)

    def compared(self, dataset: str) -> set[tuple[str, str]]:
        """(item, arm) whose fidelity is known."""
        return {(one.item, one.arm) for one in self.records if isinstance(one, Fidelity) and one.dataset == dataset}

    def timed(self, dataset: str, item: str, pairs: int) -> set[str]:
        """The arms of an item with at least that many measured hot pairs in one run, or rejected in timing."""
        counts = Counter(
            (one.run, one.arm) for one in self.timings(dataset, item) if not one.warmup and one.state == "hot"
        )
        enough = {arm for (_, arm), count in counts.items() if count >= pairs}
        return enough | {arm for name, arm in self._rejected(dataset, timing=True) if name == item}

    def timings(self, dataset: str, item: str) -> Iterator[Timing]:
        """The times of an item."""
        found = (one for one in self.records if isinstance(one, Timing))
        return (one for one in found if one.dataset == dataset and one.item == item)

    def _rejected(self, dataset: str, timing: bool) -> set[tuple[str, str]]:
        rejected = (one for one in self.records if isinstance(one, Rejected) and one.dataset == dataset)
        return {(one.item, one.arm) for one in rejected if one.reason.startswith(TIMING_REJECTED) == timing}


def _check_same(folder: Path, earlier: Run, run: Run, fixed: Sequence[str]) -> None:
    differing = [
        f"the model's {name}" for name in run.model if name != "name" and earlier.model.get(name) != run.model[name]
    ]
    same = earlier.digests.keys() & run.digests.keys()
    differing += [f"profile {arm}" for arm in sorted(same) if earlier.digests[arm] != run.digests[arm]]
    if (earlier.engine, earlier.tp) != (run.engine, run.tp):
        differing.append("the engine")
    if earlier.tool == run.tool:
        differing += [f"option {name}" for name in fixed if earlier.options.get(name) != run.options.get(name)]
    if differing:
        raise ConfigError(f"{folder} holds results of another run: {', '.join(differing)} differ; give another --out")
