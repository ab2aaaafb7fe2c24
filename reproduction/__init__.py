"""The paper's tables and figures: declared, run row by row, written from what was saved."""
