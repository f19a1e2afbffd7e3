"""Options of orders that are chosen for given costs: microbatches in flight, times to search an order for."""
