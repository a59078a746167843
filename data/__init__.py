"""Outside world -> canonical data: readers, filtering, synthetic catalogs (files go to var/)."""
