"""What the fuzz of the C extension (tests/fuzz.py) is made of: hostile.py, the objects that its lines
speak of, and lines.py, which writes the lines."""
