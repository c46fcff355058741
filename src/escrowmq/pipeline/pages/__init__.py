"""HTML pages of the pipeline: one file each, with charts as SVG, that need nothing from elsewhere."""
