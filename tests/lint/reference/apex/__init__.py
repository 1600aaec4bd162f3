"""A stand-in for apex: its classes that compute the same as torch's."""
