"""Rows of acts of the schedules of the literature, a family a file; `spec/schedule.py` names them."""
