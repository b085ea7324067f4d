"""The score of a column that a query does not see."""

# exp gives 0 of it, and a row that is masked entirely stays finite: the mean of the values.
MASKED = -1e30
