"""From a diagnosed failing step to its remedy: the smallest set of pins, the patch, and the proof."""
