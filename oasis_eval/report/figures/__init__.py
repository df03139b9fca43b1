"""Figures for papers, drawn from records: PDF with text as text, and PNG.

matplotlib is imported in this package alone, with the Agg canvas and without pyplot, so nothing
here needs a display or changes another program's settings.
"""
