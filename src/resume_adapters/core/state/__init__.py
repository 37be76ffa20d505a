"""State as data: captured from live objects, encoded, compared, digested. No disk, no clock, no ranks."""
