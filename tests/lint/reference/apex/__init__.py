"""A stand-in for apex: the classes of it that compute what torch's do."""
