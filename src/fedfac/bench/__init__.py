"""How fast is it? Ratios taken in one run, interleaved, of the same job done in several ways."""
