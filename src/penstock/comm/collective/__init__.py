"""Operations in which several ranks take part: sums, exchanges, gathers, clock comparison."""
