"""Rich rendering of plain values: explanations, schedules, pictures."""
