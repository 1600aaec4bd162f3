"""A step that can be run again: its state from before, its passes, and what replays of it show."""
