# SPDX-License-Identifier: Apache-2.0
"""Whether answers of two servers are the same up to rounding. No server is needed.

Backends round in other places, and one server itself does when a prompt is computed in another batch or from a
prefix: with random weights that moves log probabilities, and turns first tokens that are as likely. So answers are
compared by the log probabilities of their candidates, within a bound that follows from the reference against itself.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from attention_serving_server import Candidates, Scored

MARGIN = 2.0
"""Of the bound over the largest difference of the reference from itself: another sample of the same noise may exceed
the first one's largest, and another kernel has noise of its own."""
LEAST_BOUND = 2**-4
"""Of a reference that nearly repeats itself, as on a CPU: a few roundings of a logit to bf16 (2**-6 from 2 to 4)."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Between the candidates of one place."""

    largest: float
    """Between log probabilities; of a candidate that the other does not name, by how much it should have been."""
    common: int
    """Candidates that both name."""
    candidates: int
    same: bool
    """The token that was chosen is the reference's best."""
    behind: float
    """By how much the reference has it behind its best; infinite if it does not name it."""


def difference(chosen: int, found: Candidates, reference: Candidates) -> Difference:
    """Compare the token that was chosen, and its candidates, with a reference's candidates."""
    one, other = ({token: log for log, token in ranks} for ranks in (found, reference))
    both = one.keys() & other.keys()
    last_one, last_other = min(one.values()), min(other.values())
    gaps = [abs(one[token] - other[token]) for token in both]
    gaps += [max(0.0, one[token] - last_other) for token in one.keys() - both]
    gaps += [max(0.0, other[token] - last_one) for token in other.keys() - both]
    best = max(other.values())
    behind = best - other[chosen] if chosen in other else float("inf")
    return Difference(max(gaps), len(both), len(other), chosen == reference[0][1], behind)


def verdict(found: Difference, bound: float) -> str:
    """`equal`; `tie`, another first token that is as likely; or `differs`."""
    if found.largest > bound or 2 * found.common < found.candidates:
        return "differs"
    if found.same:
        return "equal"
    return "tie" if found.behind <= bound else "differs"


def bound_of(own: Iterable[Difference]) -> float:
    """What may be between two servers, from differences of the reference from itself."""
    return max(LEAST_BOUND, MARGIN * max((one.largest for one in own), default=0.0))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences of one kind, by the name of what was compared."""

    found: dict[str, Difference]
    bound: float

    @property
    def differing(self) -> list[str]:
        """Names of what is beyond the bound, the largest difference first."""
        wrong = [name for name, one in self.found.items() if verdict(one, self.bound) == "differs"]
        return sorted(wrong, key=lambda name: -self.found[name].largest)

    def summary(self) -> dict[str, Any]:
        """Counts and sizes."""
        said = [verdict(one, self.bound) for one in self.found.values()]
        sizes = [one.largest for one in self.found.values()]
        return {
            "compared": len(said),
            **{word: said.count(word) for word in ("equal", "tie", "differs")},
            "median": round(statistics.median(sizes), 4),
            "largest": round(max(sizes), 4),
            "common_least": min(one.common for one in self.found.values()),
            "bound": round(self.bound, 4),
        }


def first(found: Scored, reference: Scored) -> Difference:
    """Between the first tokens of two answers."""
    return difference(found.ids[0], found.steps[0], reference.steps[0])


def places(name: str, found: Scored, reference: Sequence[Candidates]) -> dict[str, Difference]:
    """Step by step, by "name/step"."""
    steps = zip(found.ids, found.steps, reference, strict=True)
    return {f"{name}/{number}": difference(*step) for number, step in enumerate(steps, start=1)}


def encode_steps(steps: Sequence[Candidates]) -> list[str]:
    """A text for each."""
    return [" ".join(f"{token}:{log:.6g}" for log, token in ranks) for ranks in steps]


def encode(answer: Scored) -> dict[str, Any]:
    """For the result file."""
    return {"ids": " ".join(map(str, answer.ids)), "steps": encode_steps(answer.steps), "cached": answer.cached}


def decode(kept: dict[str, Any]) -> Scored:
    """The reverse of :func:`encode`."""
    steps = tuple(
        tuple((float(log), int(token)) for token, log in (pair.split(":") for pair in step.split()))
        for step in kept["steps"]
    )
    return Scored(tuple(map(int, kept["ids"].split())), steps, (), kept["cached"])
