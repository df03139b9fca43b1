"""A report about records as one HTML file: verdict, tables, figures, answers, provenance."""
