"""What the fuzz of the C extension (tests/fuzz.py) is made of: grammar.py says what its lines may
be, lines.py draws them, hostile.py has the objects that they speak of."""
