"""Outside world -> canonical data: readers, filtering, synthetic catalogues (files go to var/)."""
