"""The user's layout against the plain model, in float64, and faults that are planted to show that it would be
seen."""
