"""What a row of the fault list says."""

from dataclasses import dataclass, field

from tests.chaos.rig import Act, Shape

TWO_AND_TWO = Shape(2, 2)
NOTHING: frozenset[str] = frozenset()
ENDED_CLEANLY = frozenset({"error", "cut"})  # what a client may see when the router itself goes
UNNOTICED = "every answer is right"


@dataclass(frozen=True, slots=True)
class Row:
    """`allowed`: outcomes besides the right answer. `is_short`: part of the selection that CI runs."""

    name: str
    number: int  # of the fault matrix
    component: str
    fault: str
    moment: str
    expected: str
    proof: str
    act: Act = field(repr=False)
    shape: Shape = TWO_AND_TWO
    allowed: frozenset[str] = NOTHING
    is_short: bool = False
