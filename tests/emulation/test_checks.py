"""The checks of a debug build (cuda/checks.cuh, checks.cu) on the CPU: addresses within an op's
operands, and the message that the host reads after a trap."""

import re

import pytest

pytestmark = pytest.mark.slow

WHERE = r" \(block 2,1,0, thread 5,0,0; .*checks\.cpp:\d+\)"


@pytest.mark.parametrize(
    "which, element, said",
    [
        *((which, 0, "") for which in range(6)),
        *((which, 4 if which in (1, 4) else 7, "") for which in range(6)),  # 16 bytes: 4 elements
        (0, 8, "x: element 8 is outside of 8"),
        (0, -1, "x: element -1 is outside of 8"),
        (0, 23, "y: element -1 is outside of 4"),  # the nearest is named
        (0, 28, "y: element 4 is outside of 4"),
        (1, 5, "x: element 8 is outside of 8"),  # the last of the four
        (1, -2, "x: element -2 is outside of 8"),
        (2, 8, "x: element 8 is outside of 8"),
        (3, 8, "x: element 8 is outside of 8"),
        (4, 6, "x: element 9 is outside of 8"),
        (5, 8, "ids: element 17: index 8 is outside of 8"),
        (5, -3, "ids: element 17: index -3 is outside of 8"),
    ],
)
def test_access_outside_names_operand_element_and_thread(compiled, which, element, said):
    text = compiled("checks", "access")(which, element).decode()
    assert re.fullmatch(f": {re.escape(said)}{WHERE}" if said else "", text), text
