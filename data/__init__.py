"""Makes canonical data sets: readers, filters, splits and a synthetic shop. Writes to var/."""
