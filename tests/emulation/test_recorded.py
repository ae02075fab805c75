"""Recorded work on the CPU: what an op may read before the work before it is done (graph.cpp)."""

import numpy as np
import pytest
from words import call

pytestmark = pytest.mark.slow


def test_memory_of_the_graph_is_not_read_ahead(compiled):
    """Work before in the graph writes it: the copy, say, of an operand without the right layout."""
    answers = np.full((2, 4), -1, np.int32)
    call(compiled("recorded", "reads_ahead"), answers)
    assert answers.tolist() == [[1, 0, 0, 1], [0, 0, 0, 0]]
