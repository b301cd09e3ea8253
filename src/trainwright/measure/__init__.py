"""What was seen: records are parsed, rates are fitted, predictions are held against them. Pure."""
